"""The edge over real sockets: one reading of every message, and none of what has two."""

import asyncio

import pytest
from raw_http import echo, edge, get, post, run

from headwater.frontend.http.limits import HttpLimits

POST_HEAD = b"POST /a HTTP/1.1\r\nhost: test\r\n"
CHUNKED = POST_HEAD + b"transfer-encoding: chunked\r\n\r\n"

REFUSED = {
    "length and chunked": (POST_HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked and length": (POST_HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n", 400),
    "equal lengths twice": (POST_HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\nhi", 400),
    "different lengths": (POST_HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\nhi!", 400),
    "list of lengths": (POST_HEAD + b"content-length: 2, 2\r\n\r\nhi", 400),
    "signed length": (POST_HEAD + b"content-length: +2\r\n\r\nhi", 400),
    "negative length": (POST_HEAD + b"content-length: -2\r\n\r\nhi", 400),
    "hexadecimal length": (POST_HEAD + b"content-length: 0x2\r\n\r\nhi", 400),
    "empty length": (POST_HEAD + b"content-length: \r\n\r\nhi", 400),
    "overflowing length": (POST_HEAD + b"content-length: 99999999999999999999999\r\n\r\nhi", 400),
    "space before colon": (POST_HEAD + b"content-length : 2\r\n\r\nhi", 400),
    "folded header": (POST_HEAD + b"x-a: b\r\n c\r\n\r\n", 400),
    "space before first header": (b"GET / HTTP/1.1\r\n host: test\r\n\r\n", 400),
    "bare LF in the request line": (b"GET / HTTP/1.1\nhost: test\r\n\r\n", 400),
    "bare LF in a header": (POST_HEAD + b"x-a: b\nx-c: d\r\n\r\n", 400),
    "bare CR in a header": (POST_HEAD + b"x-a: b\rx-c: d\r\n\r\n", 400),
    "NUL in a header": (POST_HEAD + b"x-a: b\0c\r\n\r\n", 400),
    "space in a header name": (POST_HEAD + b"x a: b\r\n\r\n", 400),
    "no colon": (POST_HEAD + b"x-a\r\n\r\n", 400),
    "empty header name": (POST_HEAD + b": b\r\n\r\n", 400),
    "compressed body": (POST_HEAD + b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\nx", 415),
    "encoding identity": (POST_HEAD + b"transfer-encoding: identity\r\n\r\n", 501),
    "encoding gzip, chunked": (POST_HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "encoding chunked, gzip": (POST_HEAD + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "encoding xchunked": (POST_HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    "encoding with vertical tab": (POST_HEAD + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n", 400),
    "encoding twice": (POST_HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "encoding in HTTP/1.0": (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "letters as chunk size": (CHUNKED + b"zz\r\n", 400),
    "0x in a chunk size": (CHUNKED + b"0x2\r\nhi\r\n0\r\n\r\n", 400),
    "negative chunk size": (CHUNKED + b"-2\r\nhi\r\n0\r\n\r\n", 400),
    "overflowing chunk size": (CHUNKED + b"fffffffffffffffff\r\nhi\r\n0\r\n\r\n", 400),
    "LF after chunk size": (CHUNKED + b"2\nhi\r\n0\r\n\r\n", 400),
    "space after chunk size": (CHUNKED + b"2 \r\nhi\r\n0\r\n\r\n", 400),
    "longer chunk than said": (CHUNKED + b"2\r\nhi!\r\n0\r\n\r\n", 400),
    "LF after chunk data": (CHUNKED + b"2\r\nhi\n0\r\n\r\n", 400),
    "LF in a chunk extension": (CHUNKED + b"2;a\nb\r\nhi\r\n0\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400),
    "host list": (b"GET / HTTP/1.1\r\nhost: a, b\r\n\r\n", 400),
    "host with path": (b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", 400),
    "host with user": (b"GET / HTTP/1.1\r\nhost: me@a\r\n\r\n", 400),
    "two content types": (POST_HEAD + b"content-type: a/b\r\ncontent-type: c/d\r\ncontent-length: 0\r\n\r\n", 400),
    "two authorizations": (POST_HEAD + b"authorization: a\r\nauthorization: b\r\ncontent-length: 0\r\n\r\n", 400),
    "absolute form, other host": (b"GET http://evil/ HTTP/1.1\r\nhost: test\r\n\r\n", 400),
    "authority form": (b"GET test:80 HTTP/1.1\r\nhost: test\r\n\r\n", 400),
    "connect": (b"CONNECT test:80 HTTP/1.1\r\nhost: test\r\n\r\n", 405),
    "asterisk for GET": (b"GET * HTTP/1.1\r\nhost: test\r\n\r\n", 400),
    "relative target": (b"GET a/b HTTP/1.1\r\nhost: test\r\n\r\n", 400),
    "space in the target": (b"GET /a b HTTP/1.1\r\nhost: test\r\n\r\n", 400),
    "NUL in the target": (b"GET /a\0b HTTP/1.1\r\nhost: test\r\n\r\n", 400),
    "encoded NUL in the target": (b"GET /a%00b HTTP/1.1\r\nhost: test\r\n\r\n", 400),
    "encoded CR in the target": (b"GET /a%0d%0ab HTTP/1.1\r\nhost: test\r\n\r\n", 400),
    "target not UTF-8": (b"GET /a%ffb HTTP/1.1\r\nhost: test\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 505),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nhost: test\r\n\r\n", 505),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/1.10": (b"GET / HTTP/1.10\r\nhost: test\r\n\r\n", 400),
    "lower case": (b"get / http/1.1\r\nhost: test\r\n\r\n", 400),
    "unknown method": (b"FROBNICATE / HTTP/1.1\r\nhost: test\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "other expectation": (POST_HEAD + b"expect: tea\r\ncontent-length: 2\r\n\r\nhi", 417),
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda name: name.replace(" ", "-"))
def test_ambiguous_or_malformed_messages_are_refused_and_the_connection_closed(case: str) -> None:
    data, status = REFUSED[case]
    seen: list[str] = []

    async def main() -> None:
        async with edge(lambda request, responder: seen.append(request.path)) as running:
            client, answer = await running.ask(data + get("/smuggled"))
            assert answer.status == status
            assert answer.headers["connection"] == "close"
            assert answer.headers["content-type"] == "application/json"
            assert b'"error":{"message":' in answer.body
            assert await client.is_closed()

    run(main)
    assert seen == [], "nothing of it may reach the application"


@pytest.mark.parametrize("case", ["length and chunked", "bare LF in a header", "letters as chunk size", "two hosts"])
def test_refusals_do_not_depend_on_how_the_bytes_arrive(case: str) -> None:
    data, status = REFUSED[case]

    async def main() -> None:
        async with edge(echo) as running:
            client = await running.connect(limit=2**20)
            for i in range(len(data)):
                client.writer.write(data[i : i + 1])
                await asyncio.sleep(0)
            answer = await client.read_answer()
            assert answer.status == status

    run(main)


ACCEPTED = {
    "plain": (get("/a/b?c=d"), b"GET /a/b ?c=d 0:"),
    "body": (post(b"hello", path="/p"), b"POST /p ? 5:hello"),
    "leading empty lines": (b"\r\n\r\n" + get("/x"), b"GET /x ? 0:"),
    "absolute form, same host": (b"GET http://TEST/a?b HTTP/1.1\r\nhost: test\r\n\r\n", b"GET /a ?b 0:"),
    "absolute form without path": (b"GET http://test HTTP/1.1\r\nhost: test\r\n\r\n", b"GET / ? 0:"),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\nhost: test\r\n\r\n", b"OPTIONS * ? 0:"),
    "escaped path": (get("/v1/models/org%2Fname%20%C3%A9"), "GET /v1/models/org/name é ? 0:".encode()),
    "chunked": (CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", b"POST /a ? 5:abcde"),
    "chunked with trailer": (CHUNKED + b"1\r\na\r\n0\r\nhost: evil\r\n\r\n", b"POST /a ? 1:a"),
    "upper-case chunked": (POST_HEAD + b"Transfer-Encoding: CHUNKED\r\n\r\n1\r\na\r\n0\r\n\r\n", b"POST /a ? 1:a"),
    "IPv6 host": (b"GET / HTTP/1.1\r\nhost: [::1]:8000\r\n\r\n", b"GET / ? 0:"),
    "upgrade is ignored": (get("/u", b"connection: upgrade", b"upgrade: h2c"), b"GET /u ? 0:"),
    "upgrade with body": (post(b"hi", b"connection: upgrade", b"upgrade: h2c", path="/u"), b"POST /u ? 2:hi"),
    "a body that says it is plain": (post(b"hi", b"content-encoding: identity", path="/i"), b"POST /i ? 2:hi"),
    "GET with a body": (b"GET /a HTTP/1.1\r\nhost: test\r\ncontent-length: 2\r\n\r\nhi", b"GET /a ? 2:hi"),
}


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_well_formed_messages_are_understood_however_they_arrive(case: str, piece: int) -> None:
    data, expected = ACCEPTED[case]

    async def main() -> None:
        async with edge(echo) as running:
            client = await running.connect()
            for _ in range(2):  # twice: the connection stays usable
                for i in range(0, len(data), piece):
                    await client.send(data[i : i + piece])
                    await asyncio.sleep(0)
                answer = await client.read_answer()
                assert (answer.status, answer.body) == (200, expected)
                assert "connection" not in answer.headers

    run(main)


def test_trailers_do_not_become_headers() -> None:
    seen: list[dict[bytes, bytes]] = []

    async def main() -> None:
        def handler(request, responder):
            seen.append(dict(request.headers))
            responder.send(200, (), b"")

        async with edge(handler) as running:
            await running.ask(CHUNKED + b"1\r\na\r\n0\r\nauthorization: Bearer x\r\nhost: evil\r\n\r\n")

    run(main)
    assert seen == [{b"host": b"test", b"transfer-encoding": b"chunked"}]


def test_repeated_harmless_headers_are_joined() -> None:
    async def main() -> None:
        def handler(request, responder):
            responder.send(200, (), request.headers[b"accept"])

        async with edge(handler) as running:
            _, answer = await running.ask(get("/", b"Accept: a", b"aCCept: b"))
            assert answer.body == b"a, b"

    run(main)


def test_http_1_0_closes_unless_asked_to_keep_alive() -> None:
    async def main() -> None:
        async with edge(echo) as running:
            client, answer = await running.ask(b"GET /a HTTP/1.0\r\n\r\n")
            assert answer.status == 200
            assert answer.headers["connection"] == "close"
            assert await client.is_closed()
            client, answer = await running.ask(b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            assert answer.headers["connection"] == "keep-alive"
            await client.send(b"GET /b HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            assert (await client.read_answer()).body == b"GET /b ? 0:"

    run(main)


def test_http_1_0_streams_end_with_the_connection() -> None:
    async def main() -> None:
        def handler(request, responder):
            responder.start(200, ())
            responder.write(b"one")
            responder.write(b"two")
            responder.finish()

        async with edge(handler) as running:
            client = await running.connect()
            await client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            answer = await client.read_answer()
            assert answer.body == b"onetwo"
            assert "transfer-encoding" not in answer.headers

    run(main)


def test_head_has_the_length_but_no_body() -> None:
    async def main() -> None:
        def handler(request, responder):
            if request.path == "/stream":
                responder.start(200, ())
                responder.write(b"data")
                responder.finish()
            else:
                responder.send(200, (), b"12345")

        async with edge(handler) as running:
            client = await running.connect()
            for path in ("/send", "/stream", "/send"):
                await client.send(b"HEAD %b HTTP/1.1\r\nhost: test\r\n\r\n" % path.encode())
                answer = await client.read_answer(head_only=True)
                assert answer.status == 200
            assert answer.headers["content-length"] == "5"
            await client.send(get("/send"))
            assert (await client.read_answer()).body == b"12345"

    run(main)


def test_expect_continue_is_asked_for_only_when_the_head_is_acceptable() -> None:
    async def main() -> None:
        async with edge(echo, HttpLimits(max_body_bytes=10)) as running:
            client = await running.connect()
            for _ in range(2):
                await client.send(POST_HEAD + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n")
                assert (await client.read_answer()).status == 100
                await client.send(b"hi")
                assert (await client.read_answer()).body == b"POST /a ? 2:hi"
            await client.send(POST_HEAD + b"content-length: 11\r\nexpect: 100-continue\r\n\r\n")
            assert (await client.read_answer()).status == 413

    run(main)


def test_expect_continue_waits_for_its_turn_behind_a_running_request() -> None:
    async def main() -> None:
        running_responders = []

        def handler(request, responder):
            if request.path == "/slow":
                running_responders.append(responder)
            else:
                echo(request, responder)

        async with edge(handler) as running:
            client = await running.connect()
            await client.send(get("/slow") + POST_HEAD + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n")
            await asyncio.sleep(0.05)
            running_responders[0].send(200, (), b"first")
            assert (await client.read_answer()).body == b"first"
            assert (await client.read_answer()).status == 100
            await client.send(b"hi")
            assert (await client.read_answer()).body == b"POST /a ? 2:hi"

    run(main)


def test_answers_carry_date_and_request_id() -> None:
    async def main() -> None:
        async with edge(echo) as running:
            client, answer = await running.ask(get("/", b"X-Request-Id: abc-1"))
            assert answer.headers["x-request-id"] == "abc-1"
            assert answer.headers["date"].endswith(" GMT")
            ids = set()
            for given in (b"", b"a b", b"x" * 200, "é".encode(), b"<script>"):
                await client.send(get("/", b"x-request-id: " + given))
                ids.add((await client.read_answer()).headers["x-request-id"])
            assert len(ids) == 5
            assert all(found.startswith("req-") for found in ids)

    run(main)


def test_cors_answers_only_allowed_origins() -> None:
    async def main() -> None:
        async with edge(echo, cors=("https://app.example",)) as running:
            client, answer = await running.ask(get("/", b"origin: https://app.example"))
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
            await client.send(get("/", b"origin: https://evil.example"))
            assert "access-control-allow-origin" not in (await client.read_answer()).headers
            await client.send(
                b"OPTIONS /v1/models HTTP/1.1\r\nhost: test\r\norigin: https://app.example\r\n"
                b"access-control-request-method: POST\r\naccess-control-request-headers: x-a, x-b\r\n\r\n"
            )
            answer = await client.read_answer()
            assert answer.status == 204
            assert answer.headers["access-control-allow-headers"] == "x-a, x-b"
            assert "POST" in answer.headers["access-control-allow-methods"]
        async with edge(echo) as running:
            _, answer = await running.ask(get("/", b"origin: https://app.example"))
            assert not any(name.startswith("access-control") for name in answer.headers)

    run(main)
