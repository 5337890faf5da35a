"""From our configuration to SGLang's arguments, through SGLang's own parser: any flag of SGLang's is taken and checked.

What is said in our words (`--max-model-len`, `--num-kv-blocks`, ...) is passed on as SGLang's flag unless it was said
in SGLang's words too. Chunks are incremental, always: nothing here repeats what was sent.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.config.schema import EngineConfig
from headwater.engines.base import ALONE, Placement
from headwater.errors import ConfigError

_DEFAULTS = EngineConfig()

_FLAGS: tuple[tuple[str, str], ...] = (
    ("dtype", "--dtype"),
    ("max_model_len", "--context-length"),
    ("max_num_seqs", "--max-running-requests"),
    ("max_num_batched_tokens", "--chunked-prefill-size"),
    ("tensor_parallel_size", "--tp-size"),
    ("revision", "--revision"),
)
"""Of ours, and what SGLang calls them."""
_OTHER_NAMES = {"--tp-size": "--tensor-parallel-size", "--dp-size": "--data-parallel-size"}
_OURS = ("--incremental-streaming-output",)


@dataclass(frozen=True, slots=True)
class SglangArguments:
    """What SGLang is to be started with."""

    server: Any
    """Its `ServerArgs`."""
    events_given: bool
    """Whether the operator said where KV events are published."""


def sglang_arguments(
    config: EngineConfig, model: str, events_folder: Path, placement: Placement = ALONE
) -> SglangArguments:
    """Raises `ConfigError` with what SGLang says about its flags."""
    from sglang.srt.server_args import ServerArgs

    given = {word.partition("=")[0].replace("_", "-") for word in config.engine_args}
    events_given = "--kv-events-config" in given
    words = ["--model-path", model, *_own_words(config, given), *_OURS, *config.engine_args]
    if not events_given and config.enable_prefix_caching:
        words += ["--kv-events-config", _events_config(events_folder)]
    parser = _Parser(prog="headwater serve --engine sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(words)
    _settle(parsed, given, placement)
    return SglangArguments(ServerArgs.from_cli_args(parsed), events_given)


def _settle(parsed: argparse.Namespace, given: set[str], placement: Placement) -> None:
    """Engines of one host have GPUs and a port for the other half of a pair each of their own."""
    if "--base-gpu-id" not in given:
        parsed.base_gpu_id = placement.index * parsed.tp_size * parsed.pp_size
    parsed.disaggregation_bootstrap_port += placement.index


def _own_words(config: EngineConfig, given: set[str]) -> list[str]:
    if config.kv_cache_memory is not None:
        raise ConfigError(
            "SGLang is not told bytes of KV storage (--kv-cache-memory)",
            hint="--num-kv-blocks or --mem-fraction-static",
        )
    words: list[str] = []
    for name, flag in _FLAGS:
        value = getattr(config, name)
        if value != getattr(_DEFAULTS, name) and flag not in given and _OTHER_NAMES.get(flag) not in given:
            words += [flag, str(value)]
    if "--page-size" not in given:
        words += ["--page-size", str(config.block_size)]
    if config.num_kv_blocks is not None and "--max-total-tokens" not in given:
        words += ["--max-total-tokens", str(config.num_kv_blocks * config.block_size)]
    if not config.enable_prefix_caching:
        words.append("--disable-radix-cache")
    if config.tokenizer is not None and Path(config.tokenizer).expanduser().is_dir():
        words += ["--tokenizer-path", str(Path(config.tokenizer).expanduser())]
    return words


def _events_config(folder: Path) -> str:
    """Over sockets that only this host's user reaches."""
    return json.dumps(
        {"publisher": "zmq", "endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in an exception, not by ending the process."""

    def error(self, message: str) -> Any:
        raise ConfigError(f"SGLang: {message}", hint="`python -m sglang.launch_server --help` lists SGLang's flags")
