"""The vLLM connector, called as vLLM's scheduler and workers call it, against a real store process."""

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_doubles import install
from headwater.errors import ConfigError
from headwater.kv.shards import part_ids
from kv_process import store_process, store_socket
from vllm_connector_double import INTERFACE, Blocks, KVConnectorRole, Request, VllmEngine, cache_config, config, names

Make = Callable[..., VllmEngine]


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with store_socket() as path:
        yield path


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    install(monkeypatch, INTERFACE, **names())
    yield importlib.import_module("headwater.kv.connectors.vllm")
    del sys.modules["headwater.kv.connectors.vllm"]


@pytest.fixture
def make(connector: Any, socket: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    """A fresh life of the engine: its own cache is empty."""
    made: list[VllmEngine] = []

    def engine(model: str = "", at: Path = socket, **sizes: int) -> VllmEngine:
        made.append(VllmEngine(connector, str(at), model or request.node.name, **sizes))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def prompt(count: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + number * 104729) % 50_000 for number in range(count)]


def eventually_stored(engine: VllmEngine, tokens: list[int], blocks: int, salt: str = "") -> None:
    half = engine.scheduler._of_scheduler()
    state = half._state(Request(f"look-{salt}", tokens, salt))
    ids = state.chain.upto(tokens, blocks).ids
    deadline = time.monotonic() + 10
    layout = half._parts.layout
    for part in {part for worker in engine.workers for part in worker._of_worker()._parts.held}:
        while half._agent.num_in_host(part_ids(ids, layout, part)) < blocks:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    half.forget(f"look-{salt}")


@pytest.mark.parametrize("chunk", [1 << 30, 5])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_restarted_engine_loads_and_gives_the_same(make: Make, chunk: int, tp: int) -> None:
    first = make(tp=tp)
    tokens = prompt(42)
    answer = first.run(Request("a", list(tokens)), 9, chunk)
    assert first.computed == 42 + 8
    eventually_stored(first, [*tokens, *answer], 12)
    again = make(tp=tp)
    assert again.run(Request("b", list(tokens)), 9, chunk) == answer
    assert again.computed == 2 + 8, "40 of 42 prompt tokens came from the store"
    longer = [*tokens, *answer, *prompt(6, seed=2)]
    followed = make(tp=tp)
    expected = make("cold", tp=tp).run(Request("c", list(longer)), 3)
    assert followed.run(Request("d", list(longer)), 3) == expected
    assert followed.computed == len(longer) - 48 + 2
    assert again.failed == followed.failed == 0


@pytest.mark.parametrize(("heads", "sizes"), [(2, (1, 2, 1)), (2, (2, 4, 1)), (6, (1, 2, 3)), (3, (3, 1, 6))], ids=str)
def test_what_one_size_stores_another_loads(make: Make, heads: int, sizes: tuple[int, ...]) -> None:
    """Each engine goes on from what all before it have stored, with what a cold one says."""
    tokens, stored = prompt(42), 0
    for size in sizes:
        expected = make(f"cold {size}", tp=size, heads=heads).run(Request("c", list(tokens)), 9)
        engine = make(tp=size, heads=heads)
        assert engine.run(Request("a", list(tokens)), 9) == expected
        assert (engine.failed, engine.computed) == (0, len(tokens) - stored + 8)
        tokens = [*tokens, *expected, *prompt(5, seed=size)]
        stored = (len(tokens) - 6) // 4 * 4
        eventually_stored(engine, tokens, stored // 4)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_part_that_is_missing_is_computed_and_stored_again(make: Make, missing: int) -> None:
    first, tokens = make(heads=2), prompt(42)
    answer = first.run(Request("a", list(tokens)), 4)
    eventually_stored(first, tokens, 10)
    half = first.scheduler._of_scheduler()
    ids = half._state(Request("look", tokens)).chain.upto(tokens, 10).ids
    gone = part_ids(ids, half._parts.layout, missing)[6 * 16 : 7 * 16]
    assert half._agent._call(half._agent.client.remove(gone)).result(5) == 1
    for size, computed in ((2, 42 - 6 * 4), (1, 2)):
        engine = make(heads=2, tp=size)
        assert engine.run(Request("b", list(tokens)), 4) == answer
        assert engine.computed == computed + 3
        eventually_stored(engine, tokens, 10)


def test_two_engines_share_while_both_run(make: Make) -> None:
    one, two = make(), make()
    tokens = prompt(30)
    answer = one.run(Request("a", list(tokens)), 4)
    eventually_stored(one, tokens, 7)
    assert two.run(Request("a", list(tokens)), 4) == answer
    assert two.computed == 2 + 3


def test_blocks_that_were_damaged_show(make: Make) -> None:
    """The control: the answer does depend on what was loaded."""
    first, tokens = make(), prompt(20)
    answer = first.run(Request("a", list(tokens)), 4)
    eventually_stored(first, tokens, 5)
    again = make()
    copier = again.workers[0]._of_worker()._blocks()
    scatter = copier.scatter
    copier.scatter = lambda source, places: scatter(source ^ 1, places)
    assert again.run(Request("b", list(tokens)), 4) != answer


def test_a_load_that_fails_is_computed_and_not_tried_again(make: Make) -> None:
    first, tokens = make(), prompt(40)
    answer = first.run(Request("a", list(tokens)), 4)
    eventually_stored(first, tokens, 9)
    again = make()
    agent = again.workers[0]._of_worker()._agent
    load = agent.load_parts
    agent.load_parts = lambda parts, **how: load([(chain.part(0, 3), into[:3]) for chain, into in parts], **how)
    assert again.run(Request("b", list(tokens)), 4) == answer
    assert (again.failed, again.computed) == (6, 40 - 12 + 3)
    agent.load_parts = lambda parts, **how: load([(chain.part(0, 0), []) for chain, _ in parts], **how)
    assert again.run(Request("c", list(tokens)), 4) == answer
    assert again.computed == 40 - 12 + 3 + 40 + 3


def test_loads_and_saves_in_pieces(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of which fails: what comes behind it is computed as well."""
    worker = importlib.import_module("headwater.kv.connectors.vllm_worker")
    block_bytes = cache_config(1).kv_cache_groups[0].kv_cache_spec.page_size_bytes * 3
    monkeypatch.setattr(worker, "_PIECE_BYTES", 2 * block_bytes)
    monkeypatch.setattr(worker, "_PIECES_AT_ONCE", 2)
    first, tokens = make(), prompt(90)
    answer = first.run(Request("a", list(tokens)), 4)
    eventually_stored(first, tokens, 22)
    again = make()
    assert again.run(Request("b", list(tokens)), 4) == answer
    assert (again.failed, again.computed) == (0, 2 + 3)
    agent = again.workers[0]._of_worker()._agent
    load = agent.client.load

    asked: list[int] = []

    async def load_but_the_fourth(chain: Any, into: Any, **how: Any) -> int:
        if chain.num_blocks:
            asked.append(chain.first)
        return 0 if chain.first == 6 else await load(chain, into, **how)

    agent.client.load = load_but_the_fourth
    assert again.run(Request("c", list(tokens)), 4) == answer
    assert again.failed == 22 - 6
    assert 20 not in asked, "what lies behind is not loaded in vain"


def test_salts_adapters_and_resets_keep_apart(make: Make) -> None:
    engine, tokens = make(), prompt(20)
    engine.run(Request("a", list(tokens), cache_salt="a"), 1)
    eventually_stored(engine, tokens, 5, "a")

    def matched(**changes: Any) -> int:
        request = Request(f"{changes}", list(tokens), **changes)
        while (found := engine.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            time.sleep(0.001)
        engine.scheduler.request_finished(request, [])
        return int(found[0])

    class Lora:
        lora_name, lora_path = "x", "/x"

    assert matched() == 0
    assert matched(cache_salt="b") == 0
    assert matched(cache_salt="a", lora_request=Lora()) == 0
    assert matched(cache_salt="a", mm_features=["image"]) == 0
    assert matched(cache_salt="a") == 16, "one token stays to be computed"
    assert engine.scheduler.reset_cache()
    assert matched(cache_salt="a") == 0


def test_what_the_engine_has_and_the_store_has_not_is_saved_as_well(make: Make) -> None:
    """Else nothing behind it would be found."""
    engine, tokens = make(), prompt(24)
    request = Request("a", list(tokens))
    assert engine.scheduler.get_num_new_matched_tokens(request, 16) in ((0, False), (None, False))
    blocks = list(range(6))
    for at, token in enumerate(tokens):
        engine._compute(engine.kv[0], engine.heads[0], blocks, at, token)
    engine._step(request, blocks, 16, 8, [request])
    eventually_stored(engine, tokens, 6)


def test_a_preempted_request_may_load_once_more(make: Make) -> None:
    engine, tokens = make(), prompt(20)
    engine.run(Request("a", list(tokens)), 1)
    eventually_stored(engine, tokens, 5)
    request = Request("b", list(tokens))

    def matched() -> Any:
        while (found := engine.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            time.sleep(0.001)
        return found

    assert matched() == (16, True)
    engine.scheduler.update_state_after_alloc(request, Blocks([1, 2, 3, 4]), 16)
    assert matched() == (0, False)
    request.num_preemptions = 1
    assert matched() == (16, True)


def test_what_is_loaded_at_once_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = make(), prompt(20)
    half = engine.scheduler._of_scheduler()
    engine.run(Request("a", list(tokens)), 1)
    eventually_stored(engine, tokens, 5)
    scheduler = importlib.import_module("headwater.kv.connectors.vllm_scheduler")
    monkeypatch.setattr(scheduler, "_MAX_LOADING_BYTES", 3 * half._layout.block_bytes)

    def matched(name: str) -> Any:
        request = Request(name, list(tokens))
        while (found := engine.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            time.sleep(0.001)
        if found[0]:
            engine.scheduler.update_state_after_alloc(request, Blocks([1, 2, 3, 4]), found[0])
        return found

    assert matched("b") == (12, True)
    assert matched("c") == (0, False), "no room"
    half.step_ended(0, ["b"])
    assert matched("d") == (12, True)


def test_an_answer_of_the_store_is_kept_for_a_while_and_no_longer(make: Make) -> None:
    engine, tokens, now = make(), prompt(20), time.monotonic()
    half = engine.scheduler._of_scheduler()
    request = Request("b", list(tokens))

    def matched(at: float) -> Any:
        half._clock = lambda: at
        while (found := engine.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            time.sleep(0.001)
        return found

    assert matched(now) == (0, False)
    make().run(Request("a", list(tokens)), 1)
    eventually_stored(engine, tokens, 5)
    assert matched(now + 0.4) == (0, False)
    assert matched(now + 0.6) == (16, True)


def test_a_store_that_is_behind_costs_saves_and_no_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens, gate = make(), prompt(12), threading.Event()
    half = engine.workers[0]._of_worker()
    chain = engine.scheduler._of_scheduler()._state(Request("a", tokens)).chain.upto(tokens, 3)
    worker = importlib.import_module("headwater.kv.connectors.vllm_worker")
    monkeypatch.setattr(worker, "_MAX_SAVING_BYTES", 5 * half._layout.block_bytes)
    half._saver.submit(gate.wait)
    try:
        half.save([worker.Save(chain, [1, 2, 3])])
        half.save([worker.Save(chain, [1, 2, 3])])
        assert half.num_saves_dropped == 3
    finally:
        gate.set()


def test_no_store_and_a_store_that_dies_are_misses(make: Make, run_folder: Path) -> None:
    path, tokens = run_folder / "kv.sock", prompt(20)
    with store_process(path) as process:
        first = make(at=path)
        answer = first.run(Request("a", list(tokens)), 4)
        eventually_stored(first, tokens, 5)
        process.kill()
        process.wait()
        assert first.run(Request("b", list(tokens)), 4) == answer
    assert first.computed == 2 * (20 + 3)


def test_what_it_does_not_serve_is_refused(connector: Any, socket: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        connector.HeadwaterConnector(
            config(str(socket), "m", pipeline_parallel_size=2), KVConnectorRole.SCHEDULER, cache_config(8)
        )
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        connector.HeadwaterConnector(config(str(socket), "m"), KVConnectorRole.SCHEDULER, cache_config(8, groups=2))


def test_blocks_of_any_layout_come_back_as_they_were(connector: Any) -> None:
    """Layers between the blocks, heads behind the tokens, and kernels that take blocks in halves."""
    worker = importlib.import_module("headwater.kv.connectors.vllm_worker")
    backing = torch.randn(10, 4, 2 * 3, 8).to(torch.bfloat16)
    between = {f"l{number}": backing.view(10, 4, 2, 3, 8).permute(0, 1, 3, 2, 4)[:, number] for number in range(4)}
    halves = {"a": torch.randn(20, 2, 2, 6), "shared": torch.empty(0)}
    halves["shared"] = halves["a"]
    for caches in (between, halves):
        copier = worker.BlockCopier(caches, 10)
        before = {name: cache.clone() for name, cache in caches.items()}
        copies, wait = copier.gather([7, 2])
        wait()
        for cache in caches.values():
            cache.zero_()
        copier.scatter(copies, [7, 2])
        for name, cache in caches.items():
            by_block, old = cache.unflatten(0, (10, -1)), before[name].unflatten(0, (10, -1))
            assert torch.equal(by_block[[7, 2]], old[[7, 2]])
            assert not by_block[[0, 1, 3, 4, 5, 6, 8, 9]].any()
