"""Two processes, scattered blocks, and the columns of nixlbench: what moving bytes costs here.

CPU seconds are of both processes, user and system. Block positions are drawn with a fixed seed, different ones on both
sides; every byte of the last transfer is checked.
"""

import json
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from headwater.errors import DataCorrupted, LinkUnavailable, TransferError
from headwater.transfer.agent import Agent
from headwater.transfer.blocks import Blocks, pack_runs
from headwater.transfer.options import AgentOptions
from headwater.transfer.regions import Region
from headwater.transfer.target import Settings
from headwater.transfer.transfer import Transfer

_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be measured."""

    backend: str
    block_bytes: int
    batch: int
    write: bool = False
    checksums: bool = False
    seconds: float = 1.0
    region_bytes: int = 256 << 20
    encrypt: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row, measured. Latencies are of whole transfers."""

    backend: str
    op: str
    block_bytes: int
    batch: int
    gb_s: float
    """Median; GB = 1e9 bytes."""
    best_gb_s: float
    latency_us: float
    p99_us: float
    prepare_us: float
    """Making and laying out the transfer, once."""
    cpu_s_per_gb: float
    num_transfers: int


class Target:
    """The far end, in a process of its own."""

    def __init__(self, settings: Settings) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater.transfer.target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self._ask(msgspec.json.encode(settings).decode())
        self.card = bytes.fromhex(hello["card"])
        self._first = msgspec.msgpack.decode(bytes.fromhex(hello["first"]), type=Blocks)

    def blocks(self, indices: list[int]) -> Blocks:
        return msgspec.structs.replace(self._first, runs=pack_runs(indices))

    def cpu_s(self) -> float:
        return float(self._ask("cpu")["cpu_s"])

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait(_START_S)

    def _ask(self, line: str) -> dict[str, Any]:
        if self.process.stdin is None or self.process.stdout is None:
            raise TransferError("the target has no pipes")
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise TransferError("the target process ended")
        return dict(json.loads(answer))


@contextmanager
def running(case: Case) -> Iterator[tuple[Agent, Target]]:
    """Both ends of a case."""
    key = secrets.token_bytes(32)
    options = AgentOptions(key=key, backends=(case.backend,), encrypt=case.encrypt)
    num_bytes = _region_bytes(case)
    kind = {"file": "file", "shm": "shared"}.get(case.backend, "memory")
    target = Target(
        Settings("target", key.hex(), [case.backend], num_bytes, case.block_bytes, kind, encrypt=case.encrypt)
    )
    try:
        with Agent("bench", options) as agent:
            agent.add_peer(target.card)
            yield agent, target
    finally:
        target.close()


def measure(case: Case) -> Row:
    """Run one case. Raises `LinkUnavailable` when the back-end does not work here."""
    with running(case) as (agent, target):
        return Bench(case, agent, target).row()


class Bench:
    """A case that is ready to run, in slices, so that others can take turns with it."""

    def __init__(self, case: Case, agent: Agent, target: Target) -> None:
        self._case = case
        self._target = target
        self._region = agent.register(bytearray(_region_bytes(case)), block_bytes=case.block_bytes)
        rng = random.Random(7)
        num_blocks = _region_bytes(case) // case.block_bytes
        self._here = rng.sample(range(num_blocks), case.batch)
        self._there = rng.sample(range(num_blocks), case.batch)
        self._transfer = self._made(agent)
        self._transfer.run()  # connects
        started = time.perf_counter()
        self._transfer = self._made(agent)
        self._transfer.prepare()
        self._prepare_us = (time.perf_counter() - started) * 1e6
        self._transfer.run()
        self._laps: list[float] = []
        self._cpu_s = 0.0

    def run(self, seconds: float) -> tuple[list[float], float]:
        """Transfers back to back for so long; the seconds each took, and the CPU seconds of all."""
        laps: list[float] = []
        cpu_s = time.process_time() + self._target.cpu_s()
        end = time.perf_counter() + seconds
        while (started := time.perf_counter()) < end:
            self._transfer.run()
            laps.append(time.perf_counter() - started)
        cpu_s = time.process_time() + self._target.cpu_s() - cpu_s
        self._laps += laps
        self._cpu_s += cpu_s
        return laps, cpu_s

    def row(self) -> Row:
        """What was measured; measures first if nothing was."""
        if not self._laps:
            self.run(self._case.seconds)
        if not self._case.write:
            _check(self._region, self._here, self._there, self._case.block_bytes)
        case, laps = self._case, sorted(self._laps)
        num_bytes = case.block_bytes * case.batch
        middle = median(laps)
        return Row(
            case.backend,
            "write" if case.write else "read",
            case.block_bytes,
            case.batch,
            num_bytes / middle / 1e9,
            num_bytes / laps[0] / 1e9,
            middle * 1e6,
            laps[int(len(laps) * 0.99)] * 1e6,
            self._prepare_us,
            self._cpu_s / (num_bytes * len(laps)) * 1e9,
            len(laps),
        )

    def _made(self, agent: Agent) -> Transfer:
        order = agent.write if self._case.write else agent.read
        return order(self._region.blocks(self._here), self._target.blocks(self._there), checksums=self._case.checksums)


def _check(region: Region, here: list[int], there: list[int], size: int) -> None:
    """The target's memory counts 1 to 251 over and over."""
    for to, at in zip(here, there, strict=True):
        expected = bytes((at * size + offset) % 251 + 1 for offset in range(min(size, 251)))
        if region.view[to * size : to * size + len(expected)] != expected:
            raise DataCorrupted(f"block {to} does not hold what block {at} of the target does")


def _region_bytes(case: Case) -> int:
    least = case.block_bytes * case.batch
    blocks = max(case.region_bytes, least) // case.block_bytes
    if case.batch < 1 or case.block_bytes < 1:
        raise LinkUnavailable(f"nothing to move: {case.batch} blocks of {case.block_bytes} bytes")
    return blocks * case.block_bytes
