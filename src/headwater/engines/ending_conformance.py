"""What every engine must do with what does not end as it was asked for: refused, aborted, too late, or failed."""

import asyncio
import time
from unittest import SkipTest

from headwater.engines.suite import NO_EXECUTOR, EngineSuite, prompt_of
from headwater.engines.watched import END_S, Bench
from headwater.runtime.conformance import eventually, on_loop


class EndingConformance(EngineSuite):
    """Part of `EngineConformance`."""

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
            raise SkipTest(NO_EXECUTOR)
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
