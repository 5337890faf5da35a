"""From a worker's step to bytes for the client, per choice.

The hot path of the frontend. A plain streamed token costs a table look-up and one concatenation; everything else
(stop strings, log probabilities, ends, bytes that are not whole characters) takes the general path.
"""

from typing import Protocol

from headwater.clock import Clock
from headwater.errors import HeadwaterError
from headwater.frontend.openai.failures import failure_of
from headwater.frontend.openai.observer import RequestObserver
from headwater.frontend.postprocess.detokenize import ByteDetokenizer
from headwater.frontend.postprocess.sequence import Delta, SequenceText
from headwater.protocol.request import SequenceOutput


class Answering(Protocol):
    """What a sink needs of its answer."""

    clock: Clock
    observer: RequestObserver

    @property
    def started_at(self) -> float: ...

    def deliver(self, choice: int, delta: Delta) -> None:
        """A choice grew or ended."""
        ...

    def stop(self, choice: int) -> None:
        """A stop string ended a choice that the worker still generates."""
        ...

    def fail(self, error: HeadwaterError) -> None: ...

    def write(self, data: bytes) -> None:
        """Events as they are (streams only)."""
        ...


class ChoiceSink:
    """General path: tokens to a `Delta`."""

    def __init__(self, answer: Answering, choice: int, text: SequenceText) -> None:
        self.text = text
        self.cached_tokens = 0
        self._answer = answer
        self._choice = choice
        self.first_output_at: float | None = None
        self._last_output_at = 0.0

    def on_output(self, output: SequenceOutput) -> None:
        failure = failure_of(output)
        if failure is not None:
            self._answer.fail(failure)
            return
        if output.num_cached_tokens is not None:
            self.cached_tokens = output.num_cached_tokens
        if output.token_ids:
            self._observe(len(output.token_ids))
        delta = self.text.push(output)
        if self.text.stopped and output.finish_reason is None:
            self._answer.stop(self._choice)
        self._answer.deliver(self._choice, delta)

    def on_error(self, error: HeadwaterError) -> None:
        self._answer.fail(error)

    def _observe(self, count: int) -> None:
        answer = self._answer
        now = answer.clock.now()
        if self.first_output_at is None:
            self.first_output_at = now
            answer.observer.first_token(now - answer.started_at)
            if count > 1:
                answer.observer.tokens(count - 1, 0.0)
        else:
            answer.observer.tokens(count, now - self._last_output_at)
        self._last_output_at = now


class DirectSink(ChoiceSink):
    """Fast path for streams of plain text."""

    def __init__(
        self,
        answer: Answering,
        choice: int,
        text: SequenceText,
        detokenizer: ByteDetokenizer,
        escaped: list[bytes | None],
        frame: tuple[bytes, bytes],
    ) -> None:
        super().__init__(answer, choice, text)
        self._detokenizer = detokenizer
        self._escaped = escaped
        self._prefix, self._suffix = frame
        self._plain = False
        """The choice is open and no bytes of an unfinished character are held back."""

    def on_output(self, output: SequenceOutput) -> None:
        if not self._plain or output.finish_reason is not None:
            self._general(output)
            return
        ids = output.token_ids
        escaped = self._escaped
        pieces = [escaped[token_id] for token_id in ids]
        try:
            text = b"".join(pieces)  # type: ignore[arg-type]  # None means: not whole characters
        except TypeError:
            self._general(output)
            return
        if ids:
            self._observe(len(ids))
            self.text.num_tokens += len(ids)
        if text:
            self._answer.write(self._prefix + text + self._suffix)

    def _general(self, output: SequenceOutput) -> None:
        super().on_output(output)
        self._plain = not self._detokenizer.unfinished
