"""What every KV port must do: a suite to inherit from, beside `EngineConformance`, for engines that have one.

The agents outside are this suite's own: they copy blocks between two engines by hand.
"""

import asyncio
import time

from headwater.engines.base import KvPort
from headwater.engines.conformance import EngineConformance
from headwater.engines.suite import prompt_of
from headwater.engines.watched import END_S, Bench
from headwater.kv.identity import chain_block_ids, namespace
from headwater.protocol.request import EngineRequest, ExportOrder
from headwater.runtime.conformance import eventually, on_loop
from headwater.scheduler.outside import (
    BlocksCommitted,
    BlocksExported,
    ExportWaits,
    FirstToken,
    Held,
    LoadEnded,
    LoadStarted,
)


class Outsider:
    """Keeps what a port tells it."""

    def __init__(self) -> None:
        self.started: dict[int, LoadStarted] = {}
        self.ended: dict[int, LoadEnded] = {}
        self.waits: list[ExportWaits] = []
        self.exported: list[BlocksExported] = []
        self.committed: list[BlocksCommitted] = []
        self.held: list[Held] = []

    def on_load(self, started: LoadStarted) -> None:
        assert started.stream not in self.started
        self.started[started.stream] = started

    def on_load_ended(self, ended: LoadEnded) -> None:
        assert ended.stream not in self.ended
        self.ended[ended.stream] = ended

    def on_waiting(self, waits: ExportWaits) -> None:
        self.waits.append(waits)

    def on_exported(self, exported: BlocksExported) -> None:
        self.exported.append(exported)

    def on_committed(self, committed: list[BlocksCommitted]) -> None:
        self.committed += committed

    def on_held(self, held: Held) -> None:
        self.held.append(held)

    @property
    def readable(self) -> list[int]:
        return [block for exported in self.exported for block in exported.blocks]


class KvPortConformance(EngineConformance):
    """Inherit together with how to make an engine."""

    def port(self, bench: Bench) -> KvPort:
        port = bench.engine.kv
        assert port is not None, "this engine has no KV port"
        return port

    def begin_export(
        self, bench: Bench, request: EngineRequest, reader: Outsider, first_block: int = 0, hold_s: float = 60.0
    ) -> None:
        card = bench.info.card
        request.export = ExportOrder(first_block, hold_s, card.fingerprint, card.kv_layout, card.dtype, card.block_size)
        self.port(bench).read(request.stream, reader)
        bench.engine.submit([request])

    async def export(self, bench: Bench, request: EngineRequest, first_block: int = 0) -> tuple[Outsider, FirstToken]:
        """Prefill elsewhere: the blocks, and the first token."""
        reader = Outsider()
        self.begin_export(bench, request, reader, first_block)
        await eventually(lambda: bench.recorder.ended(request.stream), "the export ends", END_S)
        (token,) = bench.recorder.tokens(request.stream)
        return reader, FirstToken(token)

    async def load(self, bench: Bench, request: EngineRequest, timeout_s: float = 60.0) -> tuple[Outsider, LoadStarted]:
        loader = Outsider()
        self.port(bench).submit_loading(request, loader, timeout_s)
        await eventually(lambda: request.stream in loader.started, "it is admitted", END_S)
        return loader, loader.started[request.stream]

    @on_loop
    async def test_blocks_of_one_engine_serve_another(self) -> None:
        async with self.bench() as first, self.bench() as second:
            for number, length in enumerate((5, 32, 100, 333)):
                (whole,) = await first.run(first.request(prompt_of(length, number), 20))
                exported = first.request(prompt_of(length, number), 1)
                reader, token = await self.export(first, exported)
                request = second.request(prompt_of(length, number), 20)
                loader, started = await self.load(second, request)
                assert (started.first_block, len(started.blocks)) == (0, -(-length // 16))
                self.copy(first, reader.readable, second, started.blocks)
                self.port(second).arrived(request.stream, length // 32)
                self.port(second).prefilled(request.stream, token)
                await eventually(lambda r=request: second.recorder.ended(r.stream), "it ends", END_S)  # type: ignore[misc]
                if second.info.batch_invariant:
                    assert second.recorder.tokens(request.stream) == whole
                self.port(first).release(exported.stream)
                assert not loader.ended
            await second.all_free()
            self.check(second)

    @on_loop
    async def test_only_what_is_missing_is_asked_for_and_offered(self) -> None:
        async with self.bench() as first, self.bench() as second:
            await second.run(second.request(prompt_of(100), 1))
            prompt = [*prompt_of(90), *range(30, 60)]
            reader, token = await self.export(first, first.request(prompt, 1), first_block=5)
            request = second.request(prompt, 10)
            _, started = await self.load(second, request)
            assert (started.first_block, started.num_tokens) == (5, 120)
            assert len(reader.readable) == len(started.blocks) == 3
            self.copy(first, reader.readable, second, started.blocks)
            self.port(second).prefilled(request.stream, token)
            await eventually(lambda: second.recorder.ended(request.stream), "it ends", END_S)
            plain = (await first.run(first.request(prompt, 10)))[0]
            if second.info.batch_invariant:
                assert second.recorder.tokens(request.stream) == plain

    @on_loop
    async def test_what_does_not_come_is_computed(self) -> None:
        async with self.bench() as first, self.bench() as second:
            (whole,) = await first.run(first.request(prompt_of(100), 20))
            reader, _ = await self.export(first, first.request(prompt_of(100), 1))
            request = second.request(prompt_of(100), 20)
            loader, started = await self.load(second, request)
            self.copy(first, reader.readable[:4], second, started.blocks[:4])
            for block in started.blocks[4:]:
                self.port(second).blocks.block(block)[:] = b"\xa5" * self.port(second).blocks.block_bytes
            self.port(second).loaded(request.stream, 4)
            await eventually(lambda: second.recorder.ended(request.stream), "it ends", END_S)
            if second.info.batch_invariant:
                assert second.recorder.tokens(request.stream) == whole
            assert second.recorder.outputs[request.stream][0].num_cached_tokens == 64
            assert not loader.ended
            await second.all_free()
            self.check(second)

    @on_loop
    async def test_a_loader_that_says_nothing_holds_up_nobody(self) -> None:
        async with self.bench() as bench:
            request = bench.request(prompt_of(100), 8)
            loader, _ = await self.load(bench, request, timeout_s=0.3)
            (others,) = await bench.run(bench.request(prompt_of(40, 2), 30))
            assert len(others) == 30
            await eventually(lambda: bench.recorder.ended(request.stream), "it is computed here", END_S)
            assert loader.ended[request.stream].reason == "late"
            assert bench.engine.load().kv_blocks_free < bench.info.kv_blocks
            self.port(bench).stopped(request.stream)
            await bench.all_free()
            (again,) = await bench.run(bench.request(prompt_of(100), 8))
            assert bench.recorder.tokens(request.stream) == again

    @on_loop
    async def test_an_abort_keeps_the_blocks_of_a_loader_until_it_stops(self) -> None:
        async with self.bench() as bench:
            request = bench.request(prompt_of(100), 8)
            loader, started = await self.load(bench, request)
            bench.engine.abort([request.stream])
            await eventually(lambda: request.stream in loader.ended, "the loader is told")
            await asyncio.sleep(0.05)
            missing = bench.info.kv_blocks - bench.engine.load().kv_blocks_free
            assert missing == len(started.blocks)
            self.port(bench).stopped(request.stream)
            await bench.all_free()
            assert request.stream not in bench.recorder.outputs

    @on_loop
    async def test_a_load_that_never_began_ends_too(self) -> None:
        async with self.bench() as bench:
            loader = Outsider()
            bad = bench.request(prompt_of(100), 8, deadline=time.time() - 1)
            self.port(bench).submit_loading(bad, loader, 10.0)
            await eventually(lambda: bad.stream in loader.ended, "the loader is told")
            assert bench.recorder.error(bad.stream).code == "deadline_exceeded"
            await bench.engine.drain(0.1)
            late = bench.request(prompt_of(100), 8)
            self.port(bench).submit_loading(late, loader, 10.0)
            await eventually(lambda: bench.recorder.ended(late.stream), "it is refused")
            assert late.stream in loader.ended

    @on_loop
    async def test_what_waits_in_line_is_told_so_and_then_computed(self) -> None:
        async with self.bench() as bench:
            readers = [Outsider() for _ in range(4)]
            exports = [bench.request(prompt_of(120, number), 1) for number in range(4)]
            for export, reader in zip(exports, readers, strict=True):
                self.begin_export(bench, export, reader)
            await eventually(lambda: bench.recorder.ended(*[export.stream for export in exports]), "all end", END_S)
            assert not readers[0].waits, "the first one never waited"
            last = readers[-1].waits[0]
            assert (last.stream, last.num_ahead, last.tokens_ahead > 300) == (exports[-1].stream, 3, True)
            assert len(readers[-1].readable) == 8

    @on_loop
    async def test_exported_blocks_are_told_by_chunks_and_stay(self) -> None:
        async with self.bench() as bench:
            reader, _ = await self.export(bench, bench.request(prompt_of(200), 1))
            assert len(reader.exported) > 1
            assert reader.exported[0].first_block == 0
            assert len(set(reader.readable)) == 13
            content = [bytes(self.port(bench).blocks.block(block)) for block in reader.readable]
            for letter in range(10, 16):
                await bench.run(bench.request(prompt_of(300, letter), 4))
            assert [bytes(self.port(bench).blocks.block(block)) for block in reader.readable] == content
            self.port(bench).release(1)
            await bench.all_free()
            self.check(bench)

    @on_loop
    async def test_release_ends_what_runs_and_its_time_ends_a_hold(self) -> None:
        async with self.bench() as bench:
            bench.slow_down(0.01)
            reader = Outsider()
            running, held = bench.request(prompt_of(480), 1), bench.request(prompt_of(60, 2), 1)
            self.begin_export(bench, running, reader)
            await eventually(lambda: bool(reader.exported), "something can be read")
            self.port(bench).release(running.stream)
            await bench.all_free()
            assert running.stream not in bench.recorder.outputs
            self.begin_export(bench, held, reader, hold_s=0.4)
            await eventually(lambda: bench.recorder.ended(held.stream), "it ends", END_S)
            await bench.all_free()

    @on_loop
    async def test_what_is_committed_is_told_and_can_be_held(self) -> None:
        async with self.bench() as bench:
            port, watcher = self.port(bench), Outsider()
            port.watch(watcher)
            key = namespace("tenant", "layout")
            request = bench.request(prompt_of(100), 20, namespace=key)
            await bench.run(request)
            ids = b"".join(committed.block_ids for committed in watcher.committed)
            assert chain_block_ids(key, request.prompt, 16) == ids[: 16 * 6]
            assert len(watcher.committed) >= 2
            port.hold(ids[48:64], 60.0, watcher.on_held)
            port.hold(b"nobody's id 1234", 60.0, watcher.on_held)
            await eventually(lambda: len(watcher.held) == 2, "the holds are answered")
            (held, none) = watcher.held
            told = [block for committed in watcher.committed for block in committed.blocks]
            assert list(held.blocks) == told[:4]
            assert none.blocks == ()
            content = [bytes(port.blocks.block(block)) for block in held.blocks]
            for letter in range(10, 16):
                await bench.run(bench.request(prompt_of(300, letter), 4))
            assert [bytes(port.blocks.block(block)) for block in held.blocks] == content
            port.drop(held.hold)
            await bench.all_free()
            self.check(bench)

    @on_loop
    async def test_what_is_loaded_can_be_exported_at_once(self) -> None:
        """A prefill worker whose store has the beginning of a prompt."""
        async with self.bench() as first, self.bench() as second:
            source, _ = await self.export(first, first.request(prompt_of(150), 1))
            request, reader = second.request(prompt_of(150), 1), Outsider()
            card = second.info.card
            request.export = ExportOrder(2, 60.0, card.fingerprint, card.kv_layout, card.dtype, card.block_size)
            self.port(second).read(request.stream, reader)
            _, started = await self.load(second, request)
            self.copy(first, source.readable[:5], second, started.blocks[:5])
            self.port(second).arrived(request.stream, 4)
            await eventually(lambda: reader.readable == list(started.blocks[2:4]), "what arrived can be read")
            self.port(second).loaded(request.stream, 5)
            await eventually(lambda: second.recorder.ended(request.stream), "it ends", END_S)
            assert reader.readable == list(started.blocks[2:])
            if second.info.batch_invariant:
                here = [bytes(self.port(second).blocks.block(block)) for block in reader.readable[:-1]]
                assert here == [bytes(self.port(first).blocks.block(block)) for block in source.readable[2:-1]]
            self.port(second).release(request.stream)
            await second.all_free()
            self.check(second)

    def copy(self, first: Bench, source: list[int], second: Bench, target: tuple[int, ...] | list[int]) -> None:
        there, here = self.port(first).blocks, self.port(second).blocks
        for from_block, to_block in zip(source, target, strict=True):
            here.block(to_block)[:] = there.block(from_block)

    def check(self, bench: Bench) -> None:
        if bench.core is not None:
            bench.core.check()
