"""A client that says exactly the bytes it is told to, for tests of the HTTP edge."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import uvloop

from headwater.frontend.http.base import Handler, HttpRequest
from headwater.frontend.http.limits import HttpLimits
from headwater.frontend.http.server import HttpServer


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    head: bytes = b""


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_head(self) -> Answer:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        lines = head.decode("latin-1").split("\r\n")
        version, status = lines[0].split(" ")[:2]
        assert version == "HTTP/1.1"
        headers: dict[str, str] = {}
        for line in lines[1:]:
            if line:
                name, value = line.split(": ", 1)
                assert name not in headers or name in ("vary",), f"repeated header {name}"
                headers[name] = value
        return Answer(int(status), headers, b"", head)

    async def read_chunk(self) -> bytes:
        size = int(await asyncio.wait_for(self.reader.readline(), 10), 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), 10)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def read_answer(self, *, head_only: bool = False) -> Answer:
        answer = await self.read_head()
        if head_only or answer.status in (100, 204, 304):
            return answer
        if answer.headers.get("transfer-encoding") == "chunked":
            pieces = []
            while piece := await self.read_chunk():
                pieces.append(piece)
            answer.body = b"".join(pieces)
        elif "content-length" in answer.headers:
            length = int(answer.headers["content-length"])
            answer.body = await asyncio.wait_for(self.reader.readexactly(length), 10)
        else:
            answer.body = await asyncio.wait_for(self.reader.read(), 10)
        return answer

    async def is_closed(self, within_s: float = 40.0) -> bool:
        """Whether the server closes, having said nothing more."""
        try:
            return await asyncio.wait_for(self.reader.read(1), within_s) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Edge:
    """A running server and the clients of one test."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self.server = server
        self.port = port
        self.clients: list[RawClient] = []

    async def connect(self, **options: Any) -> RawClient:
        return await self.connect_with(host="127.0.0.1", port=self.port, **options)

    async def connect_with(self, **options: Any) -> RawClient:
        client = RawClient(*await asyncio.open_connection(**options))
        self.clients.append(client)
        return client

    async def connect_deaf(self) -> RawClient:
        """A client that does not read, with little room in its kernel."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        client = await self.connect_with(sock=sock, limit=1000)
        client.writer.transport.pause_reading()
        return client

    async def ask(self, data: bytes) -> tuple[RawClient, Answer]:
        client = await self.connect()
        await client.send(data)
        return client, await client.read_answer()


@contextlib.asynccontextmanager
async def edge(handler: Handler, limits: HttpLimits | None = None, **options: Any) -> AsyncIterator[Edge]:
    server = HttpServer(handler, limits or HttpLimits(), tick_s=0.02, **options)
    running = Edge(server, await server.start("127.0.0.1", 0))
    try:
        yield running
    finally:
        for client in running.clients:
            await client.close()
        await server.stop(0.5)


def run(main: Callable[[], Awaitable[None]]) -> None:
    uvloop.run(main())


async def until(condition: Callable[[], bool], within_s: float = 40.0) -> None:
    """Wait for something that happens on this loop."""
    for _ in range(int(within_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true in time")


def get(path: str = "/", *extra: bytes) -> bytes:
    lines = [b"GET %b HTTP/1.1" % path.encode(), b"host: test", *extra]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def post(body: bytes, *extra: bytes, path: str = "/") -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"host: test", b"content-length: %d" % len(body), *extra]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def echo(request: HttpRequest, responder: Any) -> None:
    """Answers with what it understood."""
    text = f"{request.method} {request.path} ?{request.query} {len(request.body)}:".encode()
    responder.send(200, ((b"content-type", b"text/plain"),), text + request.body[:100])
