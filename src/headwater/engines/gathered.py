"""Single outputs of sequences, made one batch per step of the engine that they come from."""

import asyncio
from collections.abc import Callable

from headwater.protocol.request import SequenceOutput

_STEP_SPREAD_S = 0.001
"""Within which a server has written what one step of its engine brought."""


class Gathered:
    """A sink for single outputs: hands on those of one step of the other side, one output per sequence.

    A step has come when as many sequences as `awaited` says have brought something, or a moment after the first one:
    what is handed on costs by the step, here and in every frontend. 0 awaited: what one turn of the event loop brought.
    """

    def __init__(self, deliver: Callable[[list[SequenceOutput]], None], awaited: Callable[[], int] = int) -> None:
        self._deliver = deliver
        self._awaited = awaited
        self._pending: dict[int, SequenceOutput] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, output: SequenceOutput) -> None:
        """The output is the sink's from now on."""
        begins = not self._pending
        known = self._pending.setdefault(output.stream, output)
        if known is not output and known.finish_reason is None:
            _join(known, output)
        if not begins and self._timer is None:
            return
        loop = asyncio.get_running_loop()
        if len(self._pending) < self._awaited():
            self._timer = self._timer or loop.call_later(_STEP_SPREAD_S, self._flush)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._timer = None
        outputs, self._pending = list(self._pending.values()), {}
        self._deliver(outputs)


def _join(first: SequenceOutput, second: SequenceOutput) -> None:
    """Make one output of two of the same sequence."""
    first.token_ids += second.token_ids
    first.relayed += second.relayed
    first.finish_reason, first.stop_token_id, first.error = second.finish_reason, second.stop_token_id, second.error
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
