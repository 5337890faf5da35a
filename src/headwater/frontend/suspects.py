"""Which request do workers die of? One that killed two is refused, not passed on to a third.

That a worker died proves nothing about what ran there. Whoever was there then, and was there again when the next
worker died without having sent it a single token, is a suspect. A single suspect is guilty. Several are put in line
and tried one at a time: one whose worker sends it a token, or that ends, is cleared; one whose worker dies is guilty.
A worker that hangs may only be slow, so that alone convicts nobody before the third time, and it counts no longer once
the worker is back (`absolve`). Pure.
"""

from collections.abc import Iterable, Sequence

from headwater.frontend.stream import Stream

_ENOUGH = 2
_ENOUGH_HANGS = 3


class Suspects:
    def __init__(self) -> None:
        self._line: dict[Stream, None] = {}
        """The first one is on trial."""

    def may_go(self, stream: Stream) -> bool:
        """Whether it may be given to a worker now."""
        return stream not in self._line or next(iter(self._line)) is stream

    def clear(self, stream: Stream) -> None:
        """It has got a token, or has ended."""
        stream.deaths = ()
        self._line.pop(stream, None)

    def absolve(self, worker_id: str, streams: Iterable[Stream]) -> None:
        """That worker only hung: nobody killed it."""
        for stream in streams:
            if worker_id in stream.deaths:
                stream.deaths = tuple(name for name in stream.deaths if name != worker_id)
                if len(stream.deaths) < _ENOUGH:
                    self._line.pop(stream, None)

    def died(self, worker_id: str, streams: Sequence[Stream], *, hung: bool) -> Stream | None:
        """A worker died, or hangs, while these were there: the guilty one, if that is certain."""
        for stream in streams:
            stream.deaths += (worker_id,)
        suspects = [stream for stream in streams if len(stream.deaths) >= _ENOUGH]
        certain = [stream for stream in suspects if not hung or len(stream.deaths) >= _ENOUGH_HANGS]
        on_trial = next(iter(self._line), None)
        if on_trial is not None and on_trial in certain:
            return on_trial
        if len(certain) == 1 == len(suspects):
            return certain[0]
        self._line.update(dict.fromkeys(suspects))
        return None
