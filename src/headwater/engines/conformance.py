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
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from unittest import SkipTest

import msgspec

from headwater.config.schema import EngineConfig
from headwater.engines.base import Engine
from headwater.engines.engine import CoreEngine
from headwater.engines.watched import END_S, Bench, watch
from headwater.kv.identity import chain_block_ids, namespace, split_block_ids
from headwater.protocol.events import BlocksStored
from headwater.runtime.conformance import eventually, on_loop

VOCABULARY = 256
BLOCK_SIZE = 16
SIZES = EngineConfig(
    block_size=BLOCK_SIZE, num_kv_blocks=48, max_num_seqs=4, max_num_batched_tokens=64, max_waiting=8, max_model_len=512
)


SETTLE_S = 0.15
_VARIANT = "its batches are not invariant"
_NO_EXECUTOR = "breaks an executor of ours"
_COMPARING = (
    "test_preemption_does_not_show",
    "test_a_moved_sequence_goes_on_where_it_was",
    "test_a_seed_draws_the_same_again",
)
"""Checks that ask for equal outputs among other things."""


def prompt_of(length: int, letter: int = 1) -> list[int]:
    """Token ids of a prompt; different letters share no prefix."""
    return [20 + letter] + [20 + (letter * 31 + position * 7) % 200 for position in range(length - 1)]


class EngineConformance:
    """Inherit, and say how to make an engine."""

    block_size = BLOCK_SIZE
    plans_itself = False
    """Whether the engine plans its own steps, out of our sight: its steps are then not accounted for to the token, a
    prefix is shared once it has been computed, and blocks are told of a moment later."""

    keeps_salts = True
    """Whether requests of other namespaces than the model's own are served."""

    counts_preemptions = True
    """Whether it says how often it took a sequence's blocks away."""

    batch_invariant = True
    """What it says of itself: whether outputs may be compared."""

    @classmethod
    def remarks(cls) -> dict[str, str]:
        """By check, what is true of this engine beyond a plain yes: the same words above decide what is asked."""
        found: dict[str, str] = {}
        if not cls.batch_invariant:
            found = dict.fromkeys(_COMPARING, "yes; outputs are not compared")
            found["test_neighbours_chunks_and_cache_do_not_change_the_output"] = f"not asked: {_VARIANT}"
        if cls.plans_itself:
            found["test_a_failing_executor_ends_everything_with_an_error"] = f"not asked: {_NO_EXECUTOR}"
        if not cls.keeps_salts:
            found["test_stored_blocks_have_the_ids_of_the_contract"] = "yes; other salts are refused by name"
            found["test_tenants_share_no_block"] = "refused by name"
        if not cls.counts_preemptions:
            found["test_preemption_does_not_show"] = "yes; outputs are not compared, preemptions not counted"
        return found

    async def settle(self) -> None:
        """Until what was computed has been told of."""
        if self.plans_itself:
            await asyncio.sleep(SETTLE_S)

    def create(self, sizes: EngineConfig) -> Engine:
        """A new engine, not started, with these sizes and a model of the test's choice."""
        raise NotImplementedError

    @asynccontextmanager
    async def bench(self, **changes: object) -> AsyncIterator[Bench]:
        sizes = msgspec.structs.replace(SIZES, **changes)
        capacity = (sizes.num_kv_blocks or 0) * sizes.block_size
        engine = self.create(msgspec.structs.replace(sizes, max_model_len=min(sizes.max_model_len or 0, capacity)))
        cores, executors = watch(engine) if isinstance(engine, CoreEngine) else ([], [])
        async with Bench.running(engine) as bench:
            bench.core = cores[0] if cores else None
            bench.executor = executors[0] if executors else None
            yield bench

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
            raise SkipTest(_VARIANT)
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

    # ---- refusals

    @on_loop
    async def test_what_cannot_be_served_is_answered_and_the_rest_goes_on(self) -> None:
        async with self.bench() as bench:
            bad = [
                (bench.request(prompt_of(512)), "context_length_exceeded"),
                (bench.request([]), "invalid_value"),
                (bench.request([bench.info.card.vocab_size]), "invalid_value"),
                (bench.request(prompt_of(5), 0), "invalid_value"),
                (bench.request(prompt_of(5), block_ids=b"short"), "invalid_value"),
                (bench.request(prompt_of(5), deadline=1.0), "deadline_exceeded"),
            ]
            good = bench.request(prompt_of(30))
            bench.engine.submit([*[request for request, _ in bad], good])
            await eventually(lambda: bench.recorder.ended(*range(1, 8)), "all are answered", END_S)
            assert [bench.recorder.error(request.stream).code for request, _ in bad] == [code for _, code in bad]
            assert len(bench.recorder.tokens(good.stream)) == 8
            await bench.all_free()

    @on_loop
    async def test_the_longest_prompt_is_served_and_a_longer_one_refused_with_the_sum(self) -> None:
        async with self.bench(num_kv_blocks=10) as bench:
            bench.engine.submit([bench.request(prompt_of(160))])
            await eventually(lambda: bench.recorder.ended(1), "it is answered")
            assert "at most 159" in bench.recorder.error(1).message
            (tokens,) = await bench.run(bench.request(prompt_of(159), 50))
            assert len(tokens) == 1

    @on_loop
    async def test_overload_is_answered_and_the_rest_goes_on(self) -> None:
        async with self.bench() as bench:
            requests = [bench.request(prompt_of(20, number), 5) for number in range(20)]
            bench.engine.submit(requests)
            await eventually(lambda: bench.recorder.ended(*range(1, 21)), "all are answered", END_S)
            codes = [
                output.error.code if (output := bench.recorder.last(n + 1)) and output.error else "" for n in range(20)
            ]
            assert codes[:8] == [""] * 8
            assert set(codes[8:]) == {"overloaded"}
            assert bench.recorder.error(20).retryable
            await bench.all_free()

    @on_loop
    async def test_a_deadline_ends_a_running_sequence(self) -> None:
        async with self.bench() as bench:
            bench.slow_down(0.005)
            bench.engine.submit([bench.request(prompt_of(20), 490, deadline=time.time() + 0.2)])
            await eventually(lambda: bench.recorder.ended(1), "it ends", END_S)
            assert bench.recorder.error(1).code == "deadline_exceeded"
            assert 0 < len(bench.recorder.tokens(1)) < 490
            await bench.all_free()

    # ---- abort

    @on_loop
    async def test_abort_while_queued(self) -> None:
        async with self.bench() as bench:
            bench.slow_down(0.002)
            bench.engine.submit([bench.request(prompt_of(20, letter), 200) for letter in range(5)])
            await eventually(lambda: bench.engine.load().num_waiting == 1, "one waits")
            await self._aborted(bench, 5, max_tokens=0)
            bench.engine.abort(range(1, 5))
            await bench.all_free()

    @on_loop
    async def test_abort_while_prefilling(self) -> None:
        async with self.bench() as bench:
            bench.slow_down(0.005)
            bench.engine.submit([bench.request(prompt_of(500), 5)])
            await eventually(lambda: bench.engine.load().num_running == 1, "it prefills")
            await self._aborted(bench, 1, max_tokens=0)
            await bench.all_free()

    @on_loop
    async def test_abort_while_decoding(self) -> None:
        async with self.bench() as bench:
            bench.slow_down(0.002)
            bench.engine.submit([bench.request(prompt_of(20), 400), bench.request(prompt_of(20, 2), 30)])
            await eventually(lambda: bool(bench.recorder.tokens(1)), "it decodes")
            await self._aborted(bench, 1, max_tokens=399)
            await eventually(lambda: bench.recorder.ended(2), "the other one ends", END_S)
            assert len(bench.recorder.tokens(2)) == 30
            await bench.all_free()

    @on_loop
    async def test_abort_in_the_turn_of_the_submit(self) -> None:
        async with self.bench() as bench:
            bench.engine.submit([bench.request(prompt_of(20), 400)])
            await self._aborted(bench, 1, max_tokens=0)
            await bench.all_free()

    @on_loop
    async def test_abort_of_a_refused_one_silences_it(self) -> None:
        async with self.bench() as bench:
            bench.engine.submit([bench.request([]), bench.request(prompt_of(5), 3)])
            bench.engine.abort([1])
            await eventually(lambda: bench.recorder.ended(2), "the other one ends", END_S)
            await bench.engine.drain(END_S)
            bench.engine.submit([bench.request(prompt_of(5)), bench.request(prompt_of(5))])
            bench.engine.abort([3])
            await eventually(lambda: bench.recorder.ended(4), "the other one is refused")
            assert set(bench.recorder.outputs) == {2, 4}

    @on_loop
    async def test_abort_of_a_stranger_is_ignored(self) -> None:
        async with self.bench() as bench:
            await bench.run(bench.request(prompt_of(20), 3))
            bench.engine.abort([1, 99])
            await bench.run(bench.request(prompt_of(20), 3))

    async def _aborted(self, bench: Bench, stream: int, *, max_tokens: int) -> None:
        """Abort it: nothing of it is computed after the step under way, and nothing is said any more."""
        executor = bench.executor
        bench.engine.abort([stream])
        steps = len(executor.plans) if executor else 0
        said = len(bench.recorder.outputs.get(stream, []))
        if executor is not None:
            await eventually(lambda: stream not in executor.known, "the executor has forgotten it")
            assert all(stream not in plan for plan in executor.plans[steps + 1 :])
        await asyncio.sleep(0.02)
        assert len(bench.recorder.outputs.get(stream, [])) == said
        assert len(bench.recorder.tokens(stream)) <= max_tokens
        assert not bench.recorder.ended(stream)

    # ---- failure

    @on_loop
    async def test_a_failing_executor_ends_everything_with_an_error(self) -> None:
        if self.plans_itself:
            raise SkipTest(_NO_EXECUTOR)
        async with self.bench() as bench:
            assert bench.executor is not None
            bench.slow_down(0.002)
            bench.engine.submit([bench.request(prompt_of(20, letter), 400) for letter in range(6)])
            await eventually(lambda: bench.recorder.tokens(1) != [], "it runs")
            bench.executor.failing = True
            await eventually(lambda: bool(bench.recorder.failures), "the failure is told")
            assert [type(error).code for error in bench.recorder.failures] == ["engine_failed"]
            assert "fell off the bus" in str(bench.recorder.failures[0])
            assert {bench.recorder.error(stream).code for stream in range(1, 7)} == {"engine_failed"}
            bench.engine.submit([bench.request(prompt_of(20))])
            await eventually(lambda: bench.recorder.ended(7), "a later one is refused")
            assert bench.recorder.error(7).retryable
            assert await bench.engine.drain(1.0)
            await bench.engine.close()
            assert bench.executor.closed == 1
            assert len(bench.recorder.failures) == 1

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
