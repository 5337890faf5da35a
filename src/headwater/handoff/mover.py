"""Moves KV blocks of other workers here, by a transfer agent that is made when it is first needed.

Lives on the event loop; the agent's threads do the moving. `PacedMover` is for engines that only model their KV: the
few bytes they have are moved all the same, and then the time is waited that the modelled bytes would take.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from headwater.engines.base import KvMemory
from headwater.errors import HeadwaterError, TransferCancelled, TransferError, TransferRefused
from headwater.transfer.agent import Agent
from headwater.transfer.blocks import Blocks
from headwater.transfer.options import AgentOptions
from headwater.transfer.outcome import Moved
from headwater.transfer.regions import Region

OnMoved = Callable[[HeadwaterError | None], None]

_encode = msgspec.msgpack.Encoder().encode
_REGION = "kv"


@dataclass(frozen=True, slots=True)
class ReadOrder:
    card: bytes
    """Of the peer's agent."""
    remote: Sequence[bytes]
    """What the peer's `describe` gave, one or several."""
    local: Sequence[int]
    """As many blocks of this worker."""
    timeout_s: float


class Move(Protocol):
    """A read under way."""

    def cancel(self) -> None:
        """It ends soon, and is answered all the same."""
        ...


class Mover(Protocol):
    def describe(self, blocks: Sequence[int]) -> bytes:
        """Blocks of this worker, for a peer to read."""
        ...

    def card(self) -> bytes: ...

    def read(self, order: ReadOrder, on_moved: OnMoved) -> Move | None:
        """Blocks of a peer into blocks of this worker. None: it failed at once, which was told."""
        ...

    def forget(self, peer: str) -> None:
        """Nothing is to be read from that agent any more."""
        ...

    def close(self) -> None: ...


class AgentMover:
    """Implements `Mover`."""

    def __init__(
        self,
        name: str,
        blocks: KvMemory,
        loop: asyncio.AbstractEventLoop,
        options: AgentOptions | None = None,
    ) -> None:
        self._name = name
        self._blocks = blocks
        self._loop = loop
        self._options = options
        self._agent: Agent | None = None
        self._region: Region | None = None
        self._decoder = msgspec.msgpack.Decoder(Blocks)

    @property
    def agent(self) -> Agent:
        return self._open()[0]

    def describe(self, blocks: Sequence[int]) -> bytes:
        return _encode(self._open()[1].blocks(blocks))

    def card(self) -> bytes:
        return self.agent.card()

    def read(self, order: ReadOrder, on_moved: OnMoved) -> Move | None:
        try:
            agent, region = self._open()
            there = _joined([self._decoder.decode(remote) for remote in order.remote])
            if agent.add_peer(order.card) != there.agent:
                raise TransferRefused(f"blocks of {there.agent} came with the card of another agent")
            transfer = agent.read(region.blocks(order.local), there, timeout_s=order.timeout_s)
            future = transfer.post()
        except msgspec.DecodeError as error:
            on_moved(TransferRefused(f"not a description of blocks: {error}"))
        except HeadwaterError as error:
            on_moved(error)
        else:
            future.add_done_callback(partial(self._settled, on_moved))
            return transfer
        return None

    def forget(self, peer: str) -> None:
        if self._agent is not None:
            self._agent.forget_peer(peer)

    def close(self) -> None:
        """Whatever moves is broken off."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _settled(self, on_moved: OnMoved, future: Future[Moved]) -> None:
        """On a thread of the agent."""
        error = future.exception()
        if error is not None and not isinstance(error, HeadwaterError):
            error = TransferError(f"moving KV blocks failed: {error!r}")
        try:
            self._loop.call_soon_threadsafe(on_moved, error)
        except RuntimeError:  # the event loop is gone, and with it who would listen
            return

    def _open(self) -> tuple[Agent, Region]:
        if self._agent is None or self._region is None:
            self._agent = Agent(self._name, self._options)
            self._region = self._agent.register(
                self._blocks.memory, block_bytes=self._blocks.block_bytes, name=_REGION, access="read"
            )
        return self._agent, self._region


class PacedMover:
    """Implements `Mover`: one move after the other over a link of a given speed."""

    def __init__(self, inner: Mover, block_bytes: int, bytes_per_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._block_s = block_bytes / bytes_per_s
        self._loop = loop
        self._free_at = 0.0

    def describe(self, blocks: Sequence[int]) -> bytes:
        return self._inner.describe(blocks)

    def card(self) -> bytes:
        return self._inner.card()

    def read(self, order: ReadOrder, on_moved: OnMoved) -> Move | None:
        begun = max(self._free_at, self._loop.time())
        self._free_at = begun + len(order.local) * self._block_s
        paced = _PacedMove(self._loop, self._free_at, on_moved)
        paced.inner = self._inner.read(order, paced.moved)
        return None if paced.failed else paced

    def forget(self, peer: str) -> None:
        self._inner.forget(peer)

    def close(self) -> None:
        self._inner.close()


class _PacedMove:
    def __init__(self, loop: asyncio.AbstractEventLoop, due: float, on_moved: OnMoved) -> None:
        self._loop = loop
        self._due = due
        self._on_moved = on_moved
        self._timer: asyncio.TimerHandle | None = None
        self.inner: Move | None = None
        self.failed = False

    def moved(self, error: HeadwaterError | None) -> None:
        if error is None:
            self._timer = self._loop.call_at(self._due, self._on_moved, None)
        else:
            self.failed = True
            self._on_moved(error)

    def cancel(self) -> None:
        if self._timer is None:
            if self.inner is not None:
                self.inner.cancel()
        elif not self._timer.cancelled() and self._timer.when() > self._loop.time():
            self._timer.cancel()
            self._loop.call_soon(self._on_moved, TransferCancelled("called off"))


def _joined(parts: list[Blocks]) -> Blocks:
    """Blocks of one region, described in several parts."""
    first = parts[0]
    if any(msgspec.structs.replace(part, runs=first.runs) != first for part in parts):
        raise TransferRefused("blocks of different regions were announced for one sequence")
    return msgspec.structs.replace(first, runs=b"".join([part.runs for part in parts]))


def make_mover(
    name: str, blocks: KvMemory, loop: asyncio.AbstractEventLoop, options: AgentOptions | None = None
) -> Mover:
    mover = AgentMover(name, blocks, loop, options)
    if blocks.modelled_bytes_per_s <= 0:
        return mover
    return PacedMover(mover, blocks.modelled_block_bytes, blocks.modelled_bytes_per_s, loop)
