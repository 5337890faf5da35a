"""Hand-offs between mockers: real scheduler, real planes, real transfer of the few bytes that stand for their KV."""

import asyncio
import json
from array import array
from pathlib import Path

import pytest
from handoff_bench import prompt_of, request, workers

from headwater.config.schema import EngineConfig
from headwater.engines.mocker.engine import MockerEngine
from headwater.runtime.conformance import eventually, run_leak_checked

BLOCKS = 400


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    vocab = {"<s>": 0, **{f"Ġ{'abcdefghij'[number % 10] * (2 + number // 10)}": number for number in range(1, 200)}}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    return path


def mocker(tokenizer: Path, **options: object) -> MockerEngine:
    settings = {"mocker_speedup": 0.0, "num_kv_blocks": BLOCKS, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return MockerEngine(EngineConfig(engine="mocker", tokenizer=str(tokenizer), **(settings | options)))  # type: ignore[arg-type]


def test_prompts_computed_elsewhere_give_the_same_tokens(tokenizer: Path) -> None:
    async def check() -> None:
        async with workers({"p": mocker(tokenizer), "d": mocker(tokenizer)}) as cluster:
            prefill, decode = cluster["p"], cluster["d"]
            where = cluster.prefill_at("p")
            prompts = [prompt_of(length, number) for number, length in enumerate((17, 40, 64, 150, 333))]
            alone = await prefill.run(*[request(number, prompt) for number, prompt in enumerate(prompts)])
            moved = await decode.run(*[request(n, prompt, prefill=where) for n, prompt in enumerate(prompts)])
            assert moved == alone
            await eventually(lambda: decode.counts.done == 5, "the hand-offs are reported")
            assert decode.counts.blocks_moved == sum(-(-len(prompt) // 16) for prompt in prompts)
            await decode.all_free()
            await prefill.all_free()

    run_leak_checked(check())


def test_siblings_wait_for_one_hand_off(tokenizer: Path) -> None:
    async def check() -> None:
        async with workers({"p": mocker(tokenizer), "d": mocker(tokenizer)}) as cluster:
            decode, where = cluster["d"], cluster.prefill_at("p")
            prompt = prompt_of(200)
            first, second = await decode.run(*[request(n, prompt, prefill=where) for n in (1, 2)])
            assert first == second == (await cluster["p"].run(request(1, prompt)))[0]
            await eventually(lambda: decode.counts.done == 1, "the hand-off is reported")
            assert decode.cached == {1: 0, 2: 192}
            assert decode.counts.blocks_moved == 13

    run_leak_checked(check())


def test_hand_offs_need_no_prefix_cache(tokenizer: Path) -> None:
    async def check() -> None:
        engines = {name: mocker(tokenizer, enable_prefix_caching=False) for name in ("p", "d")}
        async with workers(engines) as cluster:
            decode, where = cluster["d"], cluster.prefill_at("p")
            expected = await cluster["p"].run(request(1, prompt_of(200)))
            assert await decode.run(request(1, prompt_of(200), prefill=where)) == expected
            await eventually(lambda: decode.counts.done == 1, "the hand-off is reported")
            for member in cluster.members.values():
                await member.all_free()

    run_leak_checked(check())


def test_a_stop_token_or_the_limit_may_come_first(tokenizer: Path) -> None:
    async def check() -> None:
        async with workers({"p": mocker(tokenizer), "d": mocker(tokenizer)}) as cluster:
            decode, where = cluster["d"], cluster.prefill_at("p")
            (tokens,) = await cluster["p"].run(request(1, prompt_of(50)))
            await decode.run(request(1, prompt_of(50), 1, prefill=where))
            assert (decode.tokens[1], decode.reasons[1]) == (tokens[:1], "length")
            stopped = request(2, prompt_of(70, 2), prefill=where)
            (others,) = await cluster["p"].run(request(2, prompt_of(70, 2)))
            stopped.sampling.stop_token_ids.append(others[0])
            await decode.run(stopped)
            assert (decode.tokens[2], decode.reasons[2]) == ([], "stop")
            await eventually(lambda: decode.counts.done == 2, "the hand-offs are reported")
            resumed = request(3, prompt_of(90, 3), prefill=where)
            (whole,) = await cluster["p"].run(request(3, prompt_of(90, 3)))
            resumed.resumed_tokens = array("I", whole[:7]).tobytes()
            assert await decode.run(resumed) == [whole[7:]]
            for member in cluster.members.values():
                await member.all_free()

    run_leak_checked(check())


def test_modelled_blocks_take_the_time_that_real_ones_would(tokenizer: Path) -> None:
    """1 MB a block at 0.05 GB/s: 20 ms each, one after the other, in modelled time."""

    async def check() -> None:
        slow = mocker(tokenizer, mocker_speedup=10.0, mocker_transfer_gb_per_s=0.05)
        async with workers({"p": mocker(tokenizer), "d": slow}) as cluster:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            await cluster["d"].run(request(1, prompt_of(16 * 20), 1, prefill=cluster.prefill_at("p")))
            assert loop.time() - begun > 20 * 0.020 / 10

    run_leak_checked(check())
