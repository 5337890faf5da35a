"""Frames of the request plane.

A worker sends one `StepFrame` per engine step and connection, whatever the number of sequences in it.
"""

import msgspec

from headwater.protocol.request import EngineRequest, ErrorInfo, SequenceOutput


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


FrontendFrame = Hello | Submit | Abort | FetchArtifact | Ping


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


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    nonce: int


WorkerFrame = Welcome | Refused | StepFrame | ArtifactChunk | Pong
