"""Errors that come over the wire, back in the exception tree."""

from headwater.errors import HeadwaterError, RequestError, WorkerError
from headwater.protocol.request import ErrorInfo, SequenceOutput


def error_from_info(info: ErrorInfo) -> HeadwaterError:
    """The error that a worker reported; codes that are not known become a `WorkerError`."""
    kind = _by_code(info.code)
    if issubclass(kind, RequestError):
        return kind(info.message, param=info.param)
    return kind(info.message)


def failure_of(output: SequenceOutput) -> HeadwaterError | None:
    """Why a sequence ended without being complete, if so."""
    if output.error is not None:
        return error_from_info(output.error)
    if output.finish_reason in ("abort", "error"):
        return WorkerError("the worker ended the sequence before it was complete")
    return None


def _by_code(code: str) -> type[HeadwaterError]:
    pending: list[type[HeadwaterError]] = [HeadwaterError]
    while pending:
        kind = pending.pop()
        children = kind.__subclasses__()
        if not children and kind.code == code:
            return kind
        pending += children
    return WorkerError
