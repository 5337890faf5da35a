"""The exception tree. Every leaf has a stable code, an HTTP status and says whether another worker may retry.

    HeadwaterError
    ├─ RequestError                the client's fault, never retried
    │  ├─ InvalidRequest   400     names the field, what was given and what would fit
    │  ├─ ContextTooLong   400
    │  ├─ Unauthorized     401
    │  ├─ Forbidden        403
    │  ├─ ModelNotFound    404
    │  └─ PayloadTooLarge  413
    ├─ Unavailable                 try again later (Retry-After)
    │  ├─ RateLimited      429
    │  ├─ Overloaded       503
    │  ├─ NoWorkers        503
    │  ├─ Draining         503
    │  └─ DeadlineExceeded 504
    ├─ WorkerError         502
    │  ├─ EngineFailed             the engine reported a failure
    │  ├─ HandoffFailed            another worker has not prefilled it, and this one cannot: begin again with a third
    │  ├─ WorkerLost               the process or the connection died (the peer broke it)
    │  │  └─ WorkerSilent          nothing is heard of it: it may live
    │  ├─ StreamLost               its worker is gone, and no other one can go on with what was said
    │  └─ ProtocolError            the other side speaks another version or sent garbage
    ├─ TransferError       502     the bytes did not arrive: take another source or compute them again
    │  ├─ PeerLost                 the peer died, hung or was cut off
    │  ├─ StaleGeneration          addressed to a former life of the peer
    │  ├─ TransferRefused          keys, rights, bounds, sizes, an unknown region
    │  ├─ RegionGone               memory was unregistered on either side
    │  ├─ TransferTimeout          not done when the deadline came
    │  ├─ TransferCancelled        called off by the side that began it
    │  ├─ DataCorrupted            checksums of the two sides differ
    │  └─ LinkUnavailable          no back-end reaches that memory
    ├─ StoreError          502     a KV store failed: its blocks count as absent and are computed again
    │  ├─ TierUnavailable          a whole tier is out of reach: says why and when to try again
    │  └─ StoreClosed              closed by us, or its process is gone
    ├─ ConfigError                 names key, value, origin, and the nearest spelling
    ├─ ModelError                  the model cannot be loaded: says what is supported
    └─ InternalError       500     our bug

"Closed" means we closed it, "broken" means the peer did. Cancellation is never an error.
"""

from typing import ClassVar


class HeadwaterError(Exception):
    """Root of the tree. `str(error)` is fit to be shown to the user."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    """Whether the same request may be tried on another worker."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RequestError(HeadwaterError):
    """The request cannot be served as it stands. `param` is the offending field."""

    code = "invalid_request_error"
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class InvalidRequest(RequestError):
    code = "invalid_value"


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class Unauthorized(RequestError):
    code = "invalid_api_key"
    http_status = 401


class Forbidden(RequestError):
    code = "forbidden"
    http_status = 403


class ModelNotFound(RequestError):
    code = "model_not_found"
    http_status = 404


class PayloadTooLarge(RequestError):
    code = "request_too_large"
    http_status = 413


class Unavailable(HeadwaterError):
    """Not now. `retry_after_s` is the honest guess of when."""

    code = "unavailable"
    http_status = 503
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class RateLimited(Unavailable):
    code = "rate_limit_exceeded"
    http_status = 429
    retryable = False


class Overloaded(Unavailable):
    code = "overloaded"


class NoWorkers(Unavailable):
    code = "no_workers"


class Draining(Unavailable):
    code = "draining"


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"
    http_status = 504
    retryable = False


class WorkerError(HeadwaterError):
    """Something behind the frontend failed."""

    code = "worker_error"
    http_status = 502
    retryable = True


class EngineFailed(WorkerError):
    code = "engine_failed"
    retryable = False


class WorkerLost(WorkerError):
    code = "worker_lost"


class WorkerSilent(WorkerLost):
    pass


class StreamLost(WorkerError):
    """The worker that had it is gone, and what it said cannot be gone on with. Nobody died of it a second time."""

    code = "stream_lost"
    retryable = False


class HandoffFailed(WorkerError):
    code = "handoff_failed"


class ProtocolError(WorkerError):
    code = "protocol_error"
    retryable = False


class TransferError(HeadwaterError):
    """Memory was not moved, or only in part: what was written at the destination must not be used."""

    code = "transfer_failed"
    http_status = 502
    retryable = True


class PeerLost(TransferError):
    code = "peer_lost"


class StaleGeneration(TransferError):
    code = "stale_generation"


class TransferRefused(TransferError):
    code = "transfer_refused"


class RegionGone(TransferError):
    code = "region_gone"


class TransferTimeout(TransferError):
    code = "transfer_timeout"


class TransferCancelled(TransferError):
    code = "transfer_cancelled"


class DataCorrupted(TransferError):
    code = "data_corrupted"


class LinkUnavailable(TransferError):
    code = "link_unavailable"


class StoreError(HeadwaterError):
    """Blocks were not kept or not got. Never fails a request: what is absent is computed again."""

    code = "store_error"
    http_status = 502
    retryable = True


class TierUnavailable(StoreError):
    """`retry_after_s` is when asking again may help."""

    code = "tier_unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class StoreClosed(StoreError):
    code = "store_closed"


class ConfigError(HeadwaterError):
    code = "config_error"


class ModelError(HeadwaterError):
    code = "model_error"


class InternalError(HeadwaterError):
    code = "internal_error"
