"""Which request do workers die of? One that killed two is refused, not passed on to a third.

That a worker died proves nothing about what ran there. Whoever was there then, and was there again when the next
worker died without having sent it a single token, is a suspect. A single suspect is guilty. Several are put in line
and tried one at a time: one whose worker sends it a token, or that ends, is cleared; one whose worker dies is guilty.
Pure.
"""

from collections.abc import Sequence

from headwater.frontend.stream import Stream


class Suspects:
    def __init__(self) -> None:
        self._line: dict[Stream, None] = {}
        """The first one is on trial."""

    def may_go(self, stream: Stream) -> bool:
        """Whether it may be given to a worker now."""
        return stream not in self._line or next(iter(self._line)) is stream

    def clear(self, stream: Stream) -> None:
        self._line.pop(stream, None)

    def died(self, streams: Sequence[Stream]) -> Stream | None:
        """A worker died while these were there: the guilty one, if that is certain."""
        suspects = [stream for stream in streams if stream.died_at == stream.num_tokens]
        for stream in streams:
            stream.died_at = stream.num_tokens
        on_trial = next(iter(self._line), None)
        if on_trial is not None and on_trial in suspects:
            return on_trial
        if len(suspects) == 1:
            return suspects[0]
        self._line.update(dict.fromkeys(suspects))
        return None
