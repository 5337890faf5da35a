"""A process that only owns memory: the far end of benchmarks and fault tests.

    python -m headwater.transfer.target

Reads one JSON line of settings, prints one with its card; then prints its CPU seconds for every line it reads, and ends
with its input.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import msgspec

from headwater.transfer.agent import Agent
from headwater.transfer.options import AgentOptions
from headwater.transfer.regions import Region


class Settings(msgspec.Struct, frozen=True):
    """`key` in hexadecimal, since it must not be an argument that others can see."""

    name: str
    key: str
    backends: list[str]
    num_bytes: int
    block_bytes: int
    kind: str = "shared"
    heartbeat_s: float = 1.0
    peer_timeout_s: float = 4.0
    encrypt: bool = False


def serve(source: TextIO, sink: TextIO) -> None:
    """One target, on these streams."""
    settings = msgspec.json.decode(source.readline(), type=Settings)
    options = AgentOptions(
        key=bytes.fromhex(settings.key),
        backends=tuple(settings.backends),
        heartbeat_s=settings.heartbeat_s,
        peer_timeout_s=settings.peer_timeout_s,
        encrypt=settings.encrypt,
    )
    with Agent(settings.name, options) as agent:
        region = _region(agent, settings)
        first = region.blocks([0])
        _say(sink, card=agent.card().hex(), first=msgspec.msgpack.encode(first).hex())
        for _ in source:
            _say(sink, cpu_s=time.process_time())


def _region(agent: Agent, settings: Settings) -> Region:
    pattern = bytes(range(1, 252))
    data = (pattern * (settings.num_bytes // len(pattern) + 1))[: settings.num_bytes]
    if settings.kind == "file":
        with tempfile.NamedTemporaryFile(prefix="headwater-target-") as file:
            file.write(data)
            file.flush()
            return agent.register(Path(file.name), block_bytes=settings.block_bytes)  # which keeps it open
    if settings.kind == "memory":
        return agent.register(bytearray(data), block_bytes=settings.block_bytes)
    region = agent.allocate(settings.num_bytes, block_bytes=settings.block_bytes)
    region.view[:] = data
    return region


def _say(sink: TextIO, **what: Any) -> None:
    sink.write(json.dumps(what) + "\n")
    sink.flush()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
