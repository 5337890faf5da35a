"""A lean streaming HTTP/1.1 client for load generation: one connection per instance, kept alive.

Times are taken when bytes arrive, before anything is parsed. What it costs must stay well below what it measures, so
events are counted by their separators and only those with text or usage are decoded.
"""

import asyncio
import ssl
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, cast

import httptools

from headwater.config.urls import http_url
from headwater.errors import WorkerLost


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    tls: bool
    base_path: str
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> "Target":
        """From `http(s)://host[:port][/path]`; a trailing `/v1` is optional."""
        parts = http_url("--url", url)
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls, path, api_key)

    def head(self, method: str, path: str, content_length: int) -> bytes:
        lines = [
            f"{method} {self.base_path}{path} HTTP/1.1",
            f"host: {self.host}:{self.port}",
            "content-type: application/json",
            f"content-length: {content_length}",
        ]
        if self.api_key is not None:
            lines.append(f"authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


class ResponseSink(Protocol):
    def on_data(self, data: bytes, at_s: float) -> None:
        """A piece of the body and the moment its packet arrived."""
        ...


class Connection(asyncio.Protocol):
    """One kept-alive connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: ResponseSink | None = None
        self._done: asyncio.Future[int] | None = None
        self._arrived = 0.0

    @classmethod
    async def open(cls, target: Target, timeout_s: float) -> "Connection":
        """Connect. Raises `WorkerLost` when nobody answers."""
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if target.tls else None
        try:
            async with asyncio.timeout(timeout_s):
                _, protocol = await loop.create_connection(cls, target.host, target.port, ssl=context)
        except (OSError, TimeoutError) as error:
            raise WorkerLost(
                f"cannot connect to {target.host}:{target.port}: {str(error) or 'timed out'}",
                hint="start one with `headwater serve`, or name one with --url",
            ) from error
        return protocol

    async def request(self, head: bytes, body: bytes, sink: ResponseSink, timeout_s: float) -> int:
        """Send and feed the body to `sink`; returns the status. Raises `WorkerLost` on a broken answer or timeout."""
        if self._transport is None:
            raise WorkerLost("the connection is closed")
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._done
        except TimeoutError as error:
            self.close()
            raise WorkerLost(f"no complete answer within {timeout_s:g} s") from error

    @property
    def closed(self) -> bool:
        return self._transport is None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._arrived = perf_counter()
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(WorkerLost(f"the answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(WorkerLost("the server closed the connection before the answer was complete"))

    def _fail(self, error: WorkerLost) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # httptools

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.on_data(body, self._arrived)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        keep_alive = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())
        if not keep_alive:
            self.close()
