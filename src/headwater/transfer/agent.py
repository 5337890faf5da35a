"""An agent: one per process, with a name for good and a generation for its life.

    agent = Agent("prefill-0")
    region = agent.allocate(64 << 20, block_bytes=4096)          # or register(anything with a buffer)
    agent.add_peer(card)                                         # bytes from the peer's `card()`; connects nothing
    agent.write(region.blocks([3, 4, 9]), there, tag=b"r1", payload=b"first token").run()

Which memory of a peer is meant is said by a `Blocks` descriptor that the peer made. Errors are of the tree under
`TransferError`; both sides learn of a failure within `peer_timeout_s` and a second.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headwater.clock import Clock, RealClock
from headwater.errors import ConfigError, RegionGone, TransferError, TransferRefused, TransferTimeout
from headwater.perf.model import PerfModel
from headwater.transfer.base import Backend
from headwater.transfer.blocks import Blocks
from headwater.transfer.card import CARD_VERSION, Access, AgentCard, RegionCard, decode_card, encode_card
from headwater.transfer.choice import make_backends
from headwater.transfer.greeting import Identity
from headwater.transfer.memory import Buffer, allocate, buffer_of
from headwater.transfer.objects import ObjectRange, locate
from headwater.transfer.options import AgentOptions
from headwater.transfer.outcome import Inbox, Moved, Notice, Stop
from headwater.transfer.peers import Dialler, LinkReport, Lookup, Peers, Session, new_token
from headwater.transfer.reactor import Reactor
from headwater.transfer.reception import Reception
from headwater.transfer.regions import Region, RegionTable, describe
from headwater.transfer.transfer import Order, Transfer, checksums
from headwater.transfer.wire import MAX_NOTICE_BYTES, MAX_TAG_BYTES, Done

DEFAULT_TIMEOUT_S = 30.0
_SAMPLE_S = 1e-3
"""The time model learns nothing from a second transfer within so long, and a sample costs as much as a small one."""
_MAX_GENERATION = 1 << 62


class Agent:
    """See the module docstring. All methods may be called from any thread."""

    def __init__(
        self,
        name: str,
        options: AgentOptions | None = None,
        *,
        perf: PerfModel | None = None,
        clock: Clock | None = None,
        lookup: Lookup | None = None,
        backends: Sequence[Backend] | None = None,
    ) -> None:
        """`lookup` finds the present card of a peer by name; it is asked when a peer lives anew or is not known."""
        if not 0 < len(name) <= 128:
            raise ConfigError(f"an agent's name has 1 to 128 characters, not {len(name)}")
        self.name = name
        self.options = options or AgentOptions()
        self.clock = clock or RealClock()
        self.perf = perf or PerfModel()
        self.generation = _new_generation(self.clock)
        self.regions = RegionTable(name, self.generation)
        self._perf_lock = threading.Lock()
        self._observed = float("-inf")
        self._token = b"" if self.options.key else new_token()
        self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._backends = list(backends) if backends is not None else make_backends(self.options.backends)
        self._offered = [backend.name for backend in self._backends if not backend.unavailable()]
        self._reactor = Reactor(name, self.clock)
        self._inbox = Inbox(self._reactor, self.options.max_notices)
        self._movers = ThreadPoolExecutor(self.options.movers, thread_name_prefix=f"mover-{name}")
        # Apart from the movers, which wait for peers: two agents that wait for each other must still answer.
        self._servants = ThreadPoolExecutor(2, thread_name_prefix=f"servant-{name}")
        self._posted = threading.BoundedSemaphore(self.options.max_posted)
        me = Identity(name, self.generation, self.options.key or self._token, self.card, self.options.encrypt)
        self._reception = Reception(self, me, self._reactor)
        self.peers = Peers(Dialler(me, self.options.key), self._boot_id, self._reception.start, lookup)
        self._closed = False
        self._reactor.start()
        self._reception.open()

    # Memory

    def allocate(self, num_bytes: int, *, block_bytes: int = 0, name: str = "", access: Access = "both") -> Region:
        """Zeroed memory that peers of this host reach fastest."""
        buffer = allocate(num_bytes)
        return self._add(buffer, "shared", name=name, block_bytes=block_bytes, access=access)

    def register(self, source: Any, *, block_bytes: int = 0, name: str = "", access: Access = "both") -> Region:
        """Memory with the buffer protocol, a contiguous tensor, a `Path` to a file of this host, an `ObjectRange`
        (access="read"), or what `headwater.transfer.memory.allocate` gave, which stays the caller's to release after
        `close`."""
        if isinstance(source, ObjectRange):
            return self._add(_object_buffer(source), "object", name=name, block_bytes=block_bytes, access=access)
        if isinstance(source, Path):
            return self._add(_file_buffer(source, access), "file", name=name, block_bytes=block_bytes, access=access)
        if isinstance(source, Buffer):
            return self._add(source.shared(), "shared", name=name, block_bytes=block_bytes, access=access)
        buffer = buffer_of(source)
        kind = "memory" if buffer.view is not None else "device"
        return self._add(buffer, kind, name=name, block_bytes=block_bytes, access=access)

    def unregister(self, region: Region, timeout_s: float = 10.0) -> None:
        """Take memory back: running transfers end with `RegionGone`, and on return no peer touches it any more.

        Raises `TransferTimeout` if a peer did not let go in time; its session is then broken off, but a stopped
        process on this host may still write when it wakes: do not use that memory again before it is gone.
        """
        self.regions.remove(region)
        free = threading.Event()
        region.hold.revoke(free.set)
        stop = Stop(self.clock, timeout_s)
        try:
            self._reception.take_back(region, stop)
            if not free.wait(stop.remaining_s):
                raise TransferTimeout(f"region {region.card.id} is still being moved after {timeout_s:g} s")
        finally:
            if free.is_set():
                for backend in self._backends:
                    backend.forget(region)
                region.buffer.release()

    # Peers

    def card(self) -> bytes:
        """What peers need, to be sent by any channel that is trusted."""
        host, port = self._reception.address
        return encode_card(
            AgentCard(
                CARD_VERSION,
                self.name,
                self.generation,
                self._boot_id,
                self._reception.unix,
                self.options.advertised_host or host,
                port,
                self._token,
                self._offered,
                self.regions.cards(),
            )
        )

    def add_peer(self, card: bytes) -> str:
        """Know a peer, or its new life. Nothing is connected before it is used. The peer's name."""
        decoded = decode_card(card)
        self.peers.add(decoded)
        return decoded.name

    def forget_peer(self, name: str) -> None:
        self.peers.remove(name)

    def blocks_of(self, peer: str, region: str, indices: Iterable[int]) -> Blocks:
        """Blocks of a named region of a peer, as its card shows it."""
        card = self.peers.card(peer)
        found: RegionCard | None = next((known for known in card.regions if known.name == region), None)
        if found is None:
            raise RegionGone(f"the card of {peer} shows no region named {region!r}")
        return describe(found, card.name, card.generation, indices)

    def links(self) -> list[LinkReport]:
        """Which back-end serves whom, and why."""
        return self.peers.reports()

    # Transfers

    def read(self, local: Blocks, remote: Blocks, **how: Any) -> Transfer:
        """Prepare moving blocks of a peer here. See `write`."""
        return self._transfer(False, local, remote, **how)

    def write(self, local: Blocks, remote: Blocks, **how: Any) -> Transfer:
        """Prepare moving blocks to a peer: nothing happens before `post` or `run`.

        `tag` (bytes) and `payload` (bytes) are delivered to the peer with the completion; `timeout_s`; `checksums`
        compares both sides afterwards; `backends` restricts the choice by name.
        """
        return self._transfer(True, local, remote, **how)

    def estimate_ms(self, peer: str, num_bytes: int) -> float:
        """How long moving so much to or from a peer takes, from what was seen so far; 0 if nothing was."""
        with self._perf_lock:
            return self.perf.transfer_ms(_link_name(self.name, peer), num_bytes)

    # Notices

    def notify(self, peer: str, tag: bytes, payload: bytes = b"", timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """User bytes without a transfer."""
        _check_notice(tag, payload)
        stop = Stop(self.clock, timeout_s)
        session = self.peers.session(peer, self.peers.card(peer).generation, stop)
        session.outbound.send(Done(tag, payload))

    def expect(self, peer: str, tag: bytes, timeout_s: float = DEFAULT_TIMEOUT_S) -> Future[Notice]:
        """The notice of a peer with that tag, or the error that prevents it."""
        return self._inbox.expect(peer, self.peers.generation(peer), tag, timeout_s)

    def notices(self, most: int = 256) -> list[Notice]:
        """Notices that nobody expected, failures of transfers among them."""
        return self._inbox.take(most)

    # Life

    def close(self) -> None:
        """Break off everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._reception.close()
        self.peers.close()
        self._inbox.close()
        self._movers.shutdown()
        self._servants.shutdown()
        self._reactor.close()
        for backend in self._backends:
            backend.close()
        for region in self.regions.all():
            region.hold.revoke(region.buffer.release)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # For the parts of an agent

    def session(self, name: str, generation: int, stop: Stop) -> Session:
        return self.peers.session(name, generation, stop)

    def usable(self, wanted: tuple[str, ...] | None) -> list[Backend]:
        return [backend for backend in self._backends if wanted is None or backend.name in wanted]

    def backend(self, name: str) -> Backend | None:
        return next((backend for backend in self._backends if backend.name == name), None)

    def submit(self, work: Callable[[], None]) -> bool:
        if self._closed or not self._posted.acquire(blocking=False):
            return False
        self._movers.submit(work).add_done_callback(lambda _: self._posted.release())
        return True

    def in_background(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closing: nobody waits for an answer any more
            self._servants.submit(work)

    def soon(self, work: Callable[[], None]) -> None:
        self._reactor.call(work)

    def observe(self, peer: str, moved: Moved) -> None:
        now = self.clock.now()
        if now - self._observed < _SAMPLE_S:
            return
        self._observed = now
        with self._perf_lock:
            self.perf.observe_transfer(_link_name(self.name, peer), moved.num_bytes, moved.duration_ms)

    def deliver(self, notice: Notice) -> None:
        self._inbox.deliver(notice)

    def lose(self, peer: str, generation: int, error: TransferError) -> None:
        self._inbox.lose(peer, generation, error)

    def sums(self, blocks: Blocks) -> bytes:
        if (blocks.agent, blocks.generation) != (self.name, self.generation):
            raise TransferRefused("the descriptor is of another agent or another life")
        return checksums(self.regions.find(blocks.region), blocks)

    def _add(self, buffer: Buffer, kind: Any, *, name: str, block_bytes: int, access: Access) -> Region:
        try:
            block_bytes = block_bytes or buffer.num_bytes
            return self.regions.add(buffer, kind, name=name, block_bytes=block_bytes, access=access)
        except BaseException:
            buffer.release()
            raise

    def _transfer(
        self,
        write: bool,
        local: Blocks,
        remote: Blocks,
        *,
        tag: bytes = b"",
        payload: bytes | None = None,
        **how: Any,
    ) -> Transfer:
        if (local.agent, local.generation) != (self.name, self.generation):
            raise TransferRefused(f"the local blocks are of {local.agent}, or of a former life of this agent")
        if tag and payload is None:
            payload = b""
        _check_notice(tag, payload or b"")
        region = self.regions.find(local.region)
        if not write and region.buffer.readonly:
            raise TransferRefused(f"region {region.card.id} is read-only memory: nothing can be read into it")
        timeout_s = how.pop("timeout_s", DEFAULT_TIMEOUT_S)
        how.setdefault("checksums", self.options.checksums)
        return Transfer(self, Order(write, region, local, remote, tag, payload, **how), timeout_s)


def _new_generation(clock: Clock) -> int:
    """Later lives have larger ones; two lives of one instant differ."""
    return (int(clock.epoch() * 1e6) << 10 | secrets.randbelow(1 << 10)) % _MAX_GENERATION


def _link_name(here: str, there: str) -> str:
    return f"{here}|{there}"


def _check_notice(tag: bytes, payload: bytes) -> None:
    if len(tag) > MAX_TAG_BYTES or len(payload) > MAX_NOTICE_BYTES:
        raise TransferRefused(
            f"a tag of {len(tag)} and a payload of {len(payload)} bytes: at most {MAX_TAG_BYTES} and {MAX_NOTICE_BYTES}"
        )


def _object_buffer(source: ObjectRange) -> Buffer:
    locate(source.url)
    if source.num_bytes < 1 or source.offset < 0:
        raise TransferRefused(f"{source.num_bytes} bytes from {source.offset} on are no range of an object")
    buffer = Buffer(None, None, 0, source.num_bytes)
    buffer.readonly, buffer.origin = True, source
    return buffer


def _file_buffer(path: Path, access: Access) -> Buffer:
    try:
        fd = os.open(path, (os.O_RDONLY if access == "read" else os.O_RDWR) | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise TransferRefused(f"cannot open {path}: {error.strerror}") from None
    num_bytes = os.fstat(fd).st_size
    buffer = Buffer(None, None, 0, num_bytes)
    buffer.fd = fd
    return buffer
