"""Rules that both planes share on the wire: bounds, joined frames, versions.

A message is a msgpack array of frames: whatever was sent to one peer in one turn of the event loop travels together.
"""

from dataclasses import dataclass

from headwater.errors import PayloadTooLarge
from headwater.protocol import PROTOCOL_VERSION

MAX_MESSAGE_BYTES = 32 << 20
MAX_NAME_CHARS = 128
"""Longest id a peer may give itself."""
_MAX_JOINED = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a connection."""

    queue_messages: int = 1000
    """Per direction and side; a peer that lets it fill up is given up."""
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    """A connection that carries nothing for so long, not even heartbeats of the transport, is cut."""
    linger_s: float = 1.0
    """Time for queued messages to leave after a close."""
    max_peers: int = 4096

    @property
    def patience_s(self) -> float:
        """A peer whose connection lives and that says nothing itself for so long is given up: it may only be short of
        processors, and hangs of workers at work are noticed otherwise, and sooner."""
        return 3 * self.silence_s


def join_frames(frames: list[bytes]) -> bytes:
    """One msgpack array of frames that are encoded already."""
    count = len(frames)
    header = bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
    return header + b"".join(frames)


def split_batches(frames: list[bytes]) -> list[list[bytes]]:
    """Runs of frames that each fit into one message."""
    if len(frames) == 1:
        return [frames]
    batches: list[list[bytes]] = [[]]
    size = 0
    for frame in frames:
        if batches[-1] and (size + len(frame) > MAX_MESSAGE_BYTES - 3 or len(batches[-1]) == _MAX_JOINED):
            batches.append([])
            size = 0
        batches[-1].append(frame)
        size += len(frame)
    return batches


def check_size(frame: bytes) -> bytes:
    if len(frame) > MAX_MESSAGE_BYTES - 3:
        raise PayloadTooLarge(f"a message of {len(frame):,} bytes was to be sent; at most {MAX_MESSAGE_BYTES:,} fit")
    return frame


def explain_incompatible(theirs: tuple[int, int], ours: tuple[int, int] = PROTOCOL_VERSION) -> str | None:
    """Why peers of these versions cannot talk; None if they can."""
    if theirs[0] == ours[0] and abs(theirs[1] - ours[1]) <= 1:
        return None
    return (
        f"protocol {theirs[0]}.{theirs[1]} cannot talk to {ours[0]}.{ours[1]}: "
        "the major version must be equal and the minor version at most one apart"
    )
