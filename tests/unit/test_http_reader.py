"""The reader: the same requests however the bytes arrive, and nothing but `BadHead` for anything else."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.frontend.http.base import HttpRequest
from headwater.frontend.http.head import BadHead, RequestIds, split_target
from headwater.frontend.http.limits import HttpLimits
from headwater.frontend.http.reader import IDLE, RequestReader
from headwater.frontend.http.replies import date_line, reply_for, status_line

Seen = tuple[str, str, str, bytes, bool, bool]


def read(pieces: list[bytes], limits: HttpLimits | None = None) -> tuple[list[Seen], str | None]:
    """(requests understood, refusal)."""
    seen: list[Seen] = []

    def on_request(request: HttpRequest, keep_alive: bool, http10: bool) -> None:
        seen.append((request.method, request.path, request.query, request.body, keep_alive, http10))

    reader = RequestReader(limits or HttpLimits(), on_request)
    try:
        for piece in pieces:
            reader.feed(piece)
    except BadHead as refusal:
        return seen, f"{refusal.status} {refusal.message}"
    return seen, None


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({min(max(0, position), len(data)) for position in at} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(edges)]


tokens = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).map(str.encode)
values = st.binary(max_size=20).map(lambda raw: bytes(33 + byte % 94 for byte in raw))


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, Seen]:
    """A proper request and what it means."""
    path = "/" + "/".join(draw(st.lists(tokens, max_size=3).map(lambda parts: [p.decode() for p in parts])))
    query = draw(st.sampled_from(["", "a=b", "x"]))
    body = draw(st.binary(max_size=300))
    framing = draw(st.sampled_from(["length", "chunked"]))
    upgrade = draw(st.booleans())
    lines = [b"POST %b HTTP/1.1" % (path + ("?" + query if query else "")).encode(), b"Host: test"]
    lines += [b"x-%b: %b" % (name, value) for name, value in draw(st.lists(st.tuples(tokens, values), max_size=4))]
    if upgrade:
        lines += [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c"]
    if framing == "length":
        lines.append(b"Content-Length: %d" % len(body))
        content = body
    else:
        lines.append(b"Transfer-Encoding: chunked")
        sizes = draw(st.lists(st.integers(0, len(body)), max_size=4))
        content = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut(body, sizes) if piece) + b"0\r\n\r\n"
    data = b"\r\n".join([*lines, b"", b""]) + content
    return data, ("POST", path, query, body, True, False)


@given(batch=st.lists(messages(), min_size=1, max_size=4), at=st.lists(st.integers(0, 2000), max_size=12))
@settings(max_examples=300, deadline=None)
def test_requests_are_understood_alike_wherever_the_bytes_are_cut(
    batch: list[tuple[bytes, Seen]], at: list[int]
) -> None:
    data = b"".join(message for message, _ in batch)
    seen, refusal = read(cut(data, at))
    assert refusal is None
    assert seen == [expected for _, expected in batch]


@given(
    message=messages(),
    position=st.integers(0, 5000),
    junk=st.binary(min_size=1, max_size=8) | st.sampled_from([b"\n", b"\r", b"\0", b" ", b"\r\n", b"\r\n\r\n", b":"]),
    at=st.lists(st.integers(0, 2000), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_damage_is_refused_or_harmless_and_does_not_depend_on_the_cuts(
    message: tuple[bytes, Seen], position: int, junk: bytes, at: list[int]
) -> None:
    data = message[0]
    position %= len(data) + 1
    damaged = data[:position] + junk + data[position:] + b"GET /next HTTP/1.1\r\nhost: test\r\n\r\n"
    whole = read([damaged])
    pieces = read(cut(damaged, at))
    assert pieces[0] == whole[0]
    assert (pieces[1] is None) == (whole[1] is None)


@given(data=st.binary(max_size=400), at=st.lists(st.integers(0, 400), max_size=5))
@example(b"\x16\x03\x01\x02\x00", [])
@settings(max_examples=200, deadline=None)
def test_noise_never_does_more_than_being_refused(data: bytes, at: list[int]) -> None:
    read(cut(data, at))


def test_a_reader_knows_when_it_is_between_messages() -> None:
    reader = RequestReader(HttpLimits(), lambda *request: None)
    assert reader.phase == IDLE
    reader.feed(b"GET / HTTP/1.1\r\nhost: t")
    assert reader.phase != IDLE
    assert reader.unfinished().path == "-"
    reader.feed(b"est\r\n\r\n")
    assert reader.phase == IDLE


@pytest.mark.parametrize(
    ("method", "target", "host", "expected"),
    [
        ("GET", b"/", b"h", ("/", "")),
        ("GET", b"/a%20b?c%20d", b"h", ("/a b", "c%20d")),
        ("GET", b"/a?b?c", b"h", ("/a", "b?c")),
        ("GET", b"/a#frag", b"h", ("/a", "")),
        ("GET", b"//x/y", b"h", ("//x/y", "")),
        ("GET", b"http://h?q", b"H", ("/", "q")),
        ("OPTIONS", b"*", b"h", ("*", "")),
    ],
)
def test_targets(method: str, target: bytes, host: bytes, expected: tuple[str, str]) -> None:
    assert split_target(method, target, host) == expected


@pytest.mark.parametrize(
    ("lines", "refusal"),
    [
        (b"transfer-encoding: gzip", '501 transfer-encoding is "gzip", expected chunked'),
        (b"content-encoding: br", '415 content-encoding is "br", expected a plain body'),
        (b"expect: tea", '417 expect is "tea", expected 100-continue'),
        (b"x-y: " + b"z" * 40_000, "431 the head is too large: at most 128 headers of 32768 bytes in all"),
    ],
)
def test_a_head_is_refused_by_what_was_given(lines: bytes, refusal: str) -> None:
    assert read([b"POST / HTTP/1.1\r\nhost: test\r\n" + lines + b"\r\n\r\n"]) == ([], refusal)


@pytest.mark.parametrize(
    ("line", "host", "refusal"),
    [
        (b"GET / HTTP/1.1", b"a/b\xe9", '400 the host header is "a/b\\u00e9", expected a host name'),
        (b"GET / HTTP/1.1", b"/" * 100, f'400 the host header is "{"/" * 60}…" (100 bytes), expected'),
        (
            b"GET http://evil/ HTTP/1.1",
            b"test",
            '400 the request target names the host "evil", the host header is "test"',
        ),
    ],
)
def test_hosts_are_refused_by_what_was_given(line: bytes, host: bytes, refusal: str) -> None:
    seen, said = read([line + b"\r\nhost: " + host + b"\r\n\r\n"])
    assert not seen
    assert said is not None
    assert said.startswith(refusal)


def test_request_ids_are_the_clients_where_safe_and_unique_otherwise() -> None:
    ids = RequestIds()
    assert ids.accept(b"abc-1:2/3") == "abc-1:2/3"
    made = {ids.accept(given) for given in (None, b"", b"a\r\nb", b"a b", b"\xff", b"x" * 129)}
    assert len(made) == 6
    assert RequestIds().accept(None) not in made


def test_dates_and_status_lines() -> None:
    assert date_line(0) == b"date: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
    assert date_line(1709210096) == b"date: Thu, 29 Feb 2024 12:34:56 GMT\r\n"
    assert status_line(404) == b"HTTP/1.1 404 Not Found\r\n"
    assert status_line(599) == b"HTTP/1.1 599 Unknown\r\n"


def test_errors_become_replies_with_their_headers() -> None:
    from headwater.errors import Overloaded, RequestError, Unauthorized

    assert reply_for(Overloaded("full", retry_after_s=0.2)).headers[1] == (b"retry-after", b"1")
    assert reply_for(Unauthorized("no key")).headers[1] == (b"www-authenticate", b"Bearer")
    reply = reply_for(RequestError("bad", param="n"))
    assert reply.status == 400
    assert reply.body == (
        b'{"error":{"message":"bad","type":"invalid_request_error","param":"n","code":"invalid_request_error"}}'
    )
