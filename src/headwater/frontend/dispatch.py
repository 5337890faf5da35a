"""The port between the OpenAI layer and the cluster: submit sequences, receive tokens, abort."""

from collections.abc import Sequence
from typing import Protocol

from headwater.errors import HeadwaterError
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest, SequenceOutput


class TokenSink(Protocol):
    """Receives one sequence's output, on the event loop."""

    def on_output(self, output: SequenceOutput) -> None:
        """One step's tokens. After an output with a `finish_reason` nothing more comes."""
        ...

    def on_error(self, error: HeadwaterError) -> None:
        """The sequence cannot be completed; nothing more comes."""
        ...


class Dispatcher(Protocol):
    """Sends sequences to workers."""

    def submit(self, card: ModelCard, requests: Sequence[EngineRequest], sinks: Sequence[TokenSink]) -> list[int]:
        """Route and send sequences of one HTTP request together (they share a prompt, so they share a worker).

        Fills in `stream` and returns the streams. Raises `NoWorkers`, `Overloaded`, `Draining`.
        """
        ...

    def abort(self, streams: Sequence[int]) -> None:
        """Stop; unknown streams are ignored and the sinks hear nothing more."""
        ...

    def worker_of(self, stream: int) -> str | None:
        """The worker that serves a stream, while it is open; None when unknown."""
        ...
