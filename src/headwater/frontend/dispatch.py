"""The port between the OpenAI layer and the cluster: submit sequences, receive tokens, abort."""

from collections.abc import Sequence
from typing import Protocol

from headwater.errors import HeadwaterError
from headwater.frontend.hints import NO_HINTS, RoutingHints
from headwater.frontend.records import RequestRecord
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.router.decisions import DecisionRecord


class TokenSink(Protocol):
    """Receives one sequence's output, on the event loop."""

    def on_output(self, output: SequenceOutput) -> None:
        """One step's tokens. After an output with a `finish_reason` nothing more comes."""
        ...

    def on_error(self, error: HeadwaterError) -> None:
        """The sequence cannot be completed; nothing more comes."""
        ...


class Admission(Protocol):
    """Whether sequences may go to a worker as far as their tenant's quotas are concerned."""

    def admit(self, record: RequestRecord, requests: Sequence[EngineRequest]) -> None:
        """Raises `RateLimited`."""
        ...


class Dispatcher(Protocol):
    """Sends sequences to workers."""

    def submit(
        self,
        card: ModelCard,
        requests: Sequence[EngineRequest],
        sinks: Sequence[TokenSink],
        hints: RoutingHints = NO_HINTS,
    ) -> list[int]:
        """Route sequences of one HTTP request together (they share a prompt, so they share a worker).

        They may wait for a worker. Fills in `stream` and returns the streams. Raises `Unavailable` and
        `InvalidRequest`.
        """
        ...

    def abort(self, streams: Sequence[int]) -> None:
        """Stop; unknown streams are ignored and the sinks hear nothing more."""
        ...

    def decision_of(self, stream: int) -> DecisionRecord | None:
        """Where an open stream went and why: a record that is filled in until all is known. None when unknown."""
        ...
