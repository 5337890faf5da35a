"""Ranges of objects (S3, GCS, Azure, HTTP), read by the side that wants them: the owner only says where they lie.

Read-only. An agent reads what it registered itself; what peers name only within the prefixes it was given
(`ObjectBackend(["s3://models/"])`). Credentials and endpoints come from the environment, as for obstore anywhere.
A read that comes short is an error, and nothing of it is kept.
"""

import contextlib
import importlib.util
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from headwater.errors import LinkUnavailable, RegionGone, TransferError, TransferRefused
from headwater.transfer.base import Grant, PeerSession, RemoteRegion
from headwater.transfer.blocks import Chunk, joined
from headwater.transfer.card import RegionKind
from headwater.transfer.objects import Location, ObjectRange, check_prefixes, locate
from headwater.transfer.outcome import Stop
from headwater.transfer.regions import Region

_LANES = 4
_LOOK_S = 0.2
_MAX_STORES = 64
_STALL = timedelta(seconds=10)
_REQUEST = timedelta(seconds=60)

OpenStore = Callable[[str], Any]
"""An obstore client of a store by its URL."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ObjectRange)


class ObjectBackend:
    """See the module docstring."""

    name = "object"

    def __init__(self, readable: Sequence[str] = (), open_store: OpenStore | None = None) -> None:
        self._readable = check_prefixes(readable)
        self._open_store = open_store or _open
        self._own: dict[int, str] = {}
        """URLs by region."""
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._readers: ThreadPoolExecutor | None = None

    def unavailable(self) -> str:
        return "" if importlib.util.find_spec("obstore") else "obstore is not installed: pip install headwater[object]"

    def serves(self, local: RegionKind, remote: RegionKind) -> bool:
        return remote == "object" and local in ("shared", "memory")

    def connect(self, session: PeerSession, stop: Stop) -> "ObjectLink":
        return ObjectLink(self)

    def grant(self, region: Region, offer: bytes) -> Grant:
        origin = region.buffer.origin
        if not isinstance(origin, ObjectRange):
            raise LinkUnavailable(f"region {region.card.id} is no object")
        with self._lock:
            self._own[region.card.id] = origin.url
        return Grant(offer=_encode(origin))

    def forget(self, region: Region) -> None:
        with self._lock:
            self._own.pop(region.card.id, None)

    def close(self) -> None:
        with self._lock:
            readers, self._readers = self._readers, None
        if readers is not None:
            readers.shutdown(wait=False, cancel_futures=True)

    def check(self, url: str) -> Location:
        """Where it lies. Raises `TransferRefused` if it is not to be read."""
        location = locate(url)
        with self._lock:
            own = url in self._own.values()
        if not own and not url.startswith(self._readable or ("\0",)):
            raise TransferRefused("a peer named an object outside the prefixes that may be read here")
        return location

    def store(self, url: str) -> Any:
        with self._lock:
            if url not in self._stores:
                if len(self._stores) >= _MAX_STORES:
                    raise TransferRefused(f"objects of {_MAX_STORES} stores are read already")
                self._stores[url] = self._open_store(url)
            return self._stores[url]

    def submit(self, work: Callable[[], list[Any]]) -> "Future[list[Any]]":
        with self._lock:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(2 * _LANES, thread_name_prefix="object")
            return self._readers.submit(work)


class _Step(NamedTuple):
    region: Region
    remote: RemoteRegion
    starts: list[int]
    ends: list[int]
    views: list[memoryview]


class ObjectLink:
    lanes = _LANES

    def __init__(self, backend: ObjectBackend) -> None:
        self._backend = backend
        self._closed = False

    def attach(self, remote: RemoteRegion) -> None:
        try:
            origin = _decoder.decode(remote.offer)
        except msgspec.DecodeError as error:
            raise LinkUnavailable(f"the peer did not say where the object lies: {error}") from None
        if origin.num_bytes != remote.card.num_bytes:
            raise LinkUnavailable("the peer's object is not as long as its region")
        remote.state = origin, self._backend.check(origin.url)

    def prepare(self, region: Region, remote: RemoteRegion, chunk: Chunk, *, write: bool) -> _Step:
        if write:
            raise TransferRefused("objects are read only")
        origin: ObjectRange = remote.state[0]
        view = region.view
        starts, sizes = joined(chunk.remote, chunk.lengths)
        starts = [origin.offset + start for start in starts]
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        views = [view[at : at + size] for at, size in zip(chunk.local, chunk.lengths, strict=True)]
        return _Step(region, remote, starts, ends, views)

    def move(self, step: _Step, stop: Stop) -> None:
        future = self._backend.submit(lambda: _read(self._backend, step))
        try:
            parts = self._result(future, stop)
        finally:
            future.cancel()  # whoever has not begun is not to keep others from it
        with step.region.hold, step.remote.hold:
            _scatter(parts, step)

    def close(self) -> None:
        self._closed = True

    def _result(self, future: "Future[list[Any]]", stop: Stop) -> list[Any]:
        while True:
            stop.check()
            if self._closed:
                raise TransferError("the link was closed")
            with contextlib.suppress(FutureTimeout):
                return future.result(min(_LOOK_S, stop.remaining_s))


def _open(url: str) -> Any:
    from obstore.store import from_url  # an extra; most agents read no objects

    return from_url(url, client_options={"timeout": _REQUEST, "read_timeout": _STALL, "allow_http": True})


def _read(backend: ObjectBackend, step: _Step) -> list[Any]:
    import obstore
    from obstore.exceptions import BaseError, NotFoundError

    location: Location = step.remote.state[1]
    try:
        store = backend.store(location.store)
        return list(obstore.get_ranges(store, location.key, starts=step.starts, ends=step.ends))
    except (NotFoundError, FileNotFoundError):
        raise RegionGone(f"there is no object {location.key} (any more)") from None
    except (BaseError, OSError, ValueError) as error:
        raise TransferError(f"object {location.key} cannot be read: {type(error).__name__}") from None


def _scatter(parts: Sequence[Any], step: _Step) -> None:
    """Parts of the object are joined blocks; the views are single ones, in the same order."""
    views = iter(step.views)
    for part, start, end in zip(parts, step.starts, step.ends, strict=True):
        data = memoryview(part).cast("B")
        if len(data) != end - start:
            raise RegionGone(f"the object gave {len(data)} bytes where {end - start} were asked for")
        at = 0
        while at < len(data):
            view = next(views)
            view[:] = data[at : at + len(view)]
            at += len(view)
