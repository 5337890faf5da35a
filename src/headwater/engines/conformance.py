"""What every engine must do: a suite to inherit from.

    class TestMyEngine(EngineConformance):
        def create(self, sizes: EngineConfig) -> Engine:
            return MyEngine(msgspec.structs.replace(sizes, model="tiny"))

`create` keeps the sizes it is given. The model may be anything with at least `VOCABULARY` token ids and any end tokens.
Checks that need to see or break single steps run on engines made of an `EngineCore`. What an engine cannot be asked it
skips, and `remarks` says so.
"""

import asyncio
import hashlib
from array import array
from functools import partial
from pathlib import Path
from unittest import SkipTest

from headwater.engines.ending_conformance import EndingConformance
from headwater.engines.suite import VARIANT, VOCABULARY, prompt_of
from headwater.engines.watched import END_S
from headwater.kv.identity import chain_block_ids, namespace, split_block_ids
from headwater.protocol.events import BlocksStored
from headwater.runtime.conformance import eventually, on_loop


class EngineConformance(EndingConformance):
    """Inherit, and say how to make an engine."""

    # ---- life

    @on_loop
    async def test_start_says_what_it_is(self) -> None:
        async with self.bench() as bench:
            info, card = bench.info, bench.info.card
            assert info.batch_invariant == self.batch_invariant
            assert (info.kv_blocks, info.max_num_seqs, info.max_num_batched_tokens) == (48, 4, 64)
            assert (card.block_size, card.max_model_len) == (self.block_size, 512)
            assert card.vocab_size >= VOCABULARY
            assert card.name == card.served_names[0]
            assert card.fingerprint
            assert card.kv_layout
            for artifact in card.artifacts:
                content = info.artifacts[artifact.digest]
                content = content.read_bytes() if isinstance(content, Path) else content
                assert (hashlib.sha256(content).hexdigest(), len(content)) == (artifact.digest, artifact.size)
            await eventually(lambda: any(step.phase == "ready" for step in bench.progress), "ready is reported")

    @on_loop
    async def test_two_of_a_kind_are_exchangeable(self) -> None:
        async with self.bench() as first, self.bench() as second:
            assert first.info.card.fingerprint == second.info.card.fingerprint
            assert first.info.card.kv_layout == second.info.card.kv_layout
            here = await first.run(first.request(prompt_of(30)))
            assert await second.run(second.request(prompt_of(30))) == here

    @on_loop
    async def test_close_can_be_called_again_and_at_once(self) -> None:
        async with self.bench() as bench:
            await asyncio.gather(bench.engine.close(), bench.engine.close())
            await bench.engine.close()
            assert bench.executor is None or bench.executor.closed == 1

    @on_loop
    async def test_close_ends_what_is_open_and_then_is_silent(self) -> None:
        async with self.bench() as bench:
            bench.slow_down(0.002)
            bench.engine.submit([bench.request(prompt_of(20, letter), 400) for letter in range(6)])
            await eventually(lambda: bool(bench.recorder.outputs), "something runs")
            await bench.engine.close()
            streams = range(1, 7)
            assert bench.recorder.ended(*streams)
            assert all(bench.recorder.error(stream).retryable for stream in streams)
            said = len(bench.recorder.events)
            bench.engine.submit([bench.request(prompt_of(5))])
            bench.engine.abort([1, 2])
            await asyncio.sleep(0.02)
            assert bench.recorder.error(7).code == "draining"
            assert len(bench.recorder.events) == said

    @on_loop
    async def test_drain_waits_and_refuses(self) -> None:
        async with self.bench() as bench:
            bench.engine.submit([bench.request(prompt_of(20), 60)])
            draining = asyncio.create_task(bench.engine.drain(END_S))
            await asyncio.sleep(0)
            bench.engine.submit([bench.request(prompt_of(20))])
            assert await draining
            assert len(bench.recorder.tokens(1)) == 60
            refusal = bench.recorder.error(2)
            assert (refusal.code, refusal.retryable) == ("draining", True)
            assert await bench.engine.drain(0.0)

    @on_loop
    async def test_drain_gives_up_in_time(self) -> None:
        async with self.bench() as bench:
            await bench.all_free()
            bench.slow_down(0.002)
            bench.engine.submit([bench.request(prompt_of(20), 480) for _ in range(8)])
            assert not await bench.engine.drain(0.0)
            bench.engine.abort(range(1, 9))
            assert await bench.engine.drain(END_S)

    @on_loop
    async def test_roles_can_be_changed_while_running(self) -> None:
        async with self.bench() as bench:
            bench.engine.submit([bench.request(prompt_of(20), 30)])
            for role in ("prefill", "decode", "both"):
                await bench.engine.set_role(role)
            await eventually(lambda: bench.recorder.ended(1), "it ends", END_S)
            assert len(bench.recorder.tokens(1)) == 30

    # ---- serving

    @on_loop
    async def test_a_sequence_streams_and_ends_once(self) -> None:
        async with self.bench() as bench:
            (tokens,) = await bench.run(bench.request(prompt_of(100), 40))
            assert len(tokens) == 40
            assert all(0 <= token < bench.info.card.vocab_size for token in tokens)
            outputs = bench.recorder.outputs[1]
            assert outputs[0].num_cached_tokens == 0
            assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
            assert outputs[-1].finish_reason == "length"
            await asyncio.sleep(0.02)
            assert len(bench.recorder.tokens(1)) == 40
            await bench.all_free()

    @on_loop
    async def test_neighbours_chunks_and_cache_do_not_change_the_output(self) -> None:
        if not self.batch_invariant:
            raise SkipTest(VARIANT)
        async with self.bench() as bench:
            prompts = [prompt_of(length, letter) for letter, length in enumerate((3, 16, 33, 70, 90, 150))]
            alone = [(await bench.run(bench.request(prompt, 20)))[0] for prompt in prompts]
            assert await bench.run(*[bench.request(prompt, 20) for prompt in prompts]) == alone

    @on_loop
    async def test_preemption_does_not_show(self) -> None:
        async with self.bench() as roomy:
            prompts = [prompt_of(40, letter) for letter in range(4)]
            expected = await roomy.run(*[roomy.request(prompt, 100) for prompt in prompts])
        async with self.bench(num_kv_blocks=16) as tight:
            got = await tight.run(*[tight.request(prompt, 100) for prompt in prompts])
            await tight.all_free()
            if self.counts_preemptions:
                await eventually(lambda: tight.recorder.loads[-1].preemptions > 0, "preemptions are told of")
            if self.batch_invariant:
                assert got == expected

    @on_loop
    async def test_a_moved_sequence_goes_on_where_it_was(self) -> None:
        async with self.bench() as first, self.bench() as second:
            whole = (await first.run(first.request(prompt_of(50), 30)))[0]
            resumed = array("I", whole[:11]).tobytes()
            rest = (await second.run(second.request(prompt_of(50), 30, resumed_tokens=resumed)))[0]
            assert len(rest) == 19
            if self.batch_invariant:
                assert rest == whole[11:]

    @on_loop
    async def test_a_seed_draws_the_same_again(self) -> None:
        async with self.bench() as bench:
            same = [bench.request(prompt_of(20), 20, temperature=1.0, seed=7) for _ in range(2)]
            other = bench.request(prompt_of(20), 20, temperature=1.0, seed=8)
            first, second, third = await bench.run(*same, other)
            if self.batch_invariant:
                assert first == second
            assert first != third

    @on_loop
    async def test_a_stop_token_ends_the_output_before_it(self) -> None:
        async with self.bench() as bench:
            (tokens,) = await bench.run(bench.request(prompt_of(20), 20))
            stop = tokens[-1]
            (shorter,) = await bench.run(bench.request(prompt_of(20), 20, stop_token_ids=[stop]))
            assert shorter == tokens[: tokens.index(stop)]
            last = bench.recorder.last(2)
            assert last is not None
            assert (last.finish_reason, last.stop_token_id) == ("stop", stop)

    @on_loop
    async def test_logprobs_come_with_every_token(self) -> None:
        async with self.bench() as bench:
            await bench.run(bench.request(prompt_of(20), 5, logprobs=3), bench.request(prompt_of(20), 5))
            for output in bench.recorder.outputs[1]:
                assert len(output.logprobs or []) == len(output.token_ids)
                for token, found in zip(output.token_ids, output.logprobs or [], strict=True):
                    assert found.logprob <= 0
                    assert found.rank >= 1
                    assert len(found.top_ids) == len(found.top_logprobs) == 3
                    assert sorted(found.top_logprobs, reverse=True) == found.top_logprobs
                    assert token == found.top_ids[0]
            assert all(output.logprobs is None for output in bench.recorder.outputs[2])

    @on_loop
    async def test_a_prefix_is_found_again_and_told(self) -> None:
        async with self.bench() as bench:
            await bench.run(bench.request(prompt_of(100)), bench.request(prompt_of(100)))
            await self.settle()
            await bench.run(bench.request([*prompt_of(70), 5]))
            first, twin, later = (bench.recorder.outputs[stream][0].num_cached_tokens for stream in (1, 2, 3))
            assert (first, later) == (0, 64)
            assert twin == 96 or (self.plans_itself and twin == 0)
        async with self.bench(enable_prefix_caching=False) as bench:
            for stream in (1, 2):
                await bench.run(bench.request(prompt_of(100)))
                assert bench.recorder.outputs[stream][0].num_cached_tokens == 0
            assert bench.engine.resident_blocks() == []

    # ---- what it tells

    @on_loop
    async def test_events_add_up_to_the_snapshot_and_to_the_pool(self) -> None:
        async with self.bench(num_kv_blocks=24) as bench:
            for number in range(12):
                requests = [bench.request(prompt_of(30 + 9 * number, letter), 20) for letter in (number, number % 3)]
                bench.engine.submit(requests)
                kept, dropped = [request.stream for request in requests]
                await eventually(partial(bench.recorder.ended, kept), "it ends", END_S)
                bench.engine.abort([dropped])
                assert bench.engine.resident_blocks() == bench.recorder.resident.snapshot()
            await bench.all_free()
            await self.settle()
            assert bench.engine.resident_blocks() == bench.recorder.resident.snapshot()
            assert 0 < len(bench.recorder.resident) <= 24
            if bench.core is not None:
                bench.core.check()
                assert bench.core.resident_blocks() == bench.engine.resident_blocks()

    @on_loop
    async def test_stored_blocks_have_the_ids_of_the_contract(self) -> None:
        async with self.bench() as bench:
            key = namespace("tenant", "layout", salt="s")
            if not self.keeps_salts:
                refused = bench.request(prompt_of(40), namespace=key)
                bench.engine.submit([refused])
                await eventually(lambda: bench.recorder.ended(refused.stream), "it is refused")
                assert bench.recorder.error(refused.stream).param == "cache_salt"
                key = namespace(bench.info.card.fingerprint, bench.info.card.kv_layout)
            request = bench.request(prompt_of(40), 30, namespace=key)
            block_size = bench.info.card.block_size
            request.block_ids = chain_block_ids(key, request.prompt, block_size)
            (tokens,) = await bench.run(request)
            await self.settle()
            written = request.prompt + array("I", tokens[:-1]).tobytes()
            ids = chain_block_ids(key, written, block_size)
            stored = [event for event in bench.recorder.events if isinstance(event, BlocksStored)]
            assert b"".join(event.block_ids for event in stored) == ids
            assert bench.engine.resident_blocks() == [BlocksStored(ids)]

    @on_loop
    async def test_tenants_share_no_block(self) -> None:
        async with self.bench() as bench:
            card, prompt = bench.info.card, prompt_of(100)
            keys = [namespace(card.fingerprint, card.kv_layout, salt=salt) for salt in ("ann", "bob")]
            requests = [bench.request(prompt, 1, namespace=key) for key in (*keys, *keys)]
            if not self.keeps_salts:
                bench.engine.submit(requests)
                await eventually(lambda: bench.recorder.ended(1, 2, 3, 4), "they are refused")
                assert {bench.recorder.error(stream).param for stream in range(1, 5)} == {"cache_salt"}
                return
            for request in requests:
                ids = request.block_ids = chain_block_ids(request.namespace, request.prompt, card.block_size)
                await bench.run(request)
                await self.settle()
                assert all(one in bench.recorder.resident for one in split_block_ids(ids))
            cached = [bench.recorder.outputs[request.stream][0].num_cached_tokens for request in requests]
            assert cached == [0, 0, 96, 96]

    @on_loop
    async def test_load_reports_count_everything_and_beat_when_idle(self) -> None:
        async with self.bench() as bench:
            await bench.run(*[bench.request(prompt_of(33, letter), 9) for letter in range(3)])
            await self.settle()
            await bench.run(bench.request(prompt_of(33, 0), 9))
            await bench.all_free()
            load = bench.engine.load()
            assert (load.num_running, load.num_waiting, load.waiting_prefill_tokens) == (0, 0, 0)
            assert (load.prompt_tokens, load.cached_tokens, load.generated_tokens) == (132, 32, 36)
            timings = [timing for report in bench.recorder.loads for timing in report.timings]
            if not self.plans_itself:
                assert len(timings) == load.steps
                assert sum(timing.num_prefill_tokens for timing in timings) == 100
                assert sum(timing.num_decode_sequences for timing in timings) == 32
            assert all(timing.duration_ms >= 0 for timing in timings)
            beats = len(bench.recorder.loads)
            await eventually(lambda: len(bench.recorder.loads) > beats, "an idle engine reports")
