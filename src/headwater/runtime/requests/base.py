"""The request plane contract.

A `WorkerLink` is a frontend's side of one connection to one worker, a `RequestListener` the worker's side of all its
connections. Sending never blocks: frames queue up to a bound and beyond it the connection is broken, because a peer
that does not read is dead or hostile. Callbacks run on the event loop. A peer that vanishes is reported once.
"""

from collections.abc import Callable
from typing import Protocol

from headwater.errors import HeadwaterError
from headwater.protocol.frames import FrontendFrame, WorkerFrame

OnWorkerFrame = Callable[[WorkerFrame], None]
OnFrontendFrame = Callable[[bytes, FrontendFrame], None]
"""(peer, frame): `peer` is the opaque routing id of a connection."""
OnBroken = Callable[[HeadwaterError], None]
OnPeerGone = Callable[[bytes], None]


class WorkerLink(Protocol):
    """One connection to one worker."""

    async def connect(self, on_frame: OnWorkerFrame, on_broken: OnBroken, timeout_s: float) -> str:
        """Say `Hello`, wait for `Welcome`. Returns the worker id. Raises `WorkerLost` or `ProtocolError`."""
        ...

    def send(self, frame: FrontendFrame) -> None:
        """Queue a frame; silently dropped after the connection broke (`on_broken` has told).

        Raises `PayloadTooLarge` for a frame that no message could carry, `Unavailable` for one that a worker of an
        older version does not know.
        """
        ...

    async def close(self) -> None: ...


class RequestListener(Protocol):
    """A worker's end."""

    async def listen(self, worker_id: str, on_frame: OnFrontendFrame, on_gone: OnPeerGone) -> str:
        """Bind and return the address to publish. Answers `Hello` and `Ping` itself."""
        ...

    @property
    def num_peers(self) -> int:
        """Frontends connected now."""
        ...

    def frontend_id(self, peer: bytes) -> str:
        """What a connected peer called itself; empty when it is gone."""
        ...

    def send(self, peer: bytes, frame: WorkerFrame) -> None: ...

    async def close(self) -> None: ...
