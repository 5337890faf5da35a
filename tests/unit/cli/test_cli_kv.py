"""Which store the verbs of `headwater kv` ask, and `warm --prompts`: a server computes prompts, once each. The other
verbs are in the cluster tests."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.cli.kv import _running_store
from headwater.cli.main import main
from headwater.deploy.clusters import ClusterRecord, cluster_folder
from headwater.errors import ConfigError
from headwater.kv.node.address import default_socket


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


@pytest.mark.parametrize("line", [b"not json", b"[1]", b"{}", b'{"prompt": "\xff"}', b"[" * 100_000])
def test_a_file_with_a_mistake_is_refused_before_anything_is_asked(
    server: HTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    assert warm(server, file) == 2
    said = capsys.readouterr().err
    assert f"--prompts {file}: " in said
    assert "line 2" in said or "not UTF-8" in said
    assert server.asked == []  # type: ignore[attr-defined]


def test_a_file_that_is_not_there_is_said_to_be_so_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        assert main(["kv", "warm", "--prompts", str(file), "--url", "http://127.0.0.1:1"]) == 2
        assert f"--prompts {file}: {why}" in capsys.readouterr().err


def test_a_prompt_that_the_server_refuses_is_named(
    server: HTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n{"prompt": "fails"}\n')
    assert warm(server, file) == 1
    assert "line 2: " in capsys.readouterr().err


def test_the_one_store_that_runs_here_is_meant(monkeypatch: pytest.MonkeyPatch, run_folder: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_folder))
    usual = default_socket()
    assert _running_store() == usual, "none that is known runs here"
    with cluster_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        record = ClusterRecord(os.getpid(), "http://127.0.0.1:1", "", 1.0, store="/elsewhere/kv.sock")
        folder.publish(record)
        assert _running_store() == Path("/elsewhere/kv.sock")
        listener.bind(str(usual))
        assert _running_store() == Path("/elsewhere/kv.sock"), "the other one was left behind by a store that died"
        listener.listen()
        with pytest.raises(ConfigError, match="2 KV stores run here"):
            _running_store()
        folder.publish(msgspec.structs.replace(record, store=str(usual)))
        assert _running_store() == usual, "one store, and two ways to find it"
