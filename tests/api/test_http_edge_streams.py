"""The edge over real sockets: streaming, disconnects, slow readers, failures, graceful stop."""

import asyncio
import gc
import http.client
import logging
import os
import resource
import socket
import struct

import pytest
from raw_http import echo, edge, get, run, until

from headwater.errors import InvalidRequest, NoWorkers
from headwater.frontend.http import half_closed
from headwater.frontend.http.limits import HttpLimits
from headwater.frontend.http.server import HttpServer


class Streams:
    """A handler that starts a stream and keeps hold of it."""

    def __init__(self) -> None:
        self.responders = []
        self.disconnects = 0

    def __call__(self, request, responder) -> None:
        responder.on_disconnect(self._on_disconnect)
        responder.start(200, ((b"content-type", b"text/event-stream"),))
        self.responders.append(responder)

    def _on_disconnect(self) -> None:
        self.disconnects += 1


def test_writes_of_one_turn_leave_as_one_chunk_and_later_ones_on_their_own() -> None:
    async def main() -> None:
        streams = Streams()
        async with edge(streams) as running:
            client = await running.connect()
            await client.send(get())
            head = await client.read_head()
            assert head.headers["transfer-encoding"] == "chunked"
            responder = streams.responders[0]
            responder.write(b"one ")
            responder.write(b"two")
            assert responder.pending_bytes == 7
            assert await client.read_chunk() == b"one two"
            assert responder.pending_bytes == 0
            responder.write(b"three")
            assert await client.read_chunk() == b"three"
            responder.write(b"four")
            responder.finish()
            assert await client.read_chunk() == b"four"
            assert await client.read_chunk() == b""
            await client.send(get())
            assert (await client.read_head()).status == 200

    run(main)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("when", ["streaming", "waiting", "pipelined"])
def test_a_vanished_client_is_reported_at_once_and_once(how: str, when: str) -> None:
    async def main() -> None:
        started = []
        gone = []
        answered = []

        def handler(request, responder):
            started.append(responder)
            responder.on_disconnect(lambda: gone.append(request.path))
            if when == "streaming":
                responder.start(200, ())
                responder.write(b"x")

        async with edge(handler, on_answered=lambda *what: answered.append(what[1:])) as running:
            client = await running.connect()
            await client.send(get("/a") + (get("/b") if when == "pipelined" else b""))
            await until(lambda: len(started) == 1)
            if when == "streaming":
                await client.read_head()
            transport = client.writer.transport
            if how == "close":
                transport.close()
            else:
                raw = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raw.close()
                transport.abort()
            await until(lambda: bool(gone))
            await until(lambda: running.server.num_connections == 0)
            assert gone == ["/a"]
            assert len(started) == 1, "a request behind a vanished client must not start"
            responder = started[0]
            assert responder.disconnected
            responder.write(b"y")
            responder.finish()
            responder.abort()
            called = []
            responder.on_disconnect(lambda: called.append(1))
            assert called == [1]
            status = 200 if when == "streaming" else 0
            assert answered == [(status, False)] + ([(0, False)] if when == "pipelined" else [])

    run(main)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_has_shut_its_sending_side_gets_the_whole_answer(version: str, streamed: bool) -> None:
    async def main() -> None:
        answered, pieces = [], [f"{number} ".encode() for number in range(5)]

        async def handler(request, responder):
            if streamed:
                responder.start(200, ())
                for piece in pieces:
                    await asyncio.sleep(0.1)
                    responder.write(piece)
                responder.finish()
            else:
                await asyncio.sleep(0.5)
                responder.send(200, (), b"".join(pieces))

        async with edge(handler, on_answered=lambda *what: answered.append(what[1:])) as running:
            client = await running.connect()
            await client.send(get().replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
            client.writer.transport.write_eof()
            answer = await client.read_answer()
            if answer.status == 100:
                answer = await client.read_answer()
            assert (answer.status, answer.body) == (200, b"".join(pieces))
            assert await client.is_closed()
            assert answered == [(200, True)]

    run(main)


def test_all_that_a_client_asked_for_before_it_shut_its_side_is_answered_and_no_part_of_a_request() -> None:
    async def main() -> None:
        async with edge(echo) as running:
            client = await running.connect()
            await client.send(get("/a") + get("/b") + b"GET /c HTTP/1.1\r\nhost")
            client.writer.transport.write_eof()
            assert [(await client.read_answer()).status for _ in range(2)] == [200, 200]
            assert await client.is_closed()

    run(main)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_shut_its_side_first_and_then_left_has_gone(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_closed, "_PROBE_S", 0.1)

    async def main() -> None:
        started = []

        def handler(request, responder):
            if streamed:
                responder.start(200, ())
            started.append(responder)

        async with edge(handler) as running:
            client = await running.connect()
            await client.send(get())
            client.writer.transport.write_eof()
            await until(lambda: bool(started))
            await asyncio.sleep(0.3)
            assert not started[0].disconnected
            client.writer.transport.abort()
            if streamed:
                started[0].write(b"x")
            await until(lambda: started[0].disconnected)
            await until(lambda: running.server.num_connections == 0)

    run(main)


def test_a_stock_client_reads_past_what_it_is_asked_whether_it_is_there() -> None:
    def ask(port: int) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/")
        connection.sock.shutdown(socket.SHUT_WR)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()

    async def handler(request, responder):
        await asyncio.sleep(0.2)
        responder.start(200, ())
        responder.write(b"whole")
        responder.finish()

    async def main() -> None:
        async with edge(handler) as running:
            assert await asyncio.to_thread(ask, running.port) == b"whole"

    run(main)


def test_a_reader_that_does_not_read_is_cut_off_within_its_bound() -> None:
    async def main() -> None:
        streams = Streams()
        async with edge(streams, HttpLimits(stream_buffer_bytes=500_000)) as running:
            client = await running.connect_deaf()
            await client.send(get())
            await until(lambda: bool(streams.responders))
            responder = streams.responders[0]
            offered = highest = 0
            while not responder.disconnected and offered < 50_000_000:
                responder.write(b"x" * 10_000)
                offered += 10_000
                highest = max(highest, responder.pending_bytes)
                await asyncio.sleep(0)
            assert responder.disconnected
            assert streams.disconnects == 1
            assert highest <= 500_000 + 64 * 1024 + 2 * 10_000
            assert offered < 12_000_000, "the kernel's share is bounded too"
            await until(lambda: running.server.num_connections == 0)

    run(main)


def test_memory_of_many_slow_readers_is_bounded() -> None:
    async def main() -> None:
        streams = Streams()
        limit = 100_000
        async with edge(streams, HttpLimits(stream_buffer_bytes=limit)) as running:
            for _ in range(50):
                client = await running.connect_deaf()
                await client.send(get())
            await until(lambda: len(streams.responders) == 50)
            gc.collect()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(3000):
                for responder in streams.responders:
                    responder.write(b"x" * 4000)
                await asyncio.sleep(0)
            grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            assert streams.disconnects == 50
            assert grown_bytes < 50 * (limit + 64 * 1024 + 4000) + 16_000_000, "600 MB were offered"

    run(main)


def test_a_reader_that_stops_reading_is_cut_off_after_a_while() -> None:
    async def main() -> None:
        streams = Streams()
        async with edge(streams, HttpLimits(write_timeout_s=0.2)) as running:
            client = await running.connect_deaf()
            await client.send(get())
            await until(lambda: bool(streams.responders))
            responder = streams.responders[0]
            while responder.pending_bytes < 100_000:
                responder.write(b"x" * 50_000)
                await asyncio.sleep(0)
            await until(lambda: responder.disconnected)
            assert streams.disconnects == 1

    run(main)


def test_a_slow_reader_that_keeps_reading_gets_everything() -> None:
    async def main() -> None:
        streams = Streams()
        async with edge(streams, HttpLimits(write_timeout_s=1.0, stream_buffer_bytes=8_000_000)) as running:
            client = await running.connect(limit=2**16)
            await client.send(get())
            await client.read_head()
            responder = streams.responders[0]
            total = 0
            for i in range(300):
                piece = b"%d," % i * 4000
                total += len(piece)
                responder.write(piece)
            responder.finish()
            got = 0
            while piece := await client.read_chunk():
                got += len(piece)
                await asyncio.sleep(0.001)
            assert got == total

    run(main)


def test_a_whole_answer_larger_than_the_stream_buffer_is_delivered() -> None:
    async def main() -> None:
        body = bytes(range(256)) * 40_000
        async with edge(lambda request, responder: responder.send(200, (), body)) as running:
            client = await running.connect(limit=2**16)
            await client.send(get() * 3)
            for _ in range(3):
                assert (await client.read_answer()).body == body

    run(main)


def test_failures_of_handlers_become_answers_in_the_api_shape(caplog: pytest.LogCaptureFixture) -> None:
    def handler(request, responder):
        if request.path == "/bad":
            raise InvalidRequest("temperature must be at least 0, got -1", param="temperature")
        if request.path == "/none":
            raise NoWorkers("no worker serves m", retry_after_s=2.5)
        if request.path == "/bug":
            raise RuntimeError("secret detail")
        return later(request, responder)

    async def later(request, responder):
        await asyncio.sleep(0)
        if request.path == "/late":
            raise RuntimeError("secret detail")
        responder.start(200, ())
        responder.write(b"begun")
        await asyncio.sleep(0.01)
        raise RuntimeError("secret detail")

    async def main() -> None:
        async with edge(handler) as running:
            client = await running.connect()
            await client.send(get("/bad"))
            answer = await client.read_answer()
            assert answer.status == 400
            assert b'"param":"temperature"' in answer.body
            assert b'"code":"invalid_value"' in answer.body
            await client.send(get("/none"))
            answer = await client.read_answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "3")
            for path in ("/bug", "/late"):
                await client.send(get(path))
                answer = await client.read_answer()
                assert answer.status == 500
                assert b"secret" not in answer.body
            await client.send(get("/half"))
            await client.read_head()
            assert await client.read_chunk() == b"begun"
            assert await client.is_closed(), "a stream that failed must not look complete"

    with caplog.at_level(logging.CRITICAL + 1):
        run(main)


def test_every_request_is_reported_once_with_its_status() -> None:
    async def main() -> None:
        answered = []
        async with edge(echo, on_answered=lambda request, *rest: answered.append((request.path, *rest))) as running:
            client, _ = await running.ask(get("/a"))
            await client.send(b"bad\r\n\r\n")
            assert (await client.read_answer()).status == 400
            assert answered == [("/a", 200, True), ("-", 400, True)]

    run(main)


def test_stop_lets_running_answers_end_and_closes_the_rest() -> None:
    async def main() -> None:
        streams = Streams()
        async with edge(streams) as running:
            busy = [await running.connect() for _ in range(8)]
            for client in busy:
                await client.send(get())
                await client.read_head()
            idle = await running.connect()
            partial = await running.connect()
            await partial.send(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 10\r\n\r\nabc")
            await asyncio.sleep(0.02)
            stopping = asyncio.create_task(running.server.stop(5))
            assert await idle.is_closed()
            await partial.send(b"defghij")
            assert (await partial.read_head()).headers["connection"] == "close", (
                "it was on its way, and is the last there"
            )
            busy.append(partial)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", running.port)
            for responder in streams.responders:
                responder.write(b"end")
                responder.finish()
            for client in busy:
                assert await client.read_chunk() == b"end"
                assert await client.read_chunk() == b""
                assert await client.is_closed()
            assert await stopping

    run(main)


def test_stop_has_a_bound_and_then_cuts_what_is_left() -> None:
    async def main() -> None:
        cancelled = []

        async def handler(request, responder):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(request.path)
                raise

        async with edge(handler) as running:
            client = await running.connect()
            await client.send(get("/stuck"))
            await asyncio.sleep(0.02)
            assert not await running.server.stop(0.1)
            assert cancelled == ["/stuck"]
            assert await client.is_closed()
            assert await running.server.stop(0.1), "stopping twice is harmless"

    run(main)


def test_several_servers_share_a_port() -> None:
    async def main() -> None:
        counts = [0, 0]

        def counting(number):
            def handler(request, responder):
                counts[number] += 1
                responder.send(200, (), b"")

            return handler

        servers = [HttpServer(counting(i), HttpLimits()) for i in range(2)]
        port = await servers[0].start("127.0.0.1", 0, reuse_port=True)
        assert await servers[1].start("127.0.0.1", port, reuse_port=True) == port
        for _ in range(64):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/", b"connection: close"))
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            await writer.wait_closed()
        for server in servers:
            await server.stop(1)
        assert sum(counts) == 64
        assert all(counts)

    run(main)
