"""vLLM's KV port and the connector below it, called as vLLM's scheduler and workers call it: blocks pass from one
stand-in engine to another through the slots of both, copied by hand."""

import asyncio
import importlib
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine_doubles import install
from headwater.engines.external import OpenStream
from headwater.engines.kv_conformance import Outsider
from headwater.engines.load_reports import Totals
from headwater.engines.vllm import staging
from headwater.engines.vllm.port import StagingPort
from headwater.engines.vllm.staging import Staging
from headwater.errors import HeadwaterError, ModelError, Overloaded
from headwater.kv.connectors.vllm_staging import Exported, LoadParams, Registered, StagingAddress, StagingClient
from headwater.protocol.request import EngineRequest, ExportOrder, SamplingParams, SequenceOutput
from headwater.runtime.conformance import eventually
from headwater.scheduler.outside import FirstToken
from vllm_connector_double import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    INTERFACE,
    LAYERS,
    KVConnectorRole,
    Request,
    VllmEngine,
    cache_config,
    config,
    names,
)

CHUNK = 12
SLOT_BYTES = LAYERS * HEADS * BLOCK * 2 * HEAD_SIZE * 4
NUM_SLOTS = 24


class Stand(VllmEngine):
    """vLLM with the hand-off connector, below a port. What is handed over waits until `serve` is called."""

    def __init__(self, connector: ModuleType, *, tp: int = 1, num_slots: int = NUM_SLOTS) -> None:
        self.staging = Staging(num_slots * SLOT_BYTES * tp)
        extra = self.staging.connector(os.getpid())["kv_connector_extra_config"]
        make, cache = connector.HandoffConnector, cache_config(64)
        self.scheduler = make(self._config(extra, tp, 0), KVConnectorRole.SCHEDULER, cache)
        self.workers = [make(self._config(extra, tp, rank), KVConnectorRole.WORKER, cache) for rank in range(tp)]
        self.kv = [torch.zeros(LAYERS, 64, HEADS, BLOCK, 2 * HEAD_SIZE) for _ in range(tp)]
        self.heads = [range(rank * HEADS, (rank + 1) * HEADS) for rank in range(tp)]
        for worker, kv in zip(self.workers, self.kv, strict=True):
            worker.register_kv_caches({f"layer.{number}": kv[number] for number in range(LAYERS)})
        self.free = list(range(64))[::-1]
        self.computed = 0
        self.open: dict[int, OpenStream] = {}
        self.totals = Totals()
        self.resident = 0
        """Blocks that it says it has, of any prompt."""
        self.handed: list[tuple[OpenStream, list[int], dict[str, Any] | None]] = []
        self.outputs: dict[int, SequenceOutput] = {}
        self.errors: dict[int, HeadwaterError] = {}

    def _config(self, extra: dict[str, Any], tp: int, rank: int) -> Any:
        made = config("", "m", tp=tp, rank=rank)
        made.kv_transfer_config.kv_connector_extra_config = extra
        return made

    async def ready(self) -> "Stand":
        await self.staging.registered()
        self.port = StagingPort(self.staging, self, BLOCK)
        return self

    def close(self) -> None:
        self.port.close()
        super().close()
        self.staging.close()

    # PortOwner

    def submit(self, requests: Any) -> None:
        for request in requests:
            tokens = array("I", request.prompt)
            stream = self.open[request.stream] = OpenStream(request, len(tokens), 0.0)
            try:
                if not self.port.begin(stream, tokens):
                    self.hand_over(stream, tokens, self.port.export(stream, len(tokens)))
            except HeadwaterError as error:
                self.end(request.stream, error)

    def abort(self, streams: Any) -> None:
        for stream in streams:
            del self.open[stream]
            if not self.port.cancelled(stream):
                self.handed = [one for one in self.handed if one[0].request.stream != stream] + [
                    (SimpleNamespace(request=None), [], one[2])
                    for one in self.handed
                    if one[0].request.stream == stream
                ]

    def hand_over(self, stream: OpenStream, tokens: "array[int]", params: dict[str, Any] | None) -> None:
        self.handed.append((stream, tokens.tolist(), params))

    def deliver(self, outputs: Any) -> None:
        for output in outputs:
            self.outputs[output.stream] = output
            self.open.pop(output.stream, None)

    def end(self, stream: int, error: HeadwaterError) -> None:
        self.errors[stream] = error
        self.open.pop(stream, None)

    def num_resident(self, block_ids: bytes) -> int:
        return self.resident

    def block_ids(self, request: EngineRequest) -> bytes:
        return b""

    # What vLLM does

    def serve(self) -> None:
        """All that was handed over, one after the other: the first token of each."""
        handed, self.handed = self.handed, []
        for stream, tokens, params in handed:
            self._serve(stream, tokens, params)

    def _serve(self, stream: Any, tokens: list[int], params: dict[str, Any] | None) -> None:
        request: Any = Request(f"r{id(stream)}", list(tokens))
        request.kv_transfer_params, request.num_prompt_tokens = params, len(tokens)
        blocks: list[int] = []
        if stream.request is None:  # aborted while it waited
            self._finish(request, blocks)
            return
        local = self.resident * BLOCK
        matched, later = self.scheduler.get_num_new_matched_tokens(request, local)
        position = local + matched
        self._grow(blocks, max(1, position))
        for at in range(local):
            for kv, held in zip(self.kv, self.heads, strict=True):
                self._compute(kv, held, blocks, at, tokens[at])
        self.scheduler.update_state_after_alloc(request, _Places(blocks), matched)
        if later:
            while not all(request.request_id in done for done, _ in self._step(request, blocks, 0, 0, [])):
                pass
            position = min(position, len(tokens) - 1)
        first = True
        while position < len(tokens):
            scheduled = min(CHUNK, len(tokens) - position)
            self._grow(blocks, position + scheduled)
            self._step(request, blocks, position, scheduled, [request] if first else [])
            first, position = False, position + scheduled
            self.totals.steps += 1
        token = self._sample(blocks, position)
        self._finish(request, blocks)
        output = SequenceOutput(stream.request.stream, [token], "length", num_cached_tokens=0)
        self.deliver(self.port.leaving([output]))

    def _finish(self, request: Any, blocks: list[int]) -> None:
        assert self.scheduler.request_finished(request, blocks) == (False, None)
        self._step(request, blocks, 0, 0, [])
        self.free += blocks
        for kv in self.kv:
            kv[:, blocks] = 77.0


class _Places:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self._ids,)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    install(monkeypatch, INTERFACE, **names())
    yield importlib.import_module("headwater.kv.connectors.vllm_handoff")
    del sys.modules["headwater.kv.connectors.vllm_handoff"]


Scenario = Callable[[Stand, Stand], Any]


def run(connector: ModuleType, scenario: Scenario, *, tp: int = 1, num_slots: int = NUM_SLOTS) -> None:
    async def whole() -> None:
        prefill = await Stand(connector, tp=tp, num_slots=num_slots).ready()
        decode = await Stand(connector, tp=tp, num_slots=num_slots).ready()
        try:
            await scenario(prefill, decode)
            for stand in (prefill, decode):
                await eventually(lambda stand=stand: stand.staging.num_free == stand.staging.num_slots, "all are free")
        finally:
            prefill.close()
            decode.close()

    asyncio.run(whole())


def tokens_of(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + number * 104729) % 50_000 for number in range(length)]


def request_of(stream: int, tokens: list[int], export_from: int | None = None, hold_s: float = 30.0) -> EngineRequest:
    order = None if export_from is None else ExportOrder(export_from, hold_s, "f", "l", "float32", BLOCK)
    return EngineRequest(stream, "r", "m", array("I", tokens).tobytes(), SamplingParams(max_tokens=1), export=order)


async def exported(stand: Stand, stream: int, tokens: list[int], first_block: int = 0) -> Outsider:
    reader = Outsider()
    stand.port.read(stream, reader)
    stand.submit([request_of(stream, tokens, first_block)])
    stand.serve()
    await eventually(lambda: stream in stand.outputs, "the first token comes")
    return reader


async def loading(stand: Stand, stream: int, tokens: list[int], timeout_s: float = 30.0) -> Outsider:
    loader = Outsider()
    stand.port.submit_loading(request_of(stream, tokens), loader, timeout_s)
    await eventually(lambda: stream in loader.started or stream in loader.ended, "it is admitted")
    return loader


def copied(source: Stand, slots: list[int], target: Stand, into: tuple[int, ...]) -> None:
    size = source.staging.slot_bytes
    for at, to in zip(slots, into, strict=True):
        piece = bytes(source.staging.buffer.view[at * size : (at + 1) * size])
        target.staging.buffer.view[to * size : (to + 1) * size] = piece


def alone(connector_stand: Stand, tokens: list[int]) -> int:
    connector_stand.submit([request_of(1_000, tokens)])
    connector_stand.serve()
    return connector_stand.outputs.pop(1_000).token_ids[0]


@pytest.mark.parametrize(("length", "tp"), [(40, 1), (37, 1), (5, 1), (41, 2)])
def test_a_prompt_of_one_engine_is_the_others_context(connector: ModuleType, length: int, tp: int) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        tokens = tokens_of(length)
        reader = await exported(prefill, 1, tokens)
        assert len(reader.readable) == -(-length // BLOCK)
        first = FirstToken(prefill.outputs[1].token_ids[0], num_cached_tokens=3)
        loader = await loading(decode, 2, tokens)
        started = loader.started[2]
        assert (started.first_block, len(started.blocks), started.num_tokens) == (0, -(-length // BLOCK), length)
        copied(prefill, reader.readable, decode, started.blocks)
        prefill.port.release(1)
        decode.port.prefilled(2, first)
        decode.serve()
        assert decode.outputs[2].token_ids[0] == first.token_id
        assert decode.outputs[2].num_cached_tokens == 3, "over there"
        assert decode.computed == 1, "the last token, again"
        assert prefill.staging.layout == decode.staging.layout

    run(connector, scenario, tp=tp)


def test_blocks_are_told_step_by_step_and_the_token_last(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        reader = await exported(prefill, 1, tokens_of(30), first_block=2)
        assert reader.exported[0].first_block == 2
        assert sum(len(one.blocks) for one in reader.exported) == 8 - 2
        assert prefill.port._exports[1].is_out
        prefill.port.release(1)

    run(connector, scenario)


def test_what_is_damaged_in_a_slot_shows(connector: ModuleType) -> None:
    """The control: without it the tests above would say nothing."""

    async def scenario(prefill: Stand, decode: Stand) -> None:
        tokens = tokens_of(40)
        reader = await exported(prefill, 1, tokens)
        loader = await loading(decode, 2, tokens)
        copied(prefill, reader.readable, decode, loader.started[2].blocks)
        at = loader.started[2].blocks[3] * decode.staging.slot_bytes + 2
        decode.staging.buffer.view[at] ^= 0xFF
        prefill.port.release(1)
        decode.port.prefilled(2, FirstToken(0))
        decode.serve()
        assert decode.outputs[2].token_ids != prefill.outputs[1].token_ids

    run(connector, scenario)


def test_what_did_not_come_is_computed(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        tokens = tokens_of(40)
        expected = alone(decode, tokens)
        decode.computed = 0
        reader = await exported(prefill, 1, tokens)
        loader = await loading(decode, 2, tokens)
        copied(prefill, reader.readable[:6], decode, loader.started[2].blocks[:6])
        decode.port.arrived(2, 6)
        decode.port.loaded(2, 6, cached=False)
        assert decode.staging.num_free == NUM_SLOTS - 6
        decode.serve()
        assert decode.outputs[2].token_ids == [expected]
        assert decode.computed == 40 - 6 * BLOCK
        prefill.port.release(1)

    run(connector, scenario)


def test_what_the_engine_has_itself_is_not_asked_for(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        tokens = tokens_of(40)
        expected = alone(decode, tokens)
        decode.resident = 4
        reader = await exported(prefill, 1, tokens, first_block=4)
        loader = await loading(decode, 2, tokens)
        started = loader.started[2]
        assert (started.first_block, len(started.blocks)) == (4, 6)
        copied(prefill, reader.readable, decode, started.blocks)
        decode.port.prefilled(2, FirstToken(expected))
        decode.resident = 5  # one more by now
        decode.serve()
        assert decode.outputs[2].token_ids == [expected]
        assert decode.outputs[2].num_cached_tokens == 4 * BLOCK
        prefill.port.release(1)

    run(connector, scenario)


def test_the_last_block_is_asked_for_though_the_engine_has_it(connector: ModuleType) -> None:
    """Its last token is computed, and vLLM then does without the block."""

    async def scenario(prefill: Stand, decode: Stand) -> None:
        decode.resident = 10
        loader = await loading(decode, 2, tokens_of(40))
        started = loader.started[2]
        assert (started.first_block, len(started.blocks)) == (9, 1)
        decode.abort([2])
        await eventually(lambda: 2 in loader.ended, "it is told to stop")
        decode.port.stopped(2)

    run(connector, scenario)


def test_blocks_pass_in_pieces(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        for stand in (prefill, decode):
            stand.workers[0]._worker._copier.piece_blocks = 2
        tokens = tokens_of(90)
        reader = await exported(prefill, 1, tokens)
        assert len(reader.readable) == 23
        loader = await loading(decode, 2, tokens)
        copied(prefill, reader.readable, decode, loader.started[2].blocks)
        prefill.port.release(1)
        decode.port.prefilled(2, FirstToken(0))
        decode.serve()
        assert decode.outputs[2].token_ids == prefill.outputs[1].token_ids

    run(connector, scenario)


def test_what_was_preempted_after_its_load_is_computed(connector: ModuleType) -> None:
    """Its slots may be somebody else's by then."""

    async def scenario(prefill: Stand, decode: Stand) -> None:
        request: Any = Request("r", tokens_of(40))
        request.kv_transfer_params = LoadParams(0, 40, list(range(10))).request_params()
        assert decode.scheduler.get_num_new_matched_tokens(request, 0) == (40, True)
        request.num_preemptions = 1
        assert decode.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)

    run(connector, scenario)


def test_a_block_can_be_read_when_every_rank_has_copied_its_part(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        reader = Outsider()
        prefill.port.read(1, reader)
        prefill.submit([request_of(1, tokens_of(40), 0)])
        assert prefill.staging.on_news is not None
        prefill.staging.on_news(Exported(0, 1, 5))
        assert reader.exported == []
        prefill.staging.on_news(Exported(1, 1, 2))
        assert [(one.first_block, len(one.blocks)) for one in reader.exported] == [(0, 2)]
        prefill.serve()
        await eventually(lambda: 1 in prefill.outputs, "the first token comes")
        prefill.port.release(1)

    run(connector, scenario, tp=2)


@pytest.mark.parametrize(("layout", "trouble"), [("b", "differently"), (None, "without")])
def test_ranks_that_differ_or_say_nothing_end_the_start(
    layout: str | None, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_REGISTER_S", 0.05 if layout is None else 20.0)

    async def start() -> None:
        made = Staging(1 << 16)
        client = StagingClient(StagingAddress.of(made.connector(os.getpid())["kv_connector_extra_config"]))
        try:
            client.tell(Registered(0, 2, "a", 64))
            if layout is not None:
                client.tell(Registered(1, 2, layout, 64))
            with pytest.raises(ModelError, match=trouble):
                await made.registered()
        finally:
            client.close()
            made.close()

    asyncio.run(start())


def test_a_prefix_that_was_evicted_meanwhile_is_computed_with_all_after_it(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        tokens = tokens_of(40)
        expected = alone(decode, tokens)
        decode.resident = 4
        loader = await loading(decode, 2, tokens)
        decode.port.prefilled(2, FirstToken(expected))
        decode.resident = 0
        decode.serve()
        assert decode.outputs[2].token_ids == [expected]
        assert loader.ended == {}

    run(connector, scenario)


def test_without_room_a_prompt_is_computed_here_and_nobodys_is_taken(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        tokens = tokens_of(40)
        expected = alone(decode, tokens)
        loader = await loading(decode, 2, tokens)
        assert loader.ended[2].reason == "late"
        decode.port.stopped(2)
        decode.serve()
        assert decode.outputs[2].token_ids == [expected]
        prefill.port.read(1, Outsider())
        prefill.submit([request_of(1, tokens, 0)])
        assert isinstance(prefill.errors[1], Overloaded)

    run(connector, scenario, num_slots=8)


def test_a_load_that_takes_too_long_ends_and_goes_on_with_what_came(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        tokens = tokens_of(40)
        expected = alone(decode, tokens)
        loader = await loading(decode, 2, tokens, timeout_s=0.01)
        await eventually(lambda: 2 in loader.ended, "its time is up")
        assert not decode.handed, "its slots may still be written to"
        decode.port.stopped(2)
        decode.serve()
        assert decode.outputs[2].token_ids == [expected]

    run(connector, scenario)


def test_what_vllm_does_not_get_after_all_gives_its_slots_back(connector: ModuleType) -> None:
    """A grammar is checked on a thread, after the request was handed over."""

    async def scenario(prefill: Stand, decode: Stand) -> None:
        await loading(decode, 2, tokens_of(40))
        decode.port.prefilled(2, FirstToken(0))
        assert (len(decode.handed), decode.staging.num_free) == (1, NUM_SLOTS - 10)
        decode.port.unsent(2)
        assert (decode.port.loading, decode.staging.num_free) == (False, NUM_SLOTS)
        prefill.submit([request_of(1, tokens_of(40), 0)])
        assert prefill.staging.num_free == NUM_SLOTS - 10
        prefill.port.unsent(1)
        assert prefill.staging.num_free == NUM_SLOTS

    run(connector, scenario)


def test_an_aborted_load_keeps_its_slots_until_its_loader_stops(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        loader = await loading(decode, 2, tokens_of(40))
        decode.abort([2])
        await eventually(lambda: 2 in loader.ended, "it is told to stop")
        assert decode.staging.num_free == NUM_SLOTS - 10
        decode.port.stopped(2)
        assert not decode.handed

    run(connector, scenario)


def test_an_aborted_request_that_vllm_has_gives_its_slots_back(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        loader = await loading(decode, 2, tokens_of(40))
        decode.port.prefilled(2, FirstToken(0))
        decode.abort([2])
        assert (decode.port.loading, decode.staging.num_free) == (False, NUM_SLOTS)
        decode.serve()
        assert (loader.ended, decode.outputs) == ({}, {})

    run(connector, scenario)


def test_an_aborted_export_keeps_its_slots_until_vllm_writes_no_more(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        prefill.port.read(1, Outsider())
        prefill.submit([request_of(1, tokens_of(40), 0)])
        prefill.port.release(1)
        await asyncio.sleep(0.02)
        assert 1 not in prefill.open
        assert prefill.staging.num_free == NUM_SLOTS - 10
        prefill.serve()

    run(connector, scenario)


def test_slots_are_free_when_a_readers_time_is_up(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        prefill.port.read(1, Outsider())
        prefill.submit([request_of(1, tokens_of(40), 0, hold_s=0.05)])
        assert prefill.staging.num_free == NUM_SLOTS - 10
        prefill.serve()
        await eventually(lambda: prefill.staging.num_free == NUM_SLOTS, "nobody has to say so")

    run(connector, scenario)


def test_after_a_block_that_was_not_copied_none_is_told_of(connector: ModuleType) -> None:
    """What lies in its slot is somebody else's."""

    async def scenario(prefill: Stand, decode: Stand) -> None:
        copier = prefill.workers[0]._worker._copier
        gather, waits = copier.gather, [failing]

        def gather_once_in_vain(block_ids: list[int]) -> Any:
            buffer, wait = gather(block_ids)
            return buffer, waits.pop() if waits else wait

        copier.gather = gather_once_in_vain
        reader = Outsider()
        prefill.port.read(1, reader)
        prefill.submit([request_of(1, tokens_of(40), 0, hold_s=0.1)])
        prefill.serve()
        await eventually(lambda: 1 in prefill.errors, "its reader's time is up")
        assert (waits, reader.exported) == ([], [])
        assert not prefill.workers[0]._worker._broken
        assert len((await exported(prefill, 2, tokens_of(40))).readable) == 10
        prefill.port.release(2)

    def failing() -> None:
        raise RuntimeError("the device is gone")

    run(connector, scenario)


def test_readers_hear_that_their_prompts_are_in_line_as_long_as_steps_go_on(connector: ModuleType) -> None:
    async def scenario(prefill: Stand, decode: Stand) -> None:
        first, second = Outsider(), Outsider()
        for stream, reader in ((1, first), (2, second)):
            prefill.port.read(stream, reader)
            prefill.submit([request_of(stream, tokens_of(20 + stream), 0)])
        prefill.totals.steps += 1
        prefill.port._tell_waiting()
        assert [(one.num_ahead, one.tokens_ahead) for one in first.waits + second.waits] == [(0, 21), (1, 43)]
        prefill.port._tell_waiting()
        assert len(first.waits) == 1
        prefill.serve()
        await eventually(lambda: {1, 2} <= set(prefill.outputs), "both end")
        prefill.port.release(1)
        prefill.port.release(2)

    run(connector, scenario)
