"""A transfer: prepared once, posted as often as wanted.

    idle ── post/run ──> moving ──> done | failed ── post/run ──> moving ...

The bytes at the destination mean nothing until it is done. If it fails, the peer is told so with the tag.
"""

import os
import threading
import zlib
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from sys import byteorder
from typing import Any, Literal, Protocol

from headwater.clock import Clock
from headwater.errors import (
    DataCorrupted,
    LinkUnavailable,
    Overloaded,
    TransferCancelled,
    TransferError,
    TransferRefused,
)
from headwater.transfer.base import Backend, Link
from headwater.transfer.blocks import Blocks, Chunk, check_pair, chunks_of
from headwater.transfer.outcome import Moved, Stop
from headwater.transfer.peers import Session
from headwater.transfer.regions import Region
from headwater.transfer.wire import Done, Failed

State = Literal["idle", "moving", "done", "failed"]
_WAIT_S = 0.2


class Mover(Protocol):
    """What a transfer needs of its agent."""

    @property
    def clock(self) -> Clock: ...

    def session(self, name: str, generation: int, stop: Stop) -> Session: ...

    def usable(self, wanted: tuple[str, ...] | None) -> list[Backend]: ...

    def submit(self, work: Any) -> bool:
        """False if too much is queued."""

    def observe(self, peer: str, moved: Moved) -> None: ...


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be moved."""

    write: bool
    region: Region
    local: Blocks
    remote: Blocks
    tag: bytes = b""
    payload: bytes | None = None
    checksums: bool = False
    backends: tuple[str, ...] | None = None


@dataclass(slots=True)
class _Plan:
    """Steps made for one link; void when the session is another one."""

    session: Session
    backend: Backend
    link: Link
    steps: list[Any]
    remote_hold: Any


class Transfer:
    """Made by `Agent.read` and `Agent.write`."""

    def __init__(self, mover: Mover, order: Order, timeout_s: float) -> None:
        order.local.check(order.region.card.num_bytes)
        check_pair(order.local, order.remote)
        self.num_bytes = order.local.num_bytes
        self.order = order
        self.timeout_s = timeout_s
        self._mover = mover
        self._lock = threading.Lock()
        self._chunks: list[Chunk] | None = None
        self._plan: _Plan | None = None
        self._stop: Stop | None = None
        self._state: State = "idle"

    def check(self) -> State:
        """How the last posting stands; never blocks."""
        return self._state

    def prepare(self) -> str:
        """Connect, choose a back-end (returned) and lay everything out, so that the first posting costs no more than
        the others. Not needed: posting does it too."""
        return self._ready(Stop(self._mover.clock, self.timeout_s)).backend.name

    def post(self) -> Future[Moved]:
        """Move in the background. Raises `TransferError` while it is still moving, `Overloaded` beyond the bound."""
        stop = self._begin()
        future: Future[Moved] = Future()
        future.set_running_or_notify_cancel()
        if not self._mover.submit(lambda: self._settle(future, stop)):
            self._state = "idle"
            raise Overloaded("too many transfers are posted: wait for some to end", retry_after_s=0.1)
        return future

    def run(self) -> Moved:
        """Move in this thread."""
        return self._carry_out(self._begin())

    def cancel(self) -> None:
        """Call a posted transfer off; it ends with `TransferCancelled` soon, or done if it was too late."""
        stop = self._stop
        if stop is not None:
            stop.fail(TransferCancelled("called off"))

    def _begin(self) -> Stop:
        with self._lock:
            if self._state == "moving":
                raise TransferError("the transfer is still moving")
            self._state = "moving"
            self._stop = stop = Stop(self._mover.clock, self.timeout_s)
        return stop

    def _settle(self, future: Future[Moved], stop: Stop) -> None:
        try:
            moved = self._carry_out(stop)
        except BaseException as error:  # noqa: BLE001  raised again by whoever asks the future
            future.set_exception(error)
        else:
            future.set_result(moved)

    def _carry_out(self, stop: Stop) -> Moved:
        try:
            moved = self._move(stop)
        except BaseException as error:
            self._report(error if isinstance(error, TransferError) else TransferError("the other side failed"))
            self._state = "failed"
            raise
        self._state = "done"
        return moved

    def _move(self, stop: Stop) -> Moved:
        while True:
            plan = self._ready(stop)
            started = self._mover.clock.now()
            plan.session.outbound.guard(stop)
            try:
                self._move_steps(plan, stop)
                if self.order.checksums:
                    self._verify(plan, stop)
                stop.check()
                break
            except LinkUnavailable as error:
                plan.session.refuse(plan.backend.name, error.message)
                self._plan = None
            finally:
                plan.session.outbound.release(stop)
        moved = Moved(self.num_bytes, (self._mover.clock.now() - started) * 1e3, plan.backend.name)
        if self.order.payload is not None:
            plan.session.outbound.send(Done(self.order.tag, self.order.payload, self.num_bytes))
        self._mover.observe(self.order.remote.agent, moved)
        return moved

    def _move_steps(self, plan: _Plan, stop: Stop) -> None:
        if plan.link.lanes > 1 and len(plan.steps) > 1:
            _Lanes(self._mover, plan.link, plan.steps, stop).run()
            return
        for step in plan.steps:
            stop.check()
            plan.link.move(step, stop)

    def _ready(self, stop: Stop) -> _Plan:
        """The plan made last time if its link still stands, else a new one."""
        remote = self.order.remote
        plan = self._plan
        if plan is not None and plan.session.outbound.is_up() and not plan.remote_hold.revoked:
            return plan
        session = self._mover.session(remote.agent, remote.generation, stop)
        self._plan = plan = self._planned(session, stop)
        return plan

    def _planned(self, session: Session, stop: Stop) -> _Plan:
        order, kind = self.order, session.kind(self.order.remote.region, stop)
        while True:
            backend, link = session.link(self._mover.usable(order.backends), (order.region.card.kind, kind), stop)
            try:
                remote = session.remote(backend, link, order.remote.region, stop)
                order.remote.check(remote.card.num_bytes)
                _check_access(order.write, remote.card.access)
                if self._chunks is None:
                    self._chunks = chunks_of(order.local, order.remote)
                with order.region.hold, remote.hold:
                    steps = [link.prepare(order.region, remote, chunk, write=order.write) for chunk in self._chunks]
                return _Plan(session, backend, link, steps, remote.hold)
            except LinkUnavailable as error:
                session.refuse(backend.name, error.message)

    def _verify(self, plan: _Plan, stop: Stop) -> None:
        theirs = array("I", plan.session.outbound.sums(self.order.remote, stop))
        if byteorder == "big":
            theirs.byteswap()
        ours = array("I", _sums(self.order.region, self.order.local))
        if theirs != ours:
            bad = [at for at, (here, there) in enumerate(zip(ours, theirs, strict=False)) if here != there]
            raise DataCorrupted(
                f"{len(bad)} of {len(ours)} blocks differ between the sides, first at position {bad[:1]}"
            )

    def _report(self, error: TransferError) -> None:
        """Tell the peer, if it can be told; if not, its side of the session is broken too."""
        plan = self._plan
        if plan is not None and plan.session.outbound.lost is None:
            plan.session.outbound.send(Failed(self.order.tag, error.code, error.message[:1024]))


def checksums(region: Region, blocks: Blocks) -> bytes:
    """CRC-32 of every block, little-endian. Checks the descriptor first."""
    blocks.check(region.card.num_bytes)
    with region.hold:
        numbers = array("I", _sums(region, blocks))
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _sums(region: Region, blocks: Blocks) -> Iterator[int]:
    size, fd = blocks.block_bytes, region.buffer.fd
    starts = (blocks.base + index * blocks.stride for index in blocks.indices())
    if region.card.kind == "file":
        return (zlib.crc32(os.pread(fd, size, at)) for at in starts)
    view = region.view
    return (zlib.crc32(view[at : at + size]) for at in starts)


def _check_access(write: bool, access: str) -> None:
    if access == ("read" if write else "write"):
        raise TransferRefused(f"the region may not be {'written' if write else 'read'} by peers")


class _Lanes:
    """Works a list of steps off with as many threads as the link can use; the caller's is one of them."""

    def __init__(self, mover: Mover, link: Link, steps: list[Any], stop: Stop) -> None:
        self._mover = mover
        self._link = link
        self._steps = iter(steps)
        self._helpers = min(link.lanes, len(steps)) - 1
        self._stop = stop
        self._changed = threading.Condition()
        self._active = 0
        self._error: BaseException | None = None

    def run(self) -> None:
        for _ in range(self._helpers):
            if not self._mover.submit(self._work):
                break
        self._work()
        if self._helpers > 0:
            with self._changed:
                while self._active:
                    self._changed.wait(_WAIT_S)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        with self._changed:
            self._active += 1
        try:
            while (step := self._next()) is not None:
                self._stop.check()
                self._link.move(step, self._stop)
        except BaseException as error:  # noqa: BLE001  raised again by the thread that owns the transfer
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def _next(self) -> Any:
        with self._changed:
            return None if self._error is not None else next(self._steps, None)
