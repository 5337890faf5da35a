"""Slots of vLLM's hand-off between tensor-parallel sizes: what one size writes another reads, on plain tensors.

Compared with slices of the whole model's KV, which are cut in another way than the code under test does."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engines.vllm.staging import Staging
from headwater.kv.connectors.vllm_handoff_worker import HandoffWorker, SlotExport, SlotLoad
from headwater.kv.connectors.vllm_layout import Layout
from headwater.kv.connectors.vllm_staging import Exported, StagingAddress
from headwater.runtime.conformance import eventually
from vllm_connector_double import LAYERS, FullAttentionSpec, cache_config, config

TOKENS, HEAD_SIZE, NUM_BLOCKS, NUM_SLOTS = 15, 5, 9, 8
"""No number that a rank may have of heads."""
SIZES = (1, 2, 4, 8)
Spoil = Callable[[Any, FullAttentionSpec], None]


@dataclass(frozen=True)
class Model:
    heads: int
    kernel_blocks: int = 1
    heads_first: bool = True
    """Where they lie in memory; shown they are always first."""
    dtype: torch.dtype = torch.float32

    def kv(self, seed: int) -> torch.Tensor:
        """[layers, kernel blocks, heads, tokens, content]"""
        rows = LAYERS * NUM_BLOCKS * self.kernel_blocks * self.heads * (TOKENS // self.kernel_blocks)
        source = torch.Generator().manual_seed(seed)
        size = (rows, 2 * HEAD_SIZE * self.dtype.itemsize)
        content = torch.randint(0, 256, size, generator=source, dtype=torch.uint8).view(self.dtype)
        return content.view(LAYERS, NUM_BLOCKS * self.kernel_blocks, self.heads, -1, 2 * HEAD_SIZE)

    def of_rank(self, kv: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        held = [head for head in range(self.heads) if rank in self._ranks(head, size)]
        own = kv[:, :, held]
        return own if self.heads_first else own.transpose(2, 3).contiguous().transpose(2, 3)

    def _ranks(self, head: int, size: int) -> list[int]:
        """That hold it. By dealing out all places: of a head as many as there are copies, of a rank as many as fit."""
        copies = max(1, size // self.heads)
        places = [one for one in range(self.heads) for _ in range(copies)]
        each = len(places) // size
        return [rank for rank in range(size) if head in places[rank * each : (rank + 1) * each]]

    def block(self, kv: torch.Tensor, number: int) -> bytes:
        """Of the whole model, as one rank alone has it."""
        pieces = kv[:, number * self.kernel_blocks : (number + 1) * self.kernel_blocks]
        return raw(pieces)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Group:
    """The ranks of one vLLM, each with its KV, over the slots of one worker of ours."""

    def __init__(self, model: Model, size: int, kv: torch.Tensor, spoil: Spoil | None) -> None:
        self.kv = [model.of_rank(kv, rank, size) for rank in range(size)]
        self.staging = Staging(NUM_SLOTS * len(model.block(kv, 0)) * max(1, size // model.heads))
        extra = self.staging.connector(os.getpid())["kv_connector_extra_config"]
        self.workers = []
        for rank, own in enumerate(self.kv):
            spec = FullAttentionSpec(TOKENS, own.shape[2], HEAD_SIZE, model.dtype)
            given = config("", "m", tp=size, rank=rank, heads=model.heads)
            if spoil is not None:
                spoil(given, spec)
            cache = cache_config(NUM_BLOCKS, spec=spec)
            worker = HandoffWorker(given, cache, Layout.of(given, cache, ""), StagingAddress.of(extra))
            self.workers.append(worker)

    async def register(self) -> None:
        for worker, own in zip(self.workers, self.kv, strict=True):
            layers = {f"layer.{number}": own[number] for number in range(LAYERS)}
            await asyncio.to_thread(worker.register, layers)  # the loop is to read what they say
        await self.staging.registered()

    async def export(self, blocks: list[int], slots: list[int]) -> list[bytes]:
        """What the slots hold once every rank has said that it has written."""
        told: list[Exported] = []
        self.staging.on_news = lambda news: told.append(news) if isinstance(news, Exported) else None
        for worker in self.workers:
            worker.export([SlotExport(1, blocks, slots, len(slots))])
        await eventually(lambda: len(told) == len(self.workers), "all ranks have")
        assert {(news.rank, news.num_blocks) for news in told} == {(r, len(slots)) for r in range(len(self.workers))}
        size = self.staging.slot_bytes
        return [bytes(self.staging.buffer.view[at * size : (at + 1) * size]) for at in slots]

    def load(self, contents: list[bytes], slots: list[int], blocks: list[int]) -> None:
        size = self.staging.slot_bytes
        for at, content in zip(slots, contents, strict=True):
            self.staging.buffer.view[at * size : (at + 1) * size] = content
        for worker in self.workers:
            worker.start_loads([SlotLoad("r", slots, blocks)])
            assert worker.advance() == {"r"}

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers.clear()
        self.staging.close()


@contextlib.asynccontextmanager
async def group(model: Model, size: int, kv: torch.Tensor, spoil: Spoil | None = None) -> AsyncIterator[Group]:
    made = Group(model, size, kv, spoil)
    try:
        await made.register()
        yield made
    finally:
        made.close()


async def pass_on(model: Model, sizes: list[int], blocks: list[list[int]], slots: list[list[int]]) -> None:
    """From group to group, each with KV of its own before; `blocks` and `slots` of each."""
    whole = model.kv(0)
    moved = [model.block(whole, number) for number in blocks[0]]
    layouts = set()
    contents: list[bytes] = []
    for step, size in enumerate(sizes):
        wanted = model.kv(step)
        async with group(model, size, wanted) as here:
            layouts.add((here.staging.layout, here.staging.slot_bytes))
            if step:
                here.load(contents, slots[step], blocks[step])
                for number, source in zip(blocks[step], blocks[0], strict=True):
                    at, of = number * model.kernel_blocks, source * model.kernel_blocks
                    wanted[:, at : at + model.kernel_blocks] = whole[:, of : of + model.kernel_blocks]
                for rank, own in enumerate(here.kv):
                    assert raw(own) == raw(model.of_rank(wanted, rank, size)), f"rank {rank} of {size}"
            contents = await here.export(blocks[step], slots[step])
            assert contents == moved, f"slots mean the same at size {size}"
    assert len(layouts) == 1


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [(2, [1, 2, 1]), (8, [1, 2, 1]), (2, [2, 4, 2]), (1, [1, 2, 8]), (4, [8, 1, 4]), (3, [1, 3, 6]), (6, [2, 3, 12])],
)
def test_what_one_size_writes_another_reads(heads: int, sizes: list[int]) -> None:
    asyncio.run(pass_on(Model(heads), sizes, [[4, 0, 8], [1, 3, 2], [0, 5, 7]], [[7, 2, 3], [0, 1, 6], [5, 4, 0]]))


models = st.builds(
    Model,
    heads=st.sampled_from(SIZES),
    kernel_blocks=st.sampled_from([1, 3, 5]),
    heads_first=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)
numbers = st.lists(st.integers(0, NUM_SLOTS - 1), min_size=3, max_size=3, unique=True)


@settings(max_examples=40, deadline=None)
@given(
    model=models,
    sizes=st.lists(st.sampled_from(SIZES), min_size=2, max_size=3),
    blocks=st.lists(numbers, min_size=3, max_size=3),
    slots=st.lists(numbers, min_size=3, max_size=3),
)
def test_any_model_passes_between_any_sizes(
    model: Model, sizes: list[int], blocks: list[list[int]], slots: list[list[int]]
) -> None:
    asyncio.run(pass_on(model, sizes, blocks, slots))


def test_of_ranks_with_the_same_head_the_first_writes_it() -> None:
    async def whole() -> None:
        model = Model(heads=2)
        kv = model.kv(1)
        async with group(model, 4, kv) as here:
            for rank in (1, 3):
                here.kv[rank].zero_()
            assert await here.export([3], [0]) == [model.block(kv, 3)]

    asyncio.run(whole())


def test_models_with_other_heads_or_kernel_blocks_have_other_layouts() -> None:
    """One head at each rank of all."""

    async def layout(model: Model) -> str:
        async with group(model, 4, model.kv(1)) as here:
            return here.staging.layout

    unlike = Model(2), Model(4), Model(2, kernel_blocks=3), Model(2, kernel_blocks=5)
    assert len({asyncio.run(layout(model)) for model in unlike}) == 4


def of_spec(**values: Any) -> Spoil:
    def spoil(_: Any, spec: FullAttentionSpec) -> None:
        for name, value in values.items():
            setattr(spec, name, value)

    return spoil


def of_model(**values: Any) -> Spoil:
    return lambda given, _: vars(given.model_config).update(values)


class MLAAttentionSpec(FullAttentionSpec):
    pass


def as_mla(_: Any, spec: FullAttentionSpec) -> None:
    spec.__class__ = MLAAttentionSpec


def with_a_draft(given: Any, _: FullAttentionSpec) -> None:
    given.speculative_config = SimpleNamespace()


SPOILS: dict[str, Spoil] = {
    "a MLAAttentionSpec": as_mla,
    "num_head_slots 2": of_spec(num_head_slots=2),
    "state_content_bytes 40": of_spec(state_content_bytes=40),
    "page_size_padded 4096": of_spec(page_size_padded=4096),
    "tokens_per_state 2": of_spec(tokens_per_state=2),
    "quantized by NVFP4": of_spec(kv_quant_mode=SimpleNamespace(name="NVFP4")),
    "MLA has no": of_model(use_mla=True),
    "draft model": with_a_draft,
    "different numbers of heads": of_model(
        model_arch_config=SimpleNamespace(per_layer_overrides=[{}, {"total_num_kv_heads": 1}])
    ),
    "by the model it has 4 heads": of_model(get_total_num_kv_heads=lambda: 8),
    "cannot be divided": of_model(get_total_num_kv_heads=lambda: 3),
}


@pytest.mark.parametrize("trouble", SPOILS)
def test_where_heads_are_not_certain_only_equal_sizes_exchange(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    async def whole() -> set[str]:
        model, layouts = Model(heads=4), set()
        for size in (1, 2):
            kv = model.kv(size)
            caplog.clear()
            async with group(model, size, kv, SPOILS[trouble]) as here:
                layouts.add(here.staging.layout)
                assert here.staging.layout.endswith(f".tp{size}")
                parts = [raw(model.of_rank(kv, rank, size)[:, 3:4]) for rank in range(size)]
                contents = await here.export([3], [5])
                assert contents == [b"".join(parts)]
                here.load(contents, [2], [6])
                for rank, own in enumerate(here.kv):
                    assert raw(own[:, 6:7]) == parts[rank]
        assert trouble in caplog.text
        return layouts

    assert len(asyncio.run(whole())) == 2


@pytest.mark.parametrize(
    ("trouble", "shape"),
    [
        ("two axes may be", (9, 15, 15, 10)),
        ("two axes may be", (9, 10, 15, 10)),
        ("has the shape", (9, 15, 4, 10)),
        ("has the shape", (9, 4, 15, 2, 5)),
        ("has the shape", (9, 60, 10)),
    ],
)
def test_shapes_that_may_mean_something_else_are_not_cut(
    trouble: str, shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Heads that are as many as tokens, heads behind the tokens, keys and values apart."""
    heads = shape[1] if trouble == "two axes may be" else 4

    async def whole() -> None:
        staging = Staging(1 << 20)
        extra = staging.connector(os.getpid())["kv_connector_extra_config"]
        given = config("", "m", heads=heads)
        cache = cache_config(NUM_BLOCKS, spec=FullAttentionSpec(TOKENS, heads, HEAD_SIZE))
        worker = HandoffWorker(given, cache, Layout.of(given, cache, ""), StagingAddress.of(extra))
        try:
            worker.register({f"layer.{number}": torch.zeros(shape) for number in range(LAYERS)})
            await staging.registered()
            assert staging.layout.endswith(".tp1")
        finally:
            worker.close()
            staging.close()

    with caplog.at_level("INFO"):
        asyncio.run(whole())
    assert trouble in caplog.text
