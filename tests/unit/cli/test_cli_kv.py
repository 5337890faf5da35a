"""`headwater kv warm --prompts`: a server computes prompts, once each. The other verbs are in the cluster tests."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headwater.cli.main import main


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body))  # type: ignore[attr-defined]
        self.answer(500 if body.get("prompt") == "fails" else 200, {})

    def answer(self, status: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    served = HTTPServer(("127.0.0.1", 0), Handler)
    served.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def warm(server: HTTPServer, file: Path) -> int:
    return main(["kv", "warm", "--prompts", str(file), "--url", f"http://127.0.0.1:{server.server_port}"])


def test_each_prompt_is_computed_once(server: HTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "system", "content": "You are kind."}], "model": "other"}
    file.write_text(f"{json.dumps(chat)}\n\n{json.dumps({'prompt': 'Once upon a time'})}\n")
    assert warm(server, file) == 0
    assert server.asked == [  # type: ignore[attr-defined]
        ("/v1/chat/completions", {**chat, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "Once upon a time", "model": "model", "max_tokens": 1}),
    ]
    assert "2 prompts computed" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["not json", "[1]", "{}", '{"prompt": "fails"}'])
def test_a_line_that_does_not_work_is_named(
    server: HTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    assert warm(server, file) != 0
    assert "line 2" in capsys.readouterr().err
