"""The edge over real sockets: what a greedy, slow or hostile client gets."""

import asyncio

import pytest
from raw_http import echo, edge, get, post, run, until

from headwater.frontend.http.limits import HttpLimits


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    async def main() -> None:
        async with edge(echo, HttpLimits(max_body_bytes=1000)) as running:
            client = await running.connect()
            await client.send(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 50000000\r\n\r\n")
            answer = await client.read_answer()
            assert answer.status == 413
            assert b"50000000" in answer.body
            assert b'"code":"request_too_large"' in answer.body
            assert b"1000" in answer.body

    run(main)


def test_a_client_that_sends_all_of_a_huge_body_first_still_reads_the_refusal() -> None:
    async def main() -> None:
        async with edge(echo, HttpLimits(max_body_bytes=8_000_000)) as running:
            client, answer = await running.ask(post(b"x" * 20_000_000))
            assert answer.status == 413
            assert running.server._partial_bytes == 0
            client.writer.close()
            await until(lambda: running.server.num_connections == 0)

    run(main)


def test_a_chunked_body_is_refused_as_soon_as_it_passes_the_limit() -> None:
    async def main() -> None:
        async with edge(echo, HttpLimits(max_body_bytes=1000)) as running:
            client = await running.connect()
            await client.send(b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n")
            await client.send(b"258\r\n" + b"x" * 600 + b"\r\n")
            await client.send(b"258\r\n" + b"x" * 401)
            assert (await client.read_answer()).status == 413

    run(main)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (get("/" + "a" * 9000), 414),
        (get("/", b"x-a: " + b"b" * 40_000), 431),
        (get("/", *(b"x-%d: b" % i for i in range(200))), 431),
        (get("/", *(b"x-a: b" for _ in range(10_000))), 431),
        (b"GET / HTTP/1.1\r\nhost: test\r\nx-a: " + b"b" * 400_000, 431),
        (b"GET / HTTP/1.1\r\nhost: test\r\n" + b"x" * 400_000, 431),
        (b"\r\n" * 200_000, 431),
    ],
    ids=["target", "one-header", "many-headers", "repeated-header", "endless-value", "endless-name", "empty-lines"],
)
def test_heads_over_the_limits_are_refused(data: bytes, status: int) -> None:
    async def main() -> None:
        async with edge(echo) as running:
            client, answer = await running.ask(data)
            assert answer.status == status
            client.writer.close()
            await until(lambda: running.server.num_connections == 0)

    run(main)


@pytest.mark.parametrize("filler", [b"1;" + b"a" * 5000 + b"\r\nx\r\n", b"1\r\nx\r\n0\r\n" + b"x-t: y\r\n" * 50_000])
def test_chunk_framing_without_content_is_refused(filler: bytes) -> None:
    async def main() -> None:
        async with edge(echo) as running:
            client = await running.connect()
            await client.send(b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(50):
                client.writer.write(filler)
            answer = await client.read_answer()
            assert answer.status == 400

    run(main)


def test_bodies_in_arrival_are_bounded_together() -> None:
    async def main() -> None:
        limits = HttpLimits(max_partial_bodies_bytes=5000)
        async with edge(echo, limits) as running:
            head = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 3000\r\n\r\n"
            first = await running.connect()
            await first.send(head + b"x" * 2900)
            await until(lambda: running.server._partial_bytes == 2900)
            second = await running.connect()
            await second.send(head + b"x" * 2900)
            refused = await second.read_answer()
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert b'"code":"overloaded"' in refused.body
            await first.send(b"x" * 100)
            assert (await first.read_answer()).status == 200
            assert running.server._partial_bytes == 0

    run(main)


def test_too_many_connections_are_refused_with_a_reason_and_room_is_given_back() -> None:
    async def main() -> None:
        async with edge(echo, HttpLimits(max_connections=2, linger_timeout_s=0.1)) as running:
            first, answer = await running.ask(get())
            await running.ask(get())
            refused = await running.connect()
            answer = await refused.read_answer()
            assert answer.status == 503
            assert await refused.is_closed()
            await first.close()
            await until(lambda: running.server.num_connections == 1)
            _, answer = await running.ask(get())
            assert answer.status == 200

    run(main)


def test_a_head_that_drips_in_is_timed_out() -> None:
    async def main() -> None:
        async with edge(echo, HttpLimits(header_timeout_s=0.2)) as running:
            client = await running.connect()

            async def drip() -> None:
                for byte in get("/", b"x-a: " + b"b" * 1000):
                    await client.send(bytes([byte]))
                    await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            assert (await client.read_answer()).status == 408
            assert await client.is_closed()
            dripping.cancel()

    run(main)


def test_silent_connections_are_closed_without_a_word() -> None:
    async def main() -> None:
        async with edge(echo, HttpLimits(header_timeout_s=0.2, keepalive_timeout_s=0.2)) as running:
            fresh = await running.connect()
            assert await fresh.is_closed()
            used, _ = await running.ask(get())
            assert await used.is_closed()

    run(main)


@pytest.mark.parametrize("drip", [0, 1])
def test_a_body_that_does_not_move_is_timed_out(drip: int) -> None:
    async def main() -> None:
        async with edge(echo, HttpLimits(body_timeout_s=0.2)) as running:
            client = await running.connect()
            await client.send(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 1000\r\n\r\n")

            async def send_slowly() -> None:
                for _ in range(200):
                    await client.send(b"x" * drip)
                    await asyncio.sleep(0.02)

            sending = asyncio.create_task(send_slowly())
            answer = await client.read_answer()
            assert answer.status == 408
            assert b"body" in answer.body
            sending.cancel()

    run(main)


def test_a_slow_body_that_moves_on_is_let_through() -> None:
    async def main() -> None:
        async with edge(echo, HttpLimits(body_timeout_s=0.2, min_body_bytes_per_s=1000)) as running:
            client = await running.connect()
            await client.send(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 8000\r\n\r\n")
            for _ in range(40):
                await client.send(b"x" * 200)
                await asyncio.sleep(0.02)
            assert (await client.read_answer()).status == 200

    run(main)


def test_two_thousand_half_sent_heads_do_not_hold_up_others_and_are_closed() -> None:
    async def main() -> None:
        async with edge(echo, HttpLimits(header_timeout_s=5.0)) as running:
            slow = [await running.connect() for _ in range(2000)]
            for client in slow:
                client.writer.write(b"GET / HTTP/1.1\r\nhost: te")
            await until(lambda: running.server.num_connections == 2000)
            for _ in range(5):
                _, answer = await running.ask(get())
                assert answer.status == 200
            statuses = {(await client.read_answer()).status for client in slow}
            assert statuses == {408}
            for client in slow:
                client.writer.close()
            await until(lambda: running.server.num_connections <= 5)

    run(main)


def test_pipelined_requests_are_answered_in_order_also_when_the_first_is_slow() -> None:
    async def main() -> None:
        waiting = []

        def handler(request, responder):
            if request.path == "/0":
                waiting.append(responder)
            elif int(request.path[1:]) % 2:
                responder.start(200, ())
                responder.write(request.path.encode())
                responder.finish()
            else:
                responder.send(200, (), request.path.encode())

        async with edge(handler) as running:
            client = await running.connect()
            await client.send(b"".join(get(f"/{i}") for i in range(10)))
            await until(lambda: bool(waiting))
            waiting[0].send(200, (), b"/0")
            for i in range(10):
                assert (await client.read_answer()).body == b"/%d" % i

    run(main)


def test_pipelining_beyond_the_bound_ends_the_connection_after_the_answers() -> None:
    async def main() -> None:
        started = []

        def handler(request, responder):
            started.append(responder)

        async with edge(handler, HttpLimits(max_pipelined=4)) as running:
            client = await running.connect()
            await client.send(b"".join(get(f"/{i}") for i in range(5000)))
            for i in range(4):
                await until(lambda expected=i + 1: len(started) == expected)
                started[i].send(200, (), b"ok")
                assert (await client.read_answer()).status == 200
            assert (await client.read_answer()).status == 429
            assert await client.is_closed()
            assert len(started) == 4

    run(main)


def test_a_client_ahead_of_us_is_held_back_and_then_served() -> None:
    async def main() -> None:
        started = []

        def handler(request, responder):
            started.append((request, responder))

        async with edge(handler, HttpLimits(max_body_bytes=200_000, body_timeout_s=0.1)) as running:
            client = await running.connect()
            body = b"x" * 150_000
            sending = asyncio.create_task(client.send(b"".join(post(body, path=f"/{i}") for i in range(100))))
            await asyncio.sleep(0.5)
            connection = next(iter(running.server._connections))
            held = sum(len(exchange.request.body) for exchange in connection._waiting)
            assert held <= 200_000 + 2 * 150_000
            assert not sending.done()
            for i in range(100):
                await until(lambda expected=i + 1: len(started) == expected)
                request, responder = started[i]
                assert (request.path, request.body) == (f"/{i}", body)
                responder.send(200, (), b"")
                assert (await client.read_answer()).status == 200
            await sending

    run(main)


def test_data_after_a_closing_request_is_ignored() -> None:
    async def main() -> None:
        async with edge(echo) as running:
            client, answer = await running.ask(get("/a", b"connection: close") + get("/b"))
            assert answer.body == b"GET /a ? 0:"
            assert answer.headers["connection"] == "close"
            assert await client.is_closed()

    run(main)
