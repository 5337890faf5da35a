"""The TensorRT-LLM connector, called as its executor calls it, against a real store process."""

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

from engine_doubles import (
    Executor,
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    LlmArgs,
    LlmRequest,
    RequestData,
    SchedulerOutput,
    install,
)
from headwater.errors import ConfigError
from kv_process import store_process, store_socket

INTERFACE = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with store_socket() as path:
        yield path


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch, socket: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    install(
        monkeypatch,
        INTERFACE,
        KvCacheConnectorScheduler=KvCacheConnectorScheduler,
        KvCacheConnectorWorker=KvCacheConnectorWorker,
        RequestData=RequestData,
    )
    monkeypatch.setenv("HEADWATER_KV_SOCKET", str(socket))
    module = importlib.import_module("headwater.kv.connectors.trtllm")
    module.model_of_test = request.node.name  # type: ignore[attr-defined]
    yield module
    module.detach_all()
    del sys.modules["headwater.kv.connectors.trtllm"]


def executor(connector: Any, model: str = "") -> Executor:
    """A fresh life of the engine: its own cache is empty."""
    args = LlmArgs(model or connector.model_of_test)
    return Executor(connector.HeadwaterScheduler(args), connector.HeadwaterWorker(args), args)


def prompt(count: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + number * 104729) % 50_000 for number in range(count)]


def eventually_stored(connector: Any, tokens: list[int], blocks: int, salt: str = "") -> None:
    attachment = connector._attachments[connector.model_of_test]
    chain = attachment.new_chain(salt).upto(tokens, blocks)
    deadline = time.monotonic() + 10
    while attachment.store.num_in_host(chain.ids) < blocks:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("chunk", [1 << 30, 5])
def test_a_restarted_engine_loads_and_gives_the_same(connector: Any, chunk: int) -> None:
    first = executor(connector)
    tokens = prompt(42)
    answer = first.run(LlmRequest(1, list(tokens)), 9, chunk)
    assert first.computed == 42 + 8
    eventually_stored(connector, [*tokens, *answer], 12)
    again = executor(connector)
    assert again.run(LlmRequest(2, list(tokens)), 9, chunk) == answer
    assert again.computed == 2 + 8, "40 of 42 prompt tokens came from the store"
    followed = executor(connector)
    longer = [*tokens, *answer, *prompt(6, seed=2)]
    expected = executor(connector, "cold").run(LlmRequest(3, list(longer)), 3)
    assert followed.run(LlmRequest(3, list(longer)), 3) == expected
    assert followed.computed == len(longer) - 48 + 2


def test_blocks_that_were_damaged_show(connector: Any) -> None:
    """The control: the answer does depend on what was loaded."""
    first = executor(connector)
    tokens = prompt(20)
    answer = first.run(LlmRequest(1, list(tokens)), 4)
    eventually_stored(connector, tokens, 4)
    again = executor(connector)
    load = again.worker.start_load_kv

    def damaged(stream: Any) -> None:
        load(stream)
        for block_id, _ in again.worker.get_connector_meta().loads:
            again.kv[block_id] ^= 1

    again.worker.start_load_kv = damaged
    assert again.run(LlmRequest(2, list(tokens)), 4) != answer


def test_salts_and_adapters_keep_apart(connector: Any) -> None:
    first = executor(connector)
    tokens = prompt(20)
    first.run(LlmRequest(1, list(tokens), cache_salt="a"), 1)
    eventually_stored(connector, tokens, 5, "a")
    for other, matched in ((None, 0), ("b", 0), ("a", 16)):
        request = LlmRequest(2, list(tokens), cache_salt=other)
        assert first.scheduler.get_num_new_matched_tokens(request, 0) == (matched, False)
    request = LlmRequest(3, list(tokens), cache_salt="a", lora_task_id=5)
    assert first.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_promises_are_trimmed_and_forgotten(connector: Any) -> None:
    engine = executor(connector)
    tokens = prompt(21)
    engine.run(LlmRequest(1, list(tokens)), 1)
    eventually_stored(connector, tokens, 5)
    scheduler = engine.scheduler
    held: Callable[[], int] = lambda: scheduler._held_bytes // engine.kv[0].nbytes  # noqa: E731
    request = LlmRequest(2, list(tokens))
    assert scheduler.get_num_new_matched_tokens(request, 4) == (16, False)
    assert held() == 4
    scheduler.cancel_load(request, 4, 8)
    assert held() == 3
    scheduler.cancel_load(request, 16, 20)
    assert held() == 2
    scheduler.cancel_load(request, 12, 15)
    assert held() == 1, "part of a block is of no use"
    scheduler.request_reset(request)
    assert held() == 0
    assert scheduler.get_num_new_matched_tokens(request, 3) == (0, False), "half a block is the engine's own"


def test_blocks_that_have_no_page_are_not_saved(connector: Any) -> None:
    scheduler, tokens = executor(connector).scheduler, prompt(8)
    for places, saved in (([3, 4], 2), ([-1, 4], 0)):
        request = LlmRequest(1, list(tokens), cache_salt=f"{places}")
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        step = scheduler.build_connector_meta(SchedulerOutput([RequestData(1, tokens, places, 0, 8)]))
        assert sum(len(save.block_ids) for save in step.saves) == saved


def test_a_store_that_dies_is_a_miss(connector: Any, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_KV_SOCKET", str(run_folder / "kv.sock"))
    tokens = prompt(20)
    with store_process(run_folder / "kv.sock") as process:
        answer = executor(connector).run(LlmRequest(1, list(tokens)), 4)
        eventually_stored(connector, tokens, 5)
        process.kill()
        process.wait()
        again = executor(connector)
        assert again.run(LlmRequest(2, list(tokens)), 4) == answer
        assert again.computed == 20 + 3


def test_what_it_does_not_serve_is_refused(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="one rank"):
        connector.HeadwaterScheduler(LlmArgs("other", tensor_parallel_size=2))
    older = make_dataclass("RequestData", ["request_id", "cache_salt_id"])
    monkeypatch.setattr(connector, "RequestData", older)
    with pytest.raises(ConfigError, match="no cache salts"):
        connector.HeadwaterScheduler(LlmArgs("another"))


def test_both_halves_of_an_executor_are_made_at_once_and_share(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TensorRT-LLM makes them: one store for both, however long it takes to find."""
    agent = connector.StoreAgent
    monkeypatch.setattr(connector, "StoreAgent", lambda *args: (time.sleep(0.2), agent(*args))[1])
    with ThreadPoolExecutor(2) as threads:
        args = LlmArgs(connector.model_of_test)
        halves = [threads.submit(made, args) for made in (connector.HeadwaterWorker, connector.HeadwaterScheduler)]
    assert halves[0].result()._shared is halves[1].result()._shared
