"""Bodies made to hang, crash or fill a server: each is a 4xx, soon, and costs no more than it weighs."""

import asyncio
import json
import re
import socket
import zlib
from pathlib import Path
from typing import Any

import pytest

from headwater.frontend.http.head import BadHead
from headwater.frontend.http.limits import HttpLimits
from headwater.frontend.http.reader import RequestReader
from headwater.weights import ResolvedModel
from openai_twin import Api, served_demo

SOURCE = Path(__file__).resolve().parents[2] / "src"
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
DEEP = 100_000
DEEP_LIST = b"[" * DEEP + b"]" * DEEP
DEEP_SCHEMA = b'{"properties":{"a":' * 20_000 + b"1" + b"}}" * 20_000


@pytest.fixture(scope="module")
def api(demo_model: ResolvedModel) -> Api:
    return Api(served_demo(demo_model))


def colliding_keys(count: int) -> str:
    """Integers beyond 2**61 whose hashes are equal, as JSON keys and values; and names of one length."""
    members = [f'"{number * (2**61 - 1)}": {number * (2**61 - 1)}' for number in range(1, count)]
    return "{" + ", ".join(members) + "}"


BOMBS = {
    "deep lists": b'{"model": "demo", "messages": ' + DEEP_LIST + b"}",
    "deep objects": b'{"model": "demo", "x": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "deep and unfinished": b"[" * DEEP,
    "deep in a message": b'{"model": "demo", "messages": [{"role": "user", "content": ' + DEEP_LIST + b"}]}",
    "deep schema": b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "response_format": {"type": '
    b'"json_schema", "json_schema": {"name": "n", "schema": ' + DEEP_SCHEMA + b"}}}",
    "colliding keys": b'{"model": "demo", "logit_bias": ' + colliding_keys(20_000).encode() + b"}",
    "a long number": b'{"model": "demo", "prompt": [' + b"9" * 1_000_000 + b"]}",
    "a long fraction": b'{"model": "demo", "temperature": 0.' + b"1" * 1_000_000 + b"}",
    "a huge exponent": b'{"model": "demo", "temperature": 1e999999999}',
    "not a number": b'{"model": "demo", "temperature": NaN}',
    "many fields": b"{" + b",".join(b'"f%d": 1' % number for number in range(100_000)) + b"}",
    "many messages": json.dumps({"model": "demo", "messages": [{"role": "x"}] * 100_000}).encode(),
    "many repeated fields": b"{" + b",".join([b'"model": "demo"'] * 100_000) + b"}",
    "no UTF-8": b'{"model": "demo", "prompt": "\xff\xfe"}',
    "a lone surrogate": b'{"model": "demo", "prompt": "\\ud800"}',
    "nul": b'{"model": "demo\\u0000", "prompt": "x"}',
    "compressed": zlib.compress(b"0" * 10_000_000),
    "an enormous prompt": json.dumps({"model": "demo", "prompt": "a " * 4_000_000}).encode(),
    "enormous token ids": json.dumps({"model": "demo", "prompt": [2**63] * 1000}).encode(),
    "too many answers": json.dumps({"model": "demo", "prompt": "x", "n": 10**9}).encode(),
    "too many tokens": json.dumps({"model": "demo", "prompt": "x", "max_tokens": 10**12}).encode(),
    "a long stop string": json.dumps({"model": "demo", "prompt": "x", "stop": ["a" * 10_000_000]}).encode(),
    "a costly pattern": json.dumps({"model": "demo", "prompt": "x", "guided_regex": "(" * 500_000}).encode(),
}


GENERATING = ("too many answers", "too many tokens", "a long stop string", "a costly pattern")
"""What the tokenizer's endpoints have no field for."""


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path in PATHS for name in BOMBS if path.startswith("/v1") or name not in GENERATING],
)
def test_bombs_are_refused(api: Api, path: str, name: str) -> None:
    api.dispatcher.requests.clear()
    responder = asyncio.run(api.post(path, BOMBS[name]))
    assert 400 <= responder.status < 500, (responder.status, path)
    assert len(json.dumps(responder.error)) < 5000, "what is refused is not repeated at length"
    assert api.dispatcher.requests == []


HEADS = {
    "a long target": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"h%d: 1\r\n" % n for n in range(10_000)) + b"\r\n",
    "one header ten thousand times": b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    "a gzip body": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc",
    "a body of exabytes": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999999999999999999\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "TLS to a clear port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
    "nothing but noise": bytes(range(256)) * 10,
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("piece", [1 << 20, 997])
def test_heads_are_refused(name: str, piece: int) -> None:
    seen: list[object] = []
    reader = RequestReader(HttpLimits(), lambda request, keep_alive, http10: seen.append(request))
    data = HEADS[name]

    def feed() -> None:
        for at in range(0, len(data), piece):
            reader.feed(data[at : at + piece])

    with pytest.raises(BadHead) as caught:
        feed()
    assert 400 <= caught.value.status < 600
    assert seen == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data/"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "https://example.org/x.mp4"}},
        {"type": "file", "file": {"file_id": "../../etc/passwd"}},
    ],
)
def test_urls_of_media_are_refused_and_not_fetched(
    api: Api, part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("something was looked up or dialled")

    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
    responder = None

    async def post() -> Any:
        monkeypatch.setattr(socket, "getaddrinfo", no_network)
        monkeypatch.setattr(socket.socket, "connect", no_network)
        return await api.post("/v1/chat/completions", {"model": "demo", "messages": messages})

    responder = asyncio.run(post())
    assert responder.status == 400
    assert responder.error["param"] == "messages[0].content[1].type"
    assert "169.254" not in json.dumps(responder.error)


FORBIDDEN = re.compile(
    r"^\s*(?:import|from)\s+(?:pickle|cPickle|dill|cloudpickle|marshal|shelve)\b|\b(?:eval|exec)\(|yaml\.load\(|torch\.load\(",
    re.MULTILINE,
)
_HARMLESS = re.compile(r"\.(?:eval|exec)\(|def (?:eval|exec)\(|yaml\.load\([^)]*Safe|weights_only=True")


def test_nothing_is_unpickled_or_evaluated() -> None:
    for path in SOURCE.rglob("*.py"):
        for line in path.read_text().splitlines():
            if FORBIDDEN.search(line) and not _HARMLESS.search(line):
                raise AssertionError(f"{path}: {line.strip()}")
