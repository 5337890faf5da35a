"""From our configuration to SGLang's arguments, through SGLang's own parser: any flag of SGLang's is taken and checked.

What is said in our words (`--max-model-len`, `--num-kv-blocks`, ...) is passed on as SGLang's flag before SGLang's own
words, of which the last holds. Chunks are incremental, always: nothing here repeats what was sent.
"""

import argparse
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.config.schema import EngineConfig
from headwater.engines.base import ALONE, Placement
from headwater.engines.kv_feed.subscription import FeedAddress
from headwater.engines.sglang.storage import attach_store
from headwater.errors import ConfigError

_log = logging.getLogger(__name__)

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
_ENDPOINT = "tcp://*:5557"
"""Where SGLang publishes unless it is told."""
_OURS = ("--incremental-streaming-output",)


@dataclass(frozen=True, slots=True)
class SglangArguments:
    """What SGLang is to be started with."""

    server: Any
    """Its `ServerArgs`."""
    feeds: list[FeedAddress]
    """Where it publishes KV events, one per data-parallel rank."""
    store: bool
    """Whether we have attached the store of the host to it."""


def sglang_arguments(config: EngineConfig, model: str, folder: Path, placement: Placement = ALONE) -> SglangArguments:
    """`folder`: of this worker alone, for sockets of KV events and names of blocks. Raises `ConfigError` with what
    SGLang says about its flags."""
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="headwater serve --engine sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--model-path", model, *_own_words(config), *_OURS, *config.engine_args])
    _settle(parsed, config, placement)
    if parsed.kv_events_config is None and config.enable_prefix_caching:
        parsed.kv_events_config = _events_config(folder, parsed.dp_size)
    stored = placement.store is not None and attach_store(parsed, placement.store, names_in(folder))
    feeds = _feeds(parsed.kv_events_config, parsed.dp_size)
    return SglangArguments(ServerArgs.from_cli_args(parsed), feeds, stored)


def names_in(folder: Path) -> Path:
    """Where the store's back-end in SGLang reads how blocks are named."""
    return folder / "names"


def _settle(parsed: argparse.Namespace, config: EngineConfig, placement: Placement) -> None:
    """Engines of one host have GPUs and a port for the other half of a pair each of their own."""
    given = {word.partition("=")[0].replace("_", "-") for word in config.engine_args}
    if "--base-gpu-id" not in given:
        parsed.base_gpu_id = placement.index * parsed.tp_size * parsed.pp_size
    parsed.disaggregation_bootstrap_port += placement.index


def _own_words(config: EngineConfig) -> list[str]:
    if config.kv_cache_memory is not None:
        raise ConfigError(
            "SGLang is not told bytes of KV storage (--kv-cache-memory)",
            hint="--num-kv-blocks or --mem-fraction-static",
        )
    words: list[str] = []
    for name, flag in _FLAGS:
        value = getattr(config, name)
        if value != getattr(_DEFAULTS, name):
            words += [flag, str(value)]
    words += ["--page-size", str(config.block_size)]
    if config.num_kv_blocks is not None:
        words += ["--max-total-tokens", str(config.num_kv_blocks * config.block_size)]
    if not config.enable_prefix_caching:
        words.append("--disable-radix-cache")
    if config.tokenizer is not None and Path(config.tokenizer).expanduser().is_dir():
        words += ["--tokenizer-path", str(Path(config.tokenizer).expanduser())]
    return words


def _events_config(folder: Path, num_ranks: int) -> str | None:
    """Over sockets that only this host's user reaches, which SGLang has for one rank alone."""
    if num_ranks > 1:
        _log.warning(
            "SGLang with --dp-size %d tells of no KV events: what it has cached will only be guessed; give "
            '--kv-events-config with "tcp://*:PORT" to change that',
            num_ranks,
        )
        return None
    return json.dumps(
        {"publisher": "zmq", "endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    )


def _feeds(events_config: str | None, num_ranks: int) -> list[FeedAddress]:
    """As SGLang reads it: each rank is at the port of the first one and its own number."""
    try:
        told = json.loads(events_config or "{}")
        if told.get("publisher") != "zmq":
            return []
        endpoint, topic, replay = told.get("endpoint", _ENDPOINT), told.get("topic") or "", told.get("replay_endpoint")
        return [
            FeedAddress.published(
                _at_rank(endpoint, rank), topic, _at_rank(replay, rank) if replay else None, "127.0.0.1"
            )
            for rank in range(num_ranks)
        ]
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"SGLang: --kv-events-config {events_config}: {error}") from error


def _at_rank(endpoint: str, rank: int) -> str:
    where, _, port = endpoint.rpartition(":")
    return f"{where}:{int(port) + rank}" if rank else endpoint


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in an exception, not by ending the process."""

    def error(self, message: str) -> Any:
        raise ConfigError(f"SGLang: {message}", hint="`python -m sglang.launch_server --help` lists SGLang's flags")
