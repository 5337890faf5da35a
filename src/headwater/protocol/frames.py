"""Frames of the request plane.

A worker sends one `StepFrame` per engine step and connection, whatever the number of sequences in it.
"""

import msgspec

from headwater.protocol.request import EngineRequest, ErrorInfo, SequenceOutput
from headwater.types import Role


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of a connection, from the frontend. Answered with `Welcome` or `Refused`."""

    frontend_id: str
    version: tuple[int, int]


class Submit(msgspec.Struct, frozen=True, tag="sub"):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these sequences; unknown ones are ignored. No output follows for them."""

    streams: list[int]


class FetchArtifact(msgspec.Struct, frozen=True, tag="fetch"):
    """Ask for a part of a file that the model card names by digest."""

    digest: str
    offset: int
    length: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    nonce: int


class ReleaseBlocks(msgspec.Struct, frozen=True, tag="release"):
    """The KV blocks of these exported sequences are read no more; those that still run are stopped. Since 1.1."""

    streams: list[int]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what runs within so many seconds, let go of the rest, leave. Since 1.1."""

    within_s: float


class SetRole(msgspec.Struct, frozen=True, tag="role"):
    """What is to be sent to this worker from now on; what runs goes on. Since 1.1."""

    role: Role


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Finish what runs, take nothing new, and give the device's memory back until `Wake`. Since 1.1."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Since 1.1."""


FrontendFrame = Hello | Submit | Abort | FetchArtifact | Ping | ReleaseBlocks | Drain | SetRole | Sleep | Wake

SINCE: dict[type[msgspec.Struct], tuple[int, int]] = dict.fromkeys((Drain, ReleaseBlocks, SetRole, Sleep, Wake), (1, 1))
"""Frames that peers of an older version do not know: they are not sent there."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    worker_id: str
    version: tuple[int, int]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The connection cannot be used; the reason is final."""

    error: ErrorInfo


class StepFrame(msgspec.Struct, frozen=True, tag="step"):
    outputs: list[SequenceOutput]


class ArtifactChunk(msgspec.Struct, frozen=True, tag="chunk"):
    digest: str
    offset: int
    total: int
    data: bytes
    error: ErrorInfo | None = None


class BlocksReady(msgspec.Struct, frozen=True, tag="ready"):
    """KV blocks of an exported sequence can be read. Precedes the first token, which comes in a `StepFrame`."""

    stream: int
    first_block: int
    """Number of the first of them in the sequence."""
    num_blocks: int
    blocks: bytes
    """Where they lie: a `headwater.transfer.blocks.Blocks`, in msgpack."""
    card: bytes = b""
    """Of the transfer agent; with the first blocks of a sequence."""


class PrefillWaits(msgspec.Struct, frozen=True, tag="waits"):
    """An exported sequence is still in line at its worker, which goes on. Only to those that asked for such words."""

    stream: int
    num_ahead: int
    """Sequences that prefill or wait before it."""
    expected_ms: float
    """Until its first token; 0: no telling."""
    silence_ms: float
    """The longest that may pass until the next word of it, or its first blocks."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    nonce: int


WorkerFrame = Welcome | Refused | StepFrame | ArtifactChunk | Pong | BlocksReady | PrefillWaits
