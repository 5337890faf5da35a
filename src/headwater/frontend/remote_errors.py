"""Errors that came over the wire, as exceptions of the tree."""

from headwater.errors import HeadwaterError, RequestError, WorkerError
from headwater.protocol.request import ErrorInfo


def _leaves(root: type[HeadwaterError]) -> dict[str, type[HeadwaterError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_leaves(child))
    return found


_CLASSES = _leaves(HeadwaterError)


def error_from(info: ErrorInfo) -> HeadwaterError:
    """The exception that `info` describes; an unknown code becomes a `WorkerError`."""
    kind = _CLASSES.get(info.code, WorkerError)
    if issubclass(kind, RequestError):
        return kind(info.message, param=info.param)
    return kind(info.message)
