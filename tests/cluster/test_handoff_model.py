"""Hand-offs of the real model: what a decode worker generates is token for token what one worker alone generates."""

import asyncio
import ctypes
import json
from typing import Any

import msgspec
import pytest
from handoff_bench import Workers, prompt_of, request, workers

from headwater.config.schema import EngineConfig
from headwater.engines.base import Engine
from headwater.engines.native.engine import NativeEngine
from headwater.protocol.request import EngineRequest, RemotePrefill, StructuredSpec
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.transfer.backends.shm import SharedLink
from headwater.transfer.outcome import Stop

pytestmark = pytest.mark.model

SIZES = EngineConfig(
    device="cpu", threads=1, num_kv_blocks=96, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=72
)
MOVE = SharedLink.move
SCHEMA = json.dumps({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}})


def native(**changes: object) -> Engine:
    return NativeEngine(msgspec.structs.replace(SIZES, **changes))


def asked(prefill: RemotePrefill | None) -> list[EngineRequest]:
    """Short, at a block border, in many chunks, sharing a prefix, sampled, penalised, structured, with logprobs."""
    long = prompt_of(300, 9)
    return [
        request(1, prompt_of(5, 1), 12, prefill=prefill),
        request(2, prompt_of(48, 2), 12, prefill=prefill),
        request(3, long, 12, prefill=prefill),
        request(4, [*long[:200], 7, 8, 9], 12, prefill=prefill),
        request(5, prompt_of(70, 5), 20, prefill=prefill, temperature=0.9, seed=11, top_p=0.95),
        request(6, prompt_of(33, 6), 20, prefill=prefill, frequency_penalty=0.5, repetition_penalty=1.2),
        request(7, prompt_of(40, 7), 24, prefill=prefill, structured=StructuredSpec("json_schema", SCHEMA)),
        request(8, prompt_of(65, 8), 6, prefill=prefill, logprobs=2),
    ]


def test_one_prefill_and_one_decode_worker_equal_one_worker() -> None:
    async def check() -> None:
        async with workers({"alone": native()}) as cluster:
            expected = await cluster["alone"].run(*asked(None))
        async with workers({"p": native(), "d": native()}) as cluster:
            decode, where = cluster["d"], cluster.prefill_at("p")
            assert await decode.run(*asked(where)) == expected
            # Not the shortest, and not the one whose prefix came with another.
            await eventually(lambda: decode.counts.done == 6, "the hand-offs are reported")
            assert decode.counts.fell_back == 0
            moved = decode.counts.blocks_moved
            # All of it is here now: only what is new is asked for.
            again = request(20, [*prompt_of(300, 9), *range(60, 100)], 8, prefill=where)
            fresh = await decode.run(again)
            await eventually(lambda: decode.counts.done == 7, "the next one is reported")
            assert decode.counts.blocks_moved - moved == -(-340 // 16) - 300 // 16
            assert fresh == await cluster["p"].run(request(20, [*prompt_of(300, 9), *range(60, 100)], 8))
            await decode.all_free()
            await cluster["p"].all_free()

    run_leak_checked(check())


async def decode_with(cluster: Workers, decoders: str, prefillers: str, letter: int) -> None:
    """Each decode worker generates from the same prompts, next to hand-offs that are called off."""
    prompts = [prompt_of(60 + 37 * number, letter + number) for number in range(4)]
    given: list[list[list[int]]] = []
    for decoder in decoders:
        member = cluster[decoder]
        where = [cluster.prefill_at(prefillers[number % len(prefillers)]) for number in range(4)]
        first = 100 * letter
        neighbours = [request(first + 50 + n, prompt_of(280, letter + 10 + n), prefill=where[0]) for n in range(2)]
        member.send(*neighbours)
        jobs = [request(first + n, prompt, 10, prefill=where[n]) for n, prompt in enumerate(prompts)]
        running = asyncio.ensure_future(member.run(*jobs))
        await asyncio.sleep(0.05)
        member.abort(*[one.stream for one in neighbours])
        given.append(await running)
        await eventually(lambda m=member: m.counts.done >= 4, "hand-offs are reported")  # type: ignore[misc]
    reference = [request(1000 * letter + n, prompt, 10) for n, prompt in enumerate(prompts)]
    expected = await cluster[prefillers[0]].run(*reference)
    assert given == [expected] * len(decoders)


def test_two_of_one_role_and_cancelled_neighbours() -> None:
    async def check() -> None:
        async with workers({"a": native(), "b": native(), "c": native()}) as cluster:
            await decode_with(cluster, "b", "ac", letter=1)
            await decode_with(cluster, "bc", "a", letter=5)
            for member in cluster.members.values():
                await member.all_free()

    run_leak_checked(check())


def damaging(self: SharedLink, step: Any, stop: Stop) -> None:
    """Move, and lose half of every large piece on the way."""
    MOVE(self, step, stop)
    for target, _, num_bytes in step.large:
        ctypes.memset(target, 0, num_bytes // 2)


def test_a_damaged_block_changes_the_output_or_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control that shows that what is generated hangs on the blocks that were moved."""
    monkeypatch.setattr(SharedLink, "move", damaging)

    async def check() -> None:
        expected: list[list[int]] = []
        for checksums in (False, True):
            async with workers({"p": native(), "d": native()}, checksums=checksums) as cluster:
                decode, prefill = cluster["d"], cluster["p"]
                got = await decode.run(request(1, prompt_of(90), 16, prefill=cluster.prefill_at("p")))
                expected = expected or await prefill.run(request(1, prompt_of(90), 16))
                await eventually(lambda d=decode: d.counts.done + d.counts.fell_back == 1, "it is reported")  # type: ignore[misc]
                assert (got == expected, decode.counts.fell_back) == ((True, 1) if checksums else (False, 0))
                await decode.all_free()
                await prefill.all_free()

    run_leak_checked(check())
