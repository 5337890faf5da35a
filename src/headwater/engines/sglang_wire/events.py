"""Where an SGLang server publishes its KV events, from the `kv_events` of its `/server_info`."""

from typing import Any

from headwater.engines.kv_feed.subscription import FeedAddress
from headwater.engines.sglang_wire.settings import SglangSettings

_MAX_RANKS = 4096
_MAX_PORT = 65535


def feeds_of(settings: SglangSettings, host: str) -> list[FeedAddress]:
    """One feed per data-parallel rank, at consecutive ports. `host`: of the server; it stands for wildcards."""
    told = settings.kv_events
    if told is None or settings.block_size is None or told.get("publisher") != "zmq":
        return []
    base, replay, ranks = (
        _port(told, "endpoint_port_base"),
        _port(told, "replay_endpoint_port_base"),
        told.get("dp_size"),
    )
    if base is None or not isinstance(ranks, int) or not 0 < ranks <= _MAX_RANKS or base + ranks > _MAX_PORT + 1:
        return []
    where, topic = str(told.get("endpoint_host") or "*"), str(told.get("topic") or "")
    return [
        FeedAddress.published(
            f"tcp://{where}:{base + rank}",
            topic,
            f"tcp://*:{replay + rank}" if replay is not None else None,
            host,
        )
        for rank in range(ranks)
    ]


def _port(told: dict[str, Any], name: str) -> int | None:
    port = told.get(name)
    return port if isinstance(port, int) and 0 < port <= _MAX_PORT else None
