"""Live mockers against simulated pools: the same prompts at the same workers move and find the same blocks."""

import json
from array import array
from pathlib import Path
from random import Random

from handoff_bench import prompt_of, request, workers

from headwater.config.schema import EngineConfig
from headwater.engines.mocker.engine import MockerEngine
from headwater.kv.identity import chain_block_ids
from headwater.router.disagg import DisaggSettings
from headwater.router.policies import RoundRobin
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.sim.cluster import SimConfig
from headwater.sim.handoffs import PoolConfig
from headwater.sim.pools import PooledCluster
from headwater.sim.records import SimResult
from headwater.sim.timing import DynamoPolynomial
from headwater.sim.workload import SimRequest

BLOCK = 16
NUM_BLOCKS = 40
"""So few that prefixes are evicted, here and there."""


def prompts() -> list[list[int]]:
    random = Random(11)
    heads = [prompt_of(length, letter) for letter, length in enumerate((64, 150, 200, 33))]
    return [[*random.choice(heads), *prompt_of(random.randint(1, 150), 10 + number)] for number in range(30)]


def simulated(asked: list[list[int]]) -> SimResult:
    """One at a time, one worker to prefill and one to decode."""
    coming = [
        SimRequest(10.0 * number, len(prompt), 1, chain_block_ids(b"", array("I", prompt).tobytes(), BLOCK))
        for number, prompt in enumerate(asked)
    ]
    pools = PoolConfig(1, 1, 1000, DisaggSettings("always"))
    config = SimConfig(2, BLOCK, NUM_BLOCKS, max_num_seqs=16, max_num_batched_tokens=64, pools=pools)
    return PooledCluster(config, [DynamoPolynomial()] * 2, RoundRobin()).run(coming)


def test_mockers_move_and_find_what_simulated_workers_do(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    vocab = {"<s>": 0, **{f"Ġ{'abcdefghij'[number % 10] * (2 + number // 10)}": number for number in range(1, 200)}}
    tokenizer.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    asked = prompts()
    expected = simulated(asked)
    moved = expected.handoffs.moved_bytes // (1000 * BLOCK)
    assert moved < 0.8 * sum(-(-len(prompt) // BLOCK) for prompt in asked), "some were there"

    async def check() -> None:
        sizes = {"mocker_speedup": 0.0, "num_kv_blocks": NUM_BLOCKS, "max_num_seqs": 16, "max_num_batched_tokens": 64}
        engines = {
            name: MockerEngine(EngineConfig(engine="mocker", tokenizer=str(tokenizer), **sizes))  # type: ignore[arg-type]
            for name in ("p", "d")
        }
        async with workers(engines) as cluster:
            decode = cluster["d"]
            for number, prompt in enumerate(asked):
                await decode.run(request(number, prompt, 1, prefill=cluster.prefill_at("p")))
            done = expected.handoffs.done
            await eventually(lambda: decode.counts.done == done, f"{done} hand-offs are reported")
            assert [decode.cached[n] for n in range(len(asked))] == [
                record.cached_tokens for record in expected.records
            ]
            assert decode.counts.blocks_moved == moved
            assert decode.counts.fell_back == expected.handoffs.fell_back == 0

    run_leak_checked(check())
