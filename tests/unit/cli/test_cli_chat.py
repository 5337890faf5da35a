"""`headwater chat` against scripted servers, for what a healthy server never does; the real one is in tests/cluster."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from headwater.cli.chat import Answer, Conversation, first_model, printable
from headwater.cli.http import Server
from headwater.cli.main import main
from headwater.errors import HeadwaterError, WorkerLost


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers each POST with the next of `answers`: (status, body), and keeps what was asked; so too GET, while there
    are `listings`."""

    answers: ClassVar[list[tuple[int, bytes]]] = []
    listings: ClassVar[list[tuple[int, bytes]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        found = 200, json.dumps({"data": [{"id": "the-model"}]}).encode()
        self._answer(*(self.listings.pop(0) if self.listings else found))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.asked.append({"key": self.headers.get("authorization"), **json.loads(body)})
        self._answer(*self.answers.pop(0))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body) + (100 if body.endswith(b"cut") else 0)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    Scripted.answers, Scripted.asked, Scripted.listings = [], [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield Server(f"http://127.0.0.1:{listening.server_port}", "key", timeout_s=10.0)
        listening.shutdown()
        thread.join()


def events(*payloads: object) -> bytes:
    return b"".join(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads) + b"data: [DONE]\n\n"


def piece(text: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def test_an_answer_is_printed_remembered_and_counted(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    Scripted.answers = [
        (
            200,
            b": a comment\n\n"
            + events(piece("Hel"), piece("lo"), piece(None, "stop"), {"usage": {"completion_tokens": 7}}),
        ),
        (200, events(piece("again", "stop"))),
    ]
    chat = Conversation(server, first_model(server), [{"role": "system", "content": "be kind"}])
    answer = chat.ask("hi")
    assert answer.text == "Hello"
    assert (answer.completion_tokens, answer.complete) == (7, True)
    assert "7 tokens" in answer.figures()
    chat.ask("more")
    first, second = Scripted.asked
    assert first["key"] == "Bearer key"
    assert first["model"] == "the-model"
    assert [message["content"] for message in second["messages"]] == ["be kind", "hi", "Hello", "more"]
    chat.reset()
    assert [message["role"] for message in chat.messages] == ["system"]
    assert capsys.readouterr().out == "Helloagain"


@pytest.mark.parametrize(
    ("status", "body", "error", "says"),
    [
        (400, b'{"error": {"message": "too long"}}', HeadwaterError, "too long"),
        (502, b"<html>bad gateway</html>", HeadwaterError, "bad gateway"),
        (500, b"", HeadwaterError, "no reason given"),
        (200, events(piece("Hel"), {"error": {"message": "worker lost"}}), HeadwaterError, "worker lost"),
        (200, b"data: {nonsense\n\n", WorkerLost, "the stream broke"),
        (200, b"data: [1]\n\n", WorkerLost, "no event"),
    ],
)
def test_failures_say_why_and_leave_the_conversation_as_it_was(
    server: Server, status: int, body: bytes, error: type[HeadwaterError], says: str
) -> None:
    Scripted.answers = [(status, body)]
    chat = Conversation(server, "m", [])
    with pytest.raises(error, match=says):
        chat.ask("hi")
    assert chat.messages == []


def test_a_stream_that_ends_early_is_said_to_be_broken(server: Server) -> None:
    Scripted.answers = [(200, events(piece("Hel")).removesuffix(b"data: [DONE]\n\n"))]
    answer = Conversation(server, "m", []).ask("hi")
    assert not answer.complete
    assert "broken connection" in answer.figures()


def test_once_is_for_scripts(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    Scripted.answers = [(200, events(piece("Hi"), piece(None, "length"))), (200, b"")]
    assert main(["chat", "--url", server.url + "/v1/", "--once", "hi", "--max-tokens", "5", "--system", "s"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hi"
    assert "TTFT" in captured.err
    assert Scripted.asked[0]["max_tokens"] == 5
    assert "temperature" not in Scripted.asked[0]
    assert main(["chat", "--url", server.url, "--once", "hi"]) == 1


def test_figures_of_an_answer() -> None:
    answer = Answer(asked_at=1.0)
    assert answer.figures() == "no answer"
    for at in (1.25, 1.5, 2.25):
        answer.add("x", at)
    answer.finish_reason = "stop"
    assert answer.figures() == "TTFT 250 ms, 3 tokens, 2.0 tokens/s"


def test_terminals_are_not_steered() -> None:
    assert printable("a\x1b[31mb\x07\n\té") == "a[31mb\n\té"


def test_waiting_goes_on_until_there_is_a_model(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    Scripted.listings = [(503, b"not yet"), (200, b'{"data": []}')]
    Scripted.answers = [(200, events(piece("Hello", "stop")))]
    assert main(["chat", "--url", server.url, "--wait", "20s", "--once", "hi"]) == 0
    assert capsys.readouterr().out.startswith("Hello")


def test_a_refusal_is_not_waited_out(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    Scripted.listings = [(401, b'{"error": {"message": "no key was sent"}}')] * 2
    assert main(["chat", "--url", server.url, "--wait", "1h", "--once", "hi"]) == 1
    assert "no key was sent" in capsys.readouterr().err


def test_waiting_for_a_serve_that_is_not_announced_yet_ends_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--pid", "1", "--wait", "1ms", "--once", "hi"]) == 3
    assert "not ready in time: no `headwater serve` with process id 1" in capsys.readouterr().err
