"""From a worker's step to bytes for the client, per choice.

The hot path of the frontend. A plain streamed token costs a table look-up and one concatenation; everything else
(stop strings, log probabilities, ends, bytes that are not whole characters) takes the general path.
"""

from typing import Protocol

from headwater.errors import HeadwaterError, ProtocolError, WorkerError
from headwater.frontend.postprocess.detokenize import ByteDetokenizer
from headwater.frontend.postprocess.sequence import Delta, SequenceText
from headwater.frontend.remote_errors import error_from
from headwater.protocol.request import SequenceOutput

_FAILED = ("abort", "error")
_INCOMPLETE = "the worker ended the sequence before it was complete"


class Answering(Protocol):
    """What a sink needs of its answer."""

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

    def on_output(self, output: SequenceOutput) -> None:
        if output.finish_reason in _FAILED:
            error = error_from(output.error) if output.error is not None else WorkerError(_INCOMPLETE)
            self._answer.fail(error)
            return
        if output.num_cached_tokens is not None:
            self.cached_tokens = output.num_cached_tokens
        try:
            delta = self.text.push(output)
        except LookupError:
            self._answer.fail(
                ProtocolError(f"the worker sent a token that the model does not have: {output.token_ids}")
            )
            return
        if self.text.stopped and output.finish_reason is None:
            self._answer.stop(self._choice)
        self._answer.deliver(self._choice, delta)

    def on_error(self, error: HeadwaterError) -> None:
        self._answer.fail(error)


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
        try:
            text = b"".join([escaped[token_id] for token_id in ids])  # type: ignore[misc]  # None is a TypeError
        except (TypeError, LookupError):
            self._general(output)
            return
        self.text.num_tokens += len(ids)
        if text:
            self._answer.write(self._prefix + text + self._suffix)

    def _general(self, output: SequenceOutput) -> None:
        super().on_output(output)
        self._plain = not self._detokenizer.unfinished
