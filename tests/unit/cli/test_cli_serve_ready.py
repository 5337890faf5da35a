"""When `serve` says that it is ready."""

import threading
from typing import Any

import pytest

from headwater.cli import serve
from headwater.cli.http import Server
from headwater.errors import Unavailable


class Scripted(Server):
    """Answers as whoever took the connection would: (frontend, ready), or nobody."""

    def __init__(self, *answers: tuple[str, bool] | None) -> None:
        super().__init__("http://127.0.0.1:1")
        self.answers = list(answers)

    def get_json(self, path: str) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise Unavailable("nobody listens")
        return {"frontend": {"id": answer[0]}, "models": [{"ready": answer[1]}]}


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_POLL_S", 0.001)


def test_all_frontends_must_be_able_to_serve() -> None:
    server = Scripted(None, ("a", False), ("a", True), ("b", False), ("a", True), ("b", True), ("c", True))
    serve.poll(server, 2, threading.Event())
    assert server.answers == [("c", True)]


def test_a_frontend_that_does_not_follow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_POLL_TIMEOUT_S", 0.05)
    serve.poll(Scripted(("a", True)), 2, threading.Event())


def test_it_ends_when_told() -> None:
    enough = threading.Event()
    thread = threading.Thread(target=serve.poll, args=(Scripted(None), 1, enough))
    thread.start()
    enough.set()
    thread.join(20)
    assert not thread.is_alive()
