"""From our configuration to vLLM's arguments, through vLLM's own parser: any flag of vLLM's is taken and checked.

What is said in our words (`--max-model-len`, `--num-kv-blocks`, ...) is passed on as vLLM's flag unless it was said in
vLLM's words too. Flags of vLLM's own HTTP server, which does not run here, are told of and left out.
"""

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from headwater.config.schema import EngineConfig
from headwater.engines.base import Placement
from headwater.errors import ConfigError

_log = logging.getLogger(__name__)

_DEFAULTS = EngineConfig()

_FLAGS: tuple[tuple[str, str], ...] = (
    ("dtype", "--dtype"),
    ("max_model_len", "--max-model-len"),
    ("block_size", "--block-size"),
    ("num_kv_blocks", "--num-gpu-blocks-override"),
    ("kv_cache_memory", "--kv-cache-memory-bytes"),
    ("max_num_seqs", "--max-num-seqs"),
    ("max_num_batched_tokens", "--max-num-batched-tokens"),
    ("tensor_parallel_size", "--tensor-parallel-size"),
)
"""Of ours, and what vLLM calls them."""

_MEMORY_MARGIN = 0.9
_SPARE_BLOCKS = 1
"""vLLM keeps one block for padding."""

_HANDLED = frozenset(("model_tag", "config", "lora_modules", "chat_template", "host", "port", "api_key", "subparser"))


@dataclass(frozen=True, slots=True)
class VllmArguments:
    """What vLLM is to be started with."""

    engine: AsyncEngineArgs
    adapters: dict[str, str]
    """LoRA adapters by name: their folders."""
    events_given: bool
    """Whether the operator said where KV events are published."""


def vllm_arguments(config: EngineConfig, model: str, defaults: Callable[[int], Sequence[str]]) -> VllmArguments:
    """Raises `ConfigError` with what vLLM says about its flags. `defaults`: words of ours for so many processes that
    compute, which flags overrule."""
    words = [*_own_words(config), *config.engine_args]
    parser = make_arg_parser(_Parser(prog="headwater serve --engine vllm", add_help=False))
    parsed = parser.parse_args(["--model", model, *words])
    ours = defaults(parsed.tensor_parallel_size * parsed.pipeline_parallel_size)
    if ours:
        parsed = parser.parse_args(["--model", model, *ours, *words])
    _tell_unused(parser, parsed)
    parsed.disable_log_stats = False
    parsed.enable_logging_iteration_details = True
    adapters = {module.name: module.path for module in parsed.lora_modules or []}
    events = parsed.kv_events_config
    return VllmArguments(
        AsyncEngineArgs.from_cli_args(parsed), adapters, bool(events and events.enable_kv_cache_events)
    )


def _own_words(config: EngineConfig) -> list[str]:
    given = {word.partition("=")[0].replace("_", "-") for word in config.engine_args}
    words: list[str] = []
    for name, flag in _FLAGS:
        value = getattr(config, name)
        if value != getattr(_DEFAULTS, name) and flag not in given:
            words += [flag, str(value + _SPARE_BLOCKS if name == "num_kv_blocks" else value)]
    if not config.enable_prefix_caching:
        words.append("--no-enable-prefix-caching")
    if config.tokenizer is not None and Path(config.tokenizer).expanduser().is_dir():
        words += ["--tokenizer", str(Path(config.tokenizer).expanduser())]
    return words


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """Says what is wrong in an exception, not by ending the process."""

    def error(self, message: str) -> Any:
        raise ConfigError(f"vLLM: {message}", hint="`vllm serve --help=all` lists vLLM's flags")


def _tell_unused(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Flags that only vLLM's HTTP server obeys."""
    for name in FrontendArgs.__dataclass_fields__:
        if name in _HANDLED or not hasattr(parsed, name):
            continue
        if getattr(parsed, name) != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            _log.warning("%s is for vLLM's own HTTP server, which does not run here: it has no effect", flag)


def bind_cores(config: EngineConfig, placement: Placement, num_ranks: int) -> None:
    """On a CPU: give each rank of each instance on this host its own cores, unless the operator has said which.

    vLLM by itself binds every instance to the same first cores, and does not start where there is no NUMA node for each
    rank. As it does, one of several cores is left to the engine core, which would otherwise stand in the way of the
    compute threads that wait for each other.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = cores[placement.index :: placement.count] if len(cores) >= placement.count else []
    num_threads = config.threads or max(1, (len(share) - 1) // num_ranks)
    starts = range(0, num_ranks * num_threads, num_threads)
    bound = len(share) >= num_ranks * num_threads
    parts = [",".join(map(str, share[at : at + num_threads])) for at in starts] if bound else ["nobind"]
    set_default = os.environ.setdefault
    set_default("VLLM_CPU_OMP_THREADS_BIND", "|".join(parts))
    if not bound:
        set_default("OMP_NUM_THREADS", str(config.threads or 1))


def memory_share(placement: Placement, num_ranks: int, reserved_bytes: int = 0) -> list[str]:
    """On a CPU: the part of the memory that is free now, divided among all ranks, as vLLM wants it said.

    vLLM by itself asks for nearly all there is, and does not start where less is free. `reserved_bytes`: of each
    instance, for something else.
    """
    memory = psutil.virtual_memory()
    share = (memory.available / placement.count - reserved_bytes) / num_ranks / memory.total * _MEMORY_MARGIN
    return ["--gpu-memory-utilization", f"{share:.3f}"]


def events_config(endpoint: str, replay_endpoint: str) -> KVEventsConfig:
    """Where vLLM is to publish for us."""
    return KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay_endpoint
    )
