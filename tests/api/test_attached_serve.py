"""`headwater serve --attach URL` as a client sees it: real processes before our doubles of other servers."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served_demo import Reply, call, demo_cluster

from double_thread import DoubleThread
from headwater.config.schema import EngineConfig
from vllm_double import ADAPTER, MODEL, VllmDouble
from word_tokenizer import write_word_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_word_tokenizer(tmp_path)


@pytest.fixture
def server(tmp_path: Path, tokenizer: Path) -> Iterator[DoubleThread[VllmDouble]]:
    config = EngineConfig(tokenizer=str(tokenizer), mocker_decode_base_ms=2.0)
    made = DoubleThread(VllmDouble(config, tmp_path / "ev"))
    yield made
    made.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def up(url: str) -> float:
    lines = call(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("headwater_worker_up{")).split()[-1])


def ask(url: str, path: str = "/v1/completions", **fields: Any) -> Reply:
    return call(f"{url}{path}", {"model": MODEL, **fields})


def test_token_ids_events_and_a_restart(server: DoubleThread[VllmDouble], tokenizer: Path, run_folder: Path) -> None:
    prompt = list(range(20, 120))
    with demo_cluster(run_folder, "--attach", server.double.url, "--tokenizer", str(tokenizer)) as url:
        first = ask(url, prompt=prompt, max_tokens=5).json()
        assert first["usage"] == {**first["usage"], "prompt_tokens": 100, "completion_tokens": 5}
        streamed = ask(url, prompt=prompt, max_tokens=5, stream=True).text
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in streamed.splitlines() if line[:7] == "data: {"]
        assert "".join(texts) == first["choices"][0]["text"]
        again = ask(url, prompt=prompt, max_tokens=5).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        (worker,) = call(f"{url}/debug/cluster").json()["workers"]
        assert worker["kv_events"] is True
        tuned = call(f"{url}/v1/completions", {"model": ADAPTER, "prompt": prompt, "max_tokens": 5}).json()
        assert tuned["model"] == ADAPTER
        assert tuned["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "its blocks are its own"
        assert [body["model"] for body in server.double.bodies] == [MODEL] * 3 + [ADAPTER]
        models = call(f"{url}/v1/models").json()["data"]
        assert {entry["id"]: entry["parent"] for entry in models} == {MODEL: None, ADAPTER: MODEL}
        assert all(abs(time.time() - entry["created"]) < 120 for entry in models), "when it was first seen"

        server.call("stop")
        until(lambda: call(f"{url}/ready").status == 503)
        reason = f"model {MODEL}: the server at {server.double.url} does not answer"
        assert reason in call(f"{url}/ready").json()["missing"]
        assert up(url) == 0.0
        down = ask(url, prompt=prompt, max_tokens=5)
        assert (down.status, down.json()["error"]["code"]) == (503, "no_workers"), "no worker was asked"
        assert "does not answer" in down.json()["error"]["message"]
        server.call("start")
        until(lambda: call(f"{url}/ready").status == 200)
        assert up(url) == 1.0
        deadline = time.monotonic() + 20
        while (back := ask(url, prompt=prompt, max_tokens=5)).status != 200:
            assert time.monotonic() < deadline, back.text
            time.sleep(0.1)
        assert back.json()["choices"][0]["text"] == first["choices"][0]["text"]
        (same,) = call(f"{url}/debug/cluster").json()["workers"]
        assert same["worker_id"] == worker["worker_id"]


def test_a_worker_that_sleeps_gets_nothing_until_it_is_woken(
    server: DoubleThread[VllmDouble], tokenizer: Path, run_folder: Path
) -> None:
    with demo_cluster(run_folder, "--attach", server.double.url, "--tokenizer", str(tokenizer)) as url:
        (worker,) = call(f"{url}/debug/cluster").json()["workers"]
        name = worker["worker_id"]
        assert verb("sleep", name, url) == {"worker_id": name, "state": "asleep"}
        asked = len(server.double.bodies)
        assert ask(url, prompt=[20, 21, 22], max_tokens=5).status == 503
        assert len(server.double.bodies) == asked
        assert verb("wake", name, url) == {"worker_id": name, "state": "ready"}
        deadline = time.monotonic() + 10
        while (awake := ask(url, prompt=[20, 21, 22], max_tokens=5)).status != 200:
            assert time.monotonic() < deadline, awake.text
            time.sleep(0.05)
        assert call(f"{url}/admin/sleep/nobody", {}).status == 400
        server.double.sleep_mode = False
        failed = subprocess.run([sys.executable, "-m", "headwater", "sleep", name, "--url", url], capture_output=True)
        assert failed.returncode == 1, "it is told that the worker goes on, and does not wait until the timeout"
        assert b"is ready and not asleep" in failed.stderr


def verb(name: str, worker_id: str, url: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "headwater", name, worker_id, "--url", url, "--json"]
    document: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert document.pop("took_s") >= 0
    return document


def test_requests_and_answers_pass_as_they_are(server: DoubleThread[VllmDouble], run_folder: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]
    with demo_cluster(run_folder, "--attach", server.double.url, "--attach-as", "openai") as url:
        assert call(f"{url}/v1/models").json()["data"][0]["id"] == MODEL
        chat = "/v1/chat/completions"
        whole = ask(url, chat, messages=messages, some_field_of_theirs=[1])
        assert whole.json() == {"id": "c", "choices": [{"index": 0, "message": {"content": "Good day!"}}]}
        assert server.double.bodies[-1]["some_field_of_theirs"] == [1]
        assert server.double.bodies[-1]["messages"] == messages
        stream = ask(url, chat, messages=messages, stream=True)
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert [line for line in stream.text.splitlines() if line] == [
            'data: {"choices":[{"index":0,"delta":{"content":"Good"}}]}',
            'data: {"choices":[{"index":0,"delta":{"content":" day"}}]}',
            'data: {"choices":[{"index":0,"delta":{"content":"!"}}]}',
            "data: [DONE]",
        ]
        assert ask(url, chat, messages=[]).status == 200, "what is in a request is the server's to judge"
        assert ask(url, "/tokenize", prompt="x").json()["error"]["param"] == "model"
        assert call(f"{url}{chat}", {"model": "nope", "messages": messages}).status == 404
        server.double.status = 503
        full = ask(url, chat, messages=messages)
        assert (full.status, "retry-after" in full.headers) == (503, True)
