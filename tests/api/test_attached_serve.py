"""`headwater serve --attach URL` as a client sees it: real processes before our doubles of other servers."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_demo import Reply, call, demo_cluster

from headwater.config.schema import EngineConfig
from headwater.engines.conformance import VOCABULARY
from vllm_double import ADAPTER, MODEL, VllmDouble


class DoubleThread:
    """A double on a loop of its own, so that a test can wait for other processes."""

    def __init__(self, folder: Path) -> None:
        vocab = {f"Ġ{chr(97 + n // 26)}{chr(97 + n % 26)}": n for n in range(VOCABULARY + 20)}
        model = {"type": "WordLevel", "vocab": {**vocab, "[UNK]": len(vocab)}, "unk_token": "[UNK]"}
        self.tokenizer = folder / "tokenizer.json"
        self.tokenizer.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
        self.double = VllmDouble(EngineConfig(tokenizer=str(self.tokenizer), mocker_decode_base_ms=2.0), folder / "ev")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.call("start")

    def call(self, name: str) -> None:
        asyncio.run_coroutine_threadsafe(getattr(self.double, name)(), self._loop).result(10)

    def close(self) -> None:
        self.call("close")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DoubleThread]:
    made = DoubleThread(tmp_path)
    yield made
    made.close()


def ask(url: str, path: str = "/v1/completions", **fields: Any) -> Reply:
    return call(f"{url}{path}", {"model": MODEL, **fields})


def test_token_ids_events_and_a_restart(server: DoubleThread, run_folder: Path) -> None:
    prompt = list(range(20, 120))
    with demo_cluster(run_folder, "--attach", server.double.url, "--tokenizer", str(server.tokenizer)) as url:
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
        assert {entry["id"]: entry["parent"] for entry in call(f"{url}/v1/models").json()["data"]} == {
            MODEL: None,
            ADAPTER: MODEL,
        }

        server.call("stop")
        down = ask(url, prompt=prompt, max_tokens=5)
        assert down.status in (502, 503)
        server.call("start")
        deadline = time.monotonic() + 20
        while (back := ask(url, prompt=prompt, max_tokens=5)).status != 200:
            assert time.monotonic() < deadline, back.text
            time.sleep(0.1)
        assert back.json()["choices"][0]["text"] == first["choices"][0]["text"]
        (same,) = call(f"{url}/debug/cluster").json()["workers"]
        assert same["worker_id"] == worker["worker_id"]


def test_a_worker_that_sleeps_gets_nothing_until_it_is_woken(server: DoubleThread, run_folder: Path) -> None:
    with demo_cluster(run_folder, "--attach", server.double.url, "--tokenizer", str(server.tokenizer)) as url:
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


def test_requests_and_answers_pass_as_they_are(server: DoubleThread, run_folder: Path) -> None:
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
