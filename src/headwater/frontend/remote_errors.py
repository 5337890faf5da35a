"""Errors that came over the wire, as exceptions of the tree."""

from headwater import errors
from headwater.errors import HeadwaterError, RequestError, WorkerError
from headwater.protocol.request import ErrorInfo

_CLASSES: dict[str, type[HeadwaterError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadwaterError)
}
"""By code; where a class shares its parent's code, the child, which comes later in the module."""


def error_from(info: ErrorInfo) -> HeadwaterError:
    """The exception that `info` describes; an unknown code becomes a `WorkerError`."""
    kind = _CLASSES.get(info.code, WorkerError)
    if issubclass(kind, RequestError):
        return kind(info.message, param=info.param)
    return kind(info.message)
