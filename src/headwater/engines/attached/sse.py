"""Server-sent events out of pieces of a body."""

from headwater.errors import WorkerLost

MAX_EVENT_BYTES = 16 << 20


class EventSplitter:
    """Feeds on pieces and gives the `data` of complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Raises `WorkerLost` when an event does not end."""
        data = self._rest + piece if self._rest else piece
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise WorkerLost(f"the attached server sent an event of more than {MAX_EVENT_BYTES} bytes")
        return [found for event in events if (found := _data(event))]


def _data(event: bytes) -> bytes:
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
