"""One sequence under way, as the dispatcher keeps it."""

from headwater.frontend.connection import WorkerConnection
from headwater.frontend.dispatch import TokenSink
from headwater.frontend.metrics import ModelMetrics
from headwater.frontend.records import RequestRecord
from headwater.frontend.submission import Submission
from headwater.protocol.request import EngineRequest
from headwater.router.view import Booking


class Stream:
    __slots__ = (
        "booking",
        "connection",
        "counts_cached",
        "last",
        "metrics",
        "num_tokens",
        "record",
        "refused_by",
        "request",
        "sent",
        "sink",
        "submission",
    )

    def __init__(
        self,
        sink: TokenSink,
        request: EngineRequest,
        record: RequestRecord,
        metrics: ModelMetrics,
        submission: Submission,
    ) -> None:
        self.sink = sink
        self.request: EngineRequest | None = request
        """Kept until the first token, while another worker may yet take it."""
        self.record = record
        self.metrics = metrics
        self.submission = submission
        self.connection: WorkerConnection | None = None
        """None while it waits for a worker, as is its booking."""
        self.booking: Booking | None = None
        self.refused_by: tuple[str, ...] = ()
        self.counts_cached = submission.requests[0] is request
        """Whether its cached tokens are the prompt's: those of the first sequence are."""
        self.num_tokens = 0
        self.sent = 0.0
        self.last = 0.0
        """When the last tokens came; monotonic seconds."""
