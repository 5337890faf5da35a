"""The contract of back-ends. `headwater.transfer.conformance` is its test.

A back-end moves bytes for the side that begins a transfer; the control session beside it carries everything else
(greeting, attaching, notices, errors, liveness), so a back-end is small. `connect` and `attach` raise
`LinkUnavailable` with a reason when it cannot work with this peer: the next one is tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headwater.transfer.blocks import Chunk
from headwater.transfer.card import AgentCard, RegionCard, RegionKind
from headwater.transfer.memory import Buffer
from headwater.transfer.outcome import Stop
from headwater.transfer.regions import Hold, Region


@dataclass(slots=True)
class Grant:
    """What the owner of a region gives a peer, so that its back-end can reach it."""

    address: int = 0
    fd: int = -1
    """Lent: passing it on duplicates it."""
    offer: bytes = b""


@dataclass(slots=True)
class RemoteRegion:
    """A region of a peer, as one back-end reaches it."""

    card: RegionCard
    hold: Hold
    address: int = 0
    fd: int = -1
    """Owned by the back-end's `attach`, which must keep or close it."""
    offer: bytes = b""
    buffer: Buffer | None = None
    """A mapping of it, released when the owner wants the region back."""
    state: Any = field(default=None)


class PeerSession(Protocol):
    """What a back-end may know of the control session."""

    @property
    def peer(self) -> AgentCard: ...

    @property
    def same_host(self) -> bool:
        """Over a Unix socket: file descriptors can be passed and the process id means something here."""

    @property
    def peer_pid(self) -> int:
        """As seen from here; 0 if out of sight."""

    @property
    def landmark(self) -> tuple[int, bytes]:
        """An address in the peer's memory and what is there."""

    def dial_data(self, stop: Stop) -> Any:
        """A blocking, authenticated stream socket to the peer's TCP address."""


class Link(Protocol):
    """One back-end towards one life of one peer. Used by several threads."""

    lanes: int
    """How many chunks it pays to move at once."""

    def attach(self, remote: RemoteRegion) -> None:
        """Get at a region; called once per region."""

    def prepare(self, region: Region, remote: RemoteRegion, chunk: Chunk, *, write: bool) -> Any:
        """Whatever makes moving this chunk cheap. Kept for as long as the transfer is."""

    def move(self, step: Any, stop: Stop) -> None:
        """Move what was prepared, all of it, before returning. Looks at `stop` whenever it waits."""

    def close(self) -> None:
        """Idempotent. Moves that run fail."""


class Backend(Protocol):
    """One way to move bytes."""

    name: str

    def unavailable(self) -> str:
        """Why it cannot work in this process; empty if it can."""

    def serves(self, local: RegionKind, remote: RegionKind) -> bool: ...

    def connect(self, session: PeerSession, stop: Stop) -> Link: ...

    def grant(self, region: Region, offer: bytes) -> Grant:
        """On the owner's side: what a peer with this back-end needs. Raises `TransferError`."""

    def forget(self, region: Region) -> None:
        """A region of this process was unregistered; nobody uses it any more."""

    def close(self) -> None: ...


Backends = Sequence[Backend]
"""The best first."""
