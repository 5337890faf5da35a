"""The engine suite on one real vLLM engine, started once; run by an interpreter that has vLLM.

    VLLM_PYTHON tests/vllm_suite.py in-worker|attached MODEL_FOLDER    one JSON line per check

Every check of `EngineConformance` that can share an engine runs on it, one after the other, each with a recorder and
streams of its own; those that close the engine or want other sizes are not asked, and say so. Then what can only be
asked of the real one: that the KV events agree with what vLLM finds in its cache, under eviction, gaps and clearing.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from unittest import SkipTest

import msgspec
import psutil
import uvloop

from headwater.engines.base import EngineInfo, Progress
from headwater.engines.conformance import EngineConformance
from headwater.engines.external import ExternalEngine
from headwater.engines.registry import create_engine
from headwater.engines.suite import SIZES, prompt_of
from headwater.engines.watched import Bench, Recorder
from headwater.kv.identity import chain_block_ids, namespace, split_block_ids
from headwater.protocol.events import BlocksStored
from headwater.runtime.conformance import CHECK, eventually

OTHER_SIZES = "wants an engine of other sizes"
LAST = ("test_close_ends_what_is_open_and_then_is_silent", "test_close_can_be_called_again_and_at_once")
"""They end the engine."""
NOT_ASKED = {
    "test_two_of_a_kind_are_exchangeable": "wants two engines",
    "test_a_moved_sequence_goes_on_where_it_was": "wants two engines",
    "test_preemption_does_not_show": OTHER_SIZES,
    "test_the_longest_prompt_is_served_and_a_longer_one_refused_with_the_sum": OTHER_SIZES,
    "test_events_add_up_to_the_snapshot_and_to_the_pool": OTHER_SIZES,
}
START_S = 240.0
VLLM_FLAGS = ("--enforce-eager", "--dtype", "float32")
VLLM_SIZES = msgspec.structs.replace(SIZES, block_size=32)
"""vLLM for CPU takes multiples of 32."""


class SharedEngine(EngineConformance):
    """All benches are the same engine, with a new recorder each."""

    plans_itself = True
    batch_invariant = False
    block_size = VLLM_SIZES.block_size

    def __init__(self, engine: ExternalEngine, info: EngineInfo, reset: Callable[[], Awaitable[None]]) -> None:
        self._engine = engine
        self._info = info
        self._reset = reset
        self._streams = 0

    @asynccontextmanager
    async def bench(self, **changes: object) -> AsyncIterator[Bench]:
        if changes and not (set(changes) <= {"enable_prefix_caching"}):
            raise NotImplementedError(OTHER_SIZES)
        if changes:
            raise StopAsyncIteration  # the first half of that check is done
        engine = self._engine
        if not engine.closed:
            # As if the check before had not drained it.
            engine._refusing, engine._draining = None, False
            engine._drained.clear()
            await self._reset()
        recorder = Recorder()
        for event in self._engine.resident_blocks():
            if isinstance(event, BlocksStored):
                recorder.resident.apply(event)
        self._engine.totals = type(self._engine.totals)()
        self._engine._listener = recorder
        bench = Bench(self._engine, self._info, recorder, [Progress("ready")])
        try:
            yield bench
        finally:
            self._engine.abort(list(self._engine.open))
            await bench.all_free()


class VllmChecks:
    """What vLLM itself says about its cache, against what its events said before."""

    def __init__(self, suite: SharedEngine, engine: ExternalEngine, server: "VllmServer | None") -> None:
        self._suite = suite
        self._engine = engine
        self._server = server
        self._hits = server.hits if server is not None else None
        """Prompt tokens that vLLM has found in its cache, where it does not say so with each answer."""

    async def test_events_agree_with_the_cache_under_eviction(self) -> None:
        """Prompts of several prefixes, more than fit: what the events say is resident is what vLLM then finds."""
        draws = random.Random(5)
        async with self._suite.bench() as bench:
            right = 0
            for _ in range(60):
                prompt = prompt_of(draws.choice((64, 128, 192)), draws.randrange(8))
                await self._suite.settle()
                predicted = self._resident_tokens(bench, prompt)
                before = await self._hits() if self._hits is not None else 0
                request = bench.request(prompt, 4)
                await bench.run(request)
                found = bench.recorder.outputs[request.stream][0].num_cached_tokens
                assert found == predicted or self._hits is None
                right += (found if self._hits is None else await self._hits() - before) == predicted
            removed = [event for event in bench.recorder.events if type(event).__name__ == "BlocksRemoved"]
            assert removed, "nothing was evicted"
            assert right == 60, f"{right} of 60 predictions were right"

    async def test_a_gap_in_the_events_heals(self) -> None:
        async with self._suite.bench() as bench:
            feed = self._engine._following.feeds[0]
            take = feed._order.on_live
            dropped: list[int] = []

            def forgetful(number: int, batch: object) -> None:
                if len(dropped) < 3:
                    dropped.append(number)
                else:
                    take(number, batch)

            feed._order.on_live = forgetful
            gaps = feed.order.num_gaps
            for letter in range(6):
                await bench.run(bench.request(prompt_of(64, letter), 3))
            await self._suite.settle()
            del feed._order.on_live
            assert len(dropped) == 3
            assert feed.order.num_gaps == gaps + 1
            assert feed.order.num_lost == 0
            assert all(self._resident_tokens(bench, prompt_of(64, letter)) for letter in range(6))

    async def test_structured_output_is_valid(self) -> None:
        from headwater.protocol.request import StructuredSpec

        async with self._suite.bench() as bench:
            spec = StructuredSpec("regex", "(ab){3}")
            (tokens,) = await bench.run(bench.request(prompt_of(20), 30, structured=spec))
            last = bench.recorder.last(1)
            assert last is not None
            assert (len(tokens), last.finish_reason) == (6, "stop")

    async def restart_a_killed_server_is_used_again_when_it_is_back(self) -> None:
        """Its streams end so that they can go on elsewhere, what it had cached is forgotten, and events are followed
        anew."""
        server = self._server
        assert server is not None
        async with self._suite.bench() as bench:
            prompt = prompt_of(192, 3)
            await bench.run(bench.request(prompt, 3))
            await self._suite.settle()
            assert self._resident_tokens(bench, prompt)
            open_one = bench.request(prompt_of(40, 5), 200)
            bench.engine.submit([open_one])
            await eventually(lambda: bench.recorder.tokens(open_one.stream), "it streams", 20)
            await asyncio.to_thread(server.kill)
            await eventually(lambda: bench.recorder.ended(open_one.stream), "it ends", 20)
            last = bench.recorder.last(open_one.stream)
            assert last is not None
            assert last.error is not None
            assert last.error.retryable
            await eventually(lambda: self._engine.paused, "it is lost", 20)
            assert len(self._engine.resident) == 0
            refused = bench.request(prompt, 3)
            bench.engine.submit([refused])
            await eventually(lambda: bench.recorder.ended(refused.stream), "it is refused", 20)
            await asyncio.to_thread(server.start)
            await eventually(lambda: not self._engine.paused, "it is used again", 20)
            for _ in range(2):
                before = await server.hits()
                predicted = self._resident_tokens(bench, prompt)
                await bench.run(bench.request(prompt, 3))
                await self._suite.settle()
                assert await server.hits() - before == predicted
            assert predicted, "events are followed anew"

    def _resident_tokens(self, bench: Bench, prompt: list[int]) -> int:
        card = bench.info.card
        packed = b"".join(token.to_bytes(4, "little") for token in prompt)
        ids = chain_block_ids(namespace(card.fingerprint, card.kv_layout), packed, card.block_size)
        count = 0
        for block_id in split_block_ids(ids):
            if block_id not in self._engine.resident:
                break
            count += 1
        return min(count * card.block_size, (len(prompt) - 1) // card.block_size * card.block_size)


async def run_checks(
    engine: ExternalEngine,
    info: EngineInfo,
    reset: Callable[[], Awaitable[None]],
    server: "VllmServer | None" = None,
) -> None:
    suite = SharedEngine(engine, info, reset)
    own = VllmChecks(suite, engine, server)
    names = [name for name in dir(suite) if name.startswith("test_") and name not in LAST]
    for name in names:
        if name in NOT_ASKED:
            told(name, "not asked", NOT_ASKED[name])
        else:
            await one_check(name, getattr(getattr(suite, name).__func__, CHECK)(suite))
    for name in [name for name in dir(own) if name.startswith("test_")]:
        await one_check(name, getattr(own, name)())
    if server is not None:
        restart = own.restart_a_killed_server_is_used_again_when_it_is_back()
        await one_check("test_a_killed_server_is_used_again_when_it_is_back", restart, START_S)
    for name in LAST:
        await one_check(name, getattr(getattr(suite, name).__func__, CHECK)(suite))


async def one_check(name: str, check: Awaitable[None], timeout_s: float = 60.0) -> None:
    began = time.monotonic()
    try:
        await asyncio.wait_for(check, timeout_s)
    except (StopAsyncIteration, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error.__cause__, StopAsyncIteration):
            told(name, "failed", traceback.format_exc()[-1500:])
            return
        told(name, "passed", f"{time.monotonic() - began:.1f} s")
    except SkipTest as skipped:
        told(name, "not asked", str(skipped))
    except Exception:  # noqa: BLE001 - reported
        told(name, "failed", traceback.format_exc()[-1500:])
    else:
        told(name, "passed", f"{time.monotonic() - began:.1f} s")


def told(name: str, result: str, detail: str) -> None:
    print(json.dumps({"check": name, "result": result, "detail": detail}), flush=True)


async def in_worker(folder: str) -> None:
    config = msgspec.structs.replace(VLLM_SIZES, engine="vllm", model=folder, threads=1, engine_args=VLLM_FLAGS)
    engine = create_engine(config)
    assert isinstance(engine, ExternalEngine)
    info = await started(engine)
    llm = engine._llm

    async def reset() -> None:
        await asyncio.sleep(0.05)
        assert await llm.reset_prefix_cache()
        # vLLM tells of the clearing with its next step.
        bench = Bench(engine, info, Recorder(), [])
        bench._streams = 1_000_000 + random.randrange(1 << 30)
        engine._listener = bench.recorder
        await bench.run(bench.request([3, 4, 5], 1))
        await eventually(lambda: len(engine.resident) == 0, "the cache is empty")

    try:
        await run_checks(engine, info, reset)
    finally:
        await engine.close()


async def attached(folder: str) -> None:
    server = VllmServer(folder)
    with server.running():
        url = server.url
        config = msgspec.structs.replace(VLLM_SIZES, attach=(url,), attach_as="vllm")
        engine = create_engine(config)
        assert isinstance(engine, ExternalEngine)
        info = await started(engine)

        async def reset() -> None:
            await asyncio.sleep(0.05)
            request = urllib.request.Request(f"{url}/reset_prefix_cache", b"")
            await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=10).read())
            bench = Bench(engine, info, Recorder(), [])
            bench._streams = 1_000_000 + random.randrange(1 << 30)
            engine._listener = bench.recorder
            await bench.run(bench.request([3, 4, 5], 1))
            await eventually(lambda: len(engine.resident) == 0, "the cache is empty")

        try:
            await run_checks(engine, info, reset, server)
        finally:
            await engine.close()


async def started(engine: ExternalEngine) -> EngineInfo:
    info = await engine.start(Recorder(), lambda _: None)
    card = info.card
    print(f"{info.engine}: {card.name}, {info.kv_blocks} blocks of {card.block_size}", file=sys.stderr)
    return info


class VllmServer:
    """vLLM's own server with the suite's sizes, on ports that it keeps over restarts."""

    def __init__(self, folder: str) -> None:
        ports = [_free_port() for _ in range(3)]
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events |= {"endpoint": f"tcp://*:{ports[1]}", "replay_endpoint": f"tcp://*:{ports[2]}"}
        self.url = f"http://127.0.0.1:{ports[0]}"
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *VLLM_FLAGS]
        self._command += ["--host", "127.0.0.1", "--port", str(ports[0]), "--block-size", "32"]
        self._command += ["--num-gpu-blocks-override", "49", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
        self._command += ["--max-model-len", "512", "--kv-events-config", json.dumps(events)]
        self._command += ["--gpu-memory-utilization", "0.1"]
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self):
        self.start()
        try:
            yield
        finally:
            self._process.terminate()
            self._process.wait(30)

    def start(self) -> None:
        """Until it answers."""
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        self._process = subprocess.Popen(self._command, stdout=sys.stderr, stderr=sys.stderr, env=environment)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                break
            time.sleep(0.2)

    def kill(self) -> None:
        """With all its processes, at once."""
        server = psutil.Process(self._process.pid)
        for process in [server, *server.children(recursive=True)]:
            process.kill()
        self._process.wait(30)

    async def hits(self) -> int:
        await asyncio.sleep(0.05)
        return await asyncio.to_thread(self._hits)

    def _hits(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)", text, re.MULTILINE)
        return int(float(found[1])) if found else 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    uvloop.run({"in-worker": in_worker, "attached": attached}[sys.argv[1]](sys.argv[2]))
