"""One streamed answer: pieces of a body in, outputs out, and whether it has come to its end."""

from headwater.engines.attached.dialects.base import AnswerReader
from headwater.engines.attached.sse import EventSplitter
from headwater.protocol.request import SequenceOutput

_DONE = b"[DONE]"


class Answer:
    """`cached`: what is said of cached tokens where the server does not say it; None: nothing."""

    def __init__(self, reader: AnswerReader, cached: int | None) -> None:
        self.ended = False
        """The last output is there."""
        self.complete = False
        """The server has nothing more to send."""
        self.goes_on = False
        """It sends more than is wanted: the connection is not worth keeping."""
        self._reader = reader
        self._cached = cached
        self._first = True
        self._splitter = EventSplitter()

    @property
    def begun(self) -> bool:
        """Something of it has been given."""
        return not self._first

    def feed(self, piece: bytes) -> list[SequenceOutput]:
        """Raises what the reader raises."""
        outputs: list[SequenceOutput] = []
        for event in self._splitter.feed(piece):
            if event == _DONE:
                self.complete = True
            elif self.ended:
                self.goes_on = True
            elif (output := self._reader.read(event)) is not None:
                outputs.append(self._counted(output))
        return outputs

    def _counted(self, output: SequenceOutput) -> SequenceOutput:
        if self._first and output.num_cached_tokens is None:
            output.num_cached_tokens = self._cached
        self._first, self.ended = False, output.finish_reason is not None
        return output
