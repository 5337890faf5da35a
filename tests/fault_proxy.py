"""A proxy in front of a real HTTP server that misbehaves on command: one request per connection, counted."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

_S3_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
_CHUNK = 64 << 10


@dataclass
class Faults:
    """What to do to the requests to come."""

    answer: tuple[int, str] | None = None
    """Answer with this status and error code instead of asking the server."""
    answer_times: int = 1 << 30
    """How often; then requests pass again."""
    only: str = ""
    """Leave other methods alone: `GET`, `PUT`, ..."""
    cut_after: int | None = None
    """Pass so many bytes of the response on, then cut the connection."""
    bytes_per_s: int | None = None
    hang: bool = False
    """Take the request and never answer."""
    requests: list[str] = field(default_factory=list)
    """Method and path of everything that came in."""

    def count(self, method: str) -> int:
        return sum(request.startswith(method) for request in self.requests)


class FaultProxy:
    def __init__(self, upstream_port: int) -> None:
        self.faults = Faults()
        self._upstream = ("127.0.0.1", upstream_port)
        self._closing = threading.Event()
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):  # a client that left in the middle
                    proxy._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(10)
        request = _read_message(client)
        if not request:
            return
        method, path, _ = request.split(b"\r\n", 1)[0].decode().split(" ")
        faults = self.faults
        faults.requests.append(f"{method} {path}")
        if faults.only and method != faults.only:
            client.sendall(self._ask(request))
        elif faults.hang:
            self._closing.wait(10)
        elif faults.answer is not None and faults.answer_times > 0:
            faults.answer_times -= 1
            status, code = faults.answer
            body = _S3_ERROR.format(code=code).encode()
            head = f"HTTP/1.1 {status} Injected\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            client.sendall(head.encode() + (b"" if method == "HEAD" else body))
        else:
            self._pass_on(client, self._ask(request), faults)

    def _ask(self, request: bytes) -> bytes:
        """The server's answer, whole."""
        with socket.create_connection(self._upstream, timeout=10) as server:
            server.sendall(request)
            response = _read_message(server, head_only=request.startswith(b"HEAD"))
        head, body = response.split(b"\r\n\r\n", 1)
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body

    def _pass_on(self, client: socket.socket, response: bytes, faults: Faults) -> None:
        if faults.cut_after is not None:
            client.sendall(response[: faults.cut_after])
            return
        if faults.bytes_per_s is None:
            client.sendall(response)
            return
        piece = max(1, faults.bytes_per_s // 20)
        for at in range(0, len(response), piece):
            client.sendall(response[at : at + piece])
            if self._closing.wait(0.05):
                return


@contextlib.contextmanager
def fault_proxy(upstream_port: int) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream_port)
    try:
        yield proxy
    finally:
        proxy.close()


def _read_message(stream: socket.socket, *, head_only: bool = False) -> bytes:
    data = bytearray()
    while b"\r\n\r\n" not in data:
        part = stream.recv(_CHUNK)
        if not part:
            return bytes(data)
        data += part
    head, _ = bytes(data).split(b"\r\n\r\n", 1)
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if head_only:
        return bytes(data)
    if headers.get(b"transfer-encoding") == b"chunked":
        while not data.endswith(b"0\r\n\r\n"):
            data += stream.recv(_CHUNK)
        return bytes(data)
    whole = len(head) + 4 + int(headers.get(b"content-length", b"0"))
    while len(data) < whole:
        part = stream.recv(_CHUNK)
        if not part:
            break
        data += part
    return bytes(data)
