"""Hand-offs between mockers: real scheduler, real planes, real transfer of the few bytes that stand for their KV."""

import json
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
