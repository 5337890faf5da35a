"""One bucket through obstore: few verbs, bounded in every way, failures told apart.

Each request has a bound on connections, on stalls, on its whole length and on retries (obstore's own: 5xx, 429, lost
connections, exponential with jitter). What still fails goes to a circuit breaker: while it is open every verb raises
`TierUnavailable` at once. "Not there" is an answer, never a failure.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from headwater.errors import StoreClosed, TierUnavailable
from headwater.kv.stores.breaker import Breaker
from headwater.kv.stores.object.connect import Clients
from headwater.kv.stores.object.options import ObjectOptions

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_CREDENTIALS = (
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
    "AuthenticationFailed",
    "CredentialsNotLoaded",
)
_OUT_OF_RANGE = ("416 ", "InvalidRange")
_ANSWERED = "Server returned non-2xx status code"
_SECRETS = re.compile(r"\?\S*|(?i:signature|token|sig)=\S+")
_ERROR_CODE = re.compile(r"<Code>\s*([A-Za-z]{1,64})\s*</Code>")
_LIST_CHUNK = 1000
_MAX_SMALL_BYTES = 256 << 20


class Uncertain(TierUnavailable):
    """The request may have been carried out all the same."""


class OutOfRange(Exception):
    """The object is shorter than what was asked of it."""


@dataclass(slots=True)
class BucketCounts:
    """Since the tier was opened. `requests` are those we made; retries of obstore are not among them."""

    heads: int = 0
    gets: int = 0
    puts: int = 0
    deletes: int = 0
    lists: int = 0
    failures: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    key: str
    num_bytes: int
    modified: datetime


class Bucket:
    """See the module docstring."""

    def __init__(self, clients: Clients, options: ObjectOptions, breaker: Breaker) -> None:
        self.counts = BucketCounts()
        self.breaker = breaker
        self.url = options.url
        self._setting = options.setting
        self._clients: Clients | None = clients
        self._hint: str | None = None
        self._connections = asyncio.Semaphore(options.connections)
        self._timeout_s = 2 * options.request_timeout_s
        """Of one request with its retries."""

    def unavailable(self) -> TierUnavailable:
        """Why nobody asks at present."""
        reason = self.breaker.reason or "has not answered yet"
        retry_after_s = max(0.1, self.breaker.retry_after_s())
        return TierUnavailable(f"{self.url}: {reason}", retry_after_s=retry_after_s, hint=self._hint)

    def close(self) -> None:
        """Idle connections end with the client."""
        self._clients = None

    @property
    def _open(self) -> Clients:
        if self._clients is None:
            raise StoreClosed("the object tier is closed")
        return self._clients

    async def exists(self, key: str) -> bool:
        self.counts.heads += 1
        found = await self._ask(lambda: obstore.head_async(self._open.reading, key))
        return found is not None

    async def read(self, key: str) -> tuple[memoryview, dict[str, str]] | None:
        """A small object and what names this version of it."""
        self.counts.gets += 1
        found = await self._ask(lambda: obstore.get_async(self._open.reading, key))
        if found is None or found.meta["size"] > _MAX_SMALL_BYTES:
            return None
        body = memoryview(await self._ask(found.bytes_async) or b"")
        self.counts.bytes_read += len(body)
        return body, _version(found.meta)

    async def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], join_within: int
    ) -> list[memoryview] | None:
        """Parts (start, end) of an object; ranges no further apart than `join_within` are one request."""
        self.counts.gets += 1
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        found = await self._ask(
            lambda: obstore.get_ranges_async(self._open.reading, key, starts=starts, ends=ends, coalesce=join_within)
        )
        if found is None:
            return None
        views = [memoryview(part) for part in found]
        self.counts.bytes_read += sum(map(len, views))
        return views

    async def create(self, key: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Write an object unless there is one: False if there is. It appears whole or not at all."""
        self.counts.puts += 1
        try:
            await self._ask(
                lambda: obstore.put_async(self._open.writing, key, iter(parts), mode="create", use_multipart=False),
                missing_is_failure=True,
            )
        except AlreadyExistsError:
            return False
        self.counts.bytes_written += sum(map(len, parts))
        return True

    async def replace(self, key: str, body: bytes, version: dict[str, str] | None) -> dict[str, str] | None:
        """Write a small object over that version of it, or anew. None if somebody else was faster."""
        self.counts.puts += 1
        mode: Any = version or "create"
        try:
            result = await self._ask(
                lambda: obstore.put_async(self._open.writing, key, body, mode=mode, use_multipart=False),
                missing_is_failure=True,
            )
        except (AlreadyExistsError, PreconditionError):
            return None
        self.counts.bytes_written += len(body)
        return _version(result)

    async def delete(self, keys: Sequence[str]) -> None:
        """Those that are not there are no matter."""
        self.counts.deletes += 1
        deleted = await self._ask(lambda: _delete(self._open.writing, list(keys)))
        if deleted is None and len(keys) > 1:  # a bulk request stops telling at the first that is missing
            for key in keys:
                await self._ask(lambda key=key: _delete(self._open.writing, [key]))  # type: ignore[misc]

    async def list(self, folder: str) -> AsyncIterator[list[Listed]]:
        """For upkeep only: nothing that serves a request lists."""
        stream = obstore.list(self._open.reading, folder, chunk_size=_LIST_CHUNK).__aiter__()
        while True:
            self.counts.lists += 1
            chunk = await self._ask(lambda: _next(stream))
            if not chunk:
                return
            yield [Listed(meta["path"], meta["size"], meta["last_modified"]) for meta in chunk]

    async def _ask(
        self, request: Callable[[], Awaitable[Answer]], *, missing_is_failure: bool = False
    ) -> Answer | None:
        """The answer, or None if the object is not there."""
        async with self._connections:
            if not self.breaker.allow():
                raise self.unavailable()
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await request()
            except (FileNotFoundError, AlreadyExistsError, PreconditionError) as error:
                if not isinstance(error, FileNotFoundError):
                    self._succeeded()
                    raise
                if missing_is_failure or _says(error, _NO_BUCKET):
                    raise self._failed(error) from None
                self._succeeded()
                return None
            except (BaseError, OSError, ValueError) as error:  # TimeoutError is an OSError
                if _says(error, _OUT_OF_RANGE):
                    self._succeeded()
                    raise OutOfRange from None
                raise self._failed(error) from None
            except asyncio.CancelledError:
                self.breaker.abandon()
                raise
            self._succeeded()
            return answer

    def _succeeded(self) -> None:
        if not self.breaker.closed:
            _log.info("object tier %s: reachable again", self.url)
        self.breaker.succeed()

    def _failed(self, error: Exception) -> TierUnavailable:
        reason, hint = self._explain(error)
        self._hint = hint
        self.counts.failures += 1
        if self.breaker.fail(reason, hopeless=hint is not None):
            _log.error(
                "object tier %s is left out for now: %s%s; blocks are computed instead",
                self.url,
                reason,
                f" ({hint})" if hint else "",
            )
        kind = TierUnavailable if _ANSWERED in str(error) else Uncertain
        return kind(f"{self.url}: {reason}", retry_after_s=max(0.1, self.breaker.retry_after_s()), hint=hint)

    def _explain(self, error: Exception) -> tuple[str, str | None]:
        """What happened, and what to set right if that is for a person to do."""
        code = _ERROR_CODE.search(str(error))
        if isinstance(error, FileNotFoundError):
            named = f": {code[1]}" if code else ""
            return (
                f"there is no such bucket{named}",
                f"check the name in {self._setting} {self.url}, and its region or endpoint",
            )
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or _says(error, _CREDENTIALS):
            return (
                f"the credentials were refused: {code[1] if code else _brief(error)}",
                f"check the credentials of {self._setting} {self.url}: environment, profile or role, their expiry, and "
                "that they may list (without that S3 refuses to say that an object is missing)",
            )
        if isinstance(error, TimeoutError):
            return f"no answer within {self._timeout_s:g} s", None
        return _brief(error), None


async def _delete(store: Any, keys: list[str]) -> bool:
    await obstore.delete_async(store, keys)
    return True


async def _next(stream: Any) -> Sequence[Any]:
    try:
        chunk: Sequence[Any] = await anext(stream)
    except StopAsyncIteration:
        return ()
    return chunk


def _version(meta: Any) -> dict[str, str]:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _says(error: Exception, words: Sequence[str]) -> bool:
    text = str(error)
    return any(word in text for word in words)


def _brief(error: Exception) -> str:
    """The first line, without query strings: they may carry signatures."""
    first = str(error).split("\n", 1)[0]
    return _SECRETS.sub("", first)[:300] or type(error).__name__
