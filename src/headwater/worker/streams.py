"""Which stream of which frontend an engine's stream is."""

from collections.abc import Iterable, Sequence

from headwater.protocol.request import SequenceOutput


class StreamTable:
    """Streams are named by each frontend on its own; towards the engine they get numbers that are never used again."""

    def __init__(self) -> None:
        self._next = 1
        self._origin: dict[int, tuple[bytes, int]] = {}
        self._handles: dict[bytes, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._origin)

    def open(self, peer: bytes, stream: int) -> int | None:
        """The engine's number for a new stream; None if the frontend has one of that name open."""
        streams = self._handles.setdefault(peer, {})
        if stream in streams:
            return None
        handle = streams[stream] = self._next
        self._next += 1
        self._origin[handle] = (peer, stream)
        return handle

    def take(self, peer: bytes, streams: Iterable[int]) -> list[int]:
        """Close some streams of a frontend; unknown ones are ignored."""
        known = self._handles.get(peer, {})
        handles = [known[stream] for stream in dict.fromkeys(streams) if stream in known]
        for handle in handles:
            self._close(handle)
        return handles

    def take_all(self, peer: bytes) -> list[int]:
        """Close all streams of a frontend."""
        return self.take(peer, list(self._handles.get(peer, {})))

    def open_streams(self) -> dict[bytes, list[int]]:
        """What is open, by frontend."""
        return {peer: list(streams) for peer, streams in self._handles.items()}

    def route(self, outputs: Sequence[SequenceOutput]) -> dict[bytes, list[SequenceOutput]]:
        """Outputs by frontend, renamed in place to its streams. Ended ones are closed; those not open are dropped."""
        by_peer: dict[bytes, list[SequenceOutput]] = {}
        origins = self._origin
        for output in outputs:
            origin = origins.get(output.stream)
            if origin is None:
                continue
            if output.finish_reason is not None:
                self._close(output.stream)
            peer, output.stream = origin
            if peer in by_peer:
                by_peer[peer].append(output)
            else:
                by_peer[peer] = [output]
        return by_peer

    def _close(self, handle: int) -> None:
        peer, stream = self._origin.pop(handle)
        streams = self._handles[peer]
        del streams[stream]
        if not streams:
            del self._handles[peer]
