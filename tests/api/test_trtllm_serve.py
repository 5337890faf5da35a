"""TensorRT-LLM as a client sees it: real processes, before a double of its server and around one of its package."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_demo import Reply, call, demo_cluster

from double_thread import DoubleThread
from headwater.config.schema import EngineConfig
from trtllm_double import MODEL, TrtllmDouble
from word_tokenizer import write_word_tokenizer

PROMPT = list(range(20, 120))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DoubleThread[TrtllmDouble]]:
    tokenizer = write_word_tokenizer(tmp_path)
    made = DoubleThread(TrtllmDouble(EngineConfig(tokenizer=str(tokenizer), mocker_decode_base_ms=2.0)))
    yield made
    made.close()


def ask(url: str, model: str = MODEL, **fields: Any) -> Reply:
    return call(f"{url}/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 5, **fields})


def answered(url: str) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while (back := ask(url)).status != 200:
        assert time.monotonic() < deadline, back.text
        time.sleep(0.1)
    return dict(back.json())


def telling_worker(url: str) -> dict[str, Any]:
    """The only one, once events of it have come: a moment after the answers."""
    deadline = time.monotonic() + 10
    while True:
        (worker,) = call(f"{url}/debug/cluster").json()["workers"]
        if worker["kv_events"] is True:
            return dict(worker)
        assert time.monotonic() < deadline, worker
        time.sleep(0.05)


def test_attached(server: DoubleThread[TrtllmDouble], tmp_path: Path, run_folder: Path) -> None:
    flags = ("--attach", server.double.url, "--tokenizer", str(tmp_path / "tokenizer.json"))
    with demo_cluster(run_folder, *flags, "--attach-adapters", "tuned=/adapters/tuned") as url:
        first = ask(url, logprobs=2).json()
        assert first["usage"] == {**first["usage"], "prompt_tokens": 100, "completion_tokens": 5}
        assert len(first["choices"][0]["logprobs"]["token_logprobs"]) == 5
        assert ask(url).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        worker = telling_worker(url)
        assert ask(url, "tuned").json()["model"] == "tuned"
        assert server.double.bodies[-1]["lora_request"]["lora_path"] == "/adapters/tuned"
        refused = ask(url, cache_salt="theirs")
        assert (refused.status, refused.json()["error"]["param"]) == (400, "cache_salt")
        server.call("close")
        assert ask(url).status in (502, 503)
        server.call("start")
        assert answered(url)["choices"][0]["text"] == first["choices"][0]["text"]
        (same,) = call(f"{url}/debug/cluster").json()["workers"]
        assert same["worker_id"] == worker["worker_id"]
    assert not server.double.metrics_read


PACKAGE = """
import sys
sys.path.insert(0, {tests!r})
import trtllm_llm
sys.modules.update({{name: module for name, module in trtllm_llm.package().items() if name != "tensorrt_llm"}})
from trtllm_llm import LLM
__version__ = "1.4.0"
trtllm_llm.LLM.mocker = trtllm_llm.EngineConfig(tokenizer={tokenizer!r}, mocker_decode_base_ms=2.0)
"""


def test_in_the_worker(tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = write_word_tokenizer(tmp_path)
    package = tmp_path / "site" / "tensorrt_llm"
    package.mkdir(parents=True)
    tests = str(Path(__file__).parents[1])
    (package / "__init__.py").write_text(PACKAGE.format(tests=tests, tokenizer=str(tokenizer)))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    flags = ("double", "--engine", "trtllm", "--tokenizer", str(tokenizer), "--served-model-name", MODEL)
    own = ("--kv-cache-config.tokens-per-block", "16", "--max-batch-size", "4", "--kv-cache-config.max_tokens", "4096")
    with demo_cluster(run_folder, *flags, *own) as url:
        first = answered(url)
        again = ask(url).json()
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        telling_worker(url)
        salted = [ask(url, cache_salt="theirs").json()["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert [details["cached_tokens"] for details in salted] == [0, 96]
