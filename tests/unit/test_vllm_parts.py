"""What ranks of vLLM keep of blocks in the store, between tensor-parallel sizes, on plain tensors.

Compared with slices of the whole model's KV, which are cut in another way than the code under test does."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_vllm_handoff_sizes import HEAD_SIZE, NUM_BLOCKS, SIZES, SPOILS, TOKENS, Model, Spoil, models, raw

from headwater.errors import ConfigError
from headwater.kv.block import ROOT, Family
from headwater.kv.connectors.vllm_layout import Layout
from headwater.kv.connectors.vllm_parts import Parts, parts_of
from headwater.kv.connectors.vllm_worker import BlockCopier
from headwater.kv.identity import split_block_ids
from headwater.kv.node.store import Piece
from headwater.kv.shards import heads_of, part_ids
from kv_fixtures import chain
from vllm_connector_double import LAYERS, FullAttentionSpec, cache_config, config

IDS = b"".join(chain("prefix", 3))
Store = dict[tuple[Family, bytes], bytes]


class Rank:
    """Of a group of `size`, with KV of its own."""

    def __init__(self, model: Model, kv: torch.Tensor, rank: int, size: int, spoil: Spoil | None = None) -> None:
        self.kv = model.of_rank(kv, rank, size)
        spec = FullAttentionSpec(TOKENS, self.kv.shape[2], HEAD_SIZE, model.dtype)
        given = config("", "m", tp=size, rank=rank, heads=model.heads)
        if spoil is not None:
            spoil(given, spec)
        cache = cache_config(NUM_BLOCKS, spec=spec)
        layers = {f"layer.{number}": self.kv[number] for number in range(LAYERS)}
        layout = Layout.of(given, cache, "")
        self.told = parts_of(given, cache, layout, rank)
        self.parts = parts_of(given, cache, layout, rank, layers.values())
        self.copier = BlockCopier(layers, NUM_BLOCKS, len(self.parts.held))

    def save(self, blocks: list[int], store: Store) -> None:
        if not self.parts.writes:
            return
        buffer, wait = self.copier.gather(blocks)
        wait()
        for own, rows in self.parts.split(first(self.parts), buffer):
            for block_id, row in zip(split_block_ids(own.ids), rows, strict=True):
                assert (own.family, block_id) not in store, "one rank writes a part"
                store[own.family, block_id] = bytes(row)

    def load(self, blocks: list[int], store: Store) -> None:
        buffer = self.copier.staging(len(blocks))
        for own, rows in self.parts.split(first(self.parts), buffer):
            for block_id, row in zip(split_block_ids(own.ids), rows, strict=True):
                row[:] = store[own.family, block_id]
        self.copier.scatter(buffer, blocks)


def first(parts: Parts) -> Piece:
    return Piece(parts.family(""), IDS, 0, ROOT)


def pass_on(model: Model, sizes: list[int], blocks: list[list[int]]) -> None:
    """From group to group, each with KV of its own before and a store of its own behind; `blocks` of each."""
    whole = model.kv(0)
    store: Store = {}
    families = set()
    for step, size in enumerate(sizes):
        wanted = model.kv(step)
        ranks = [Rank(model, wanted, rank, size) for rank in range(size)]
        families |= {rank.parts.family("") for rank in ranks}
        if model.kernel_blocks == 1:
            families |= {rank.told.family("") for rank in ranks}
        if step:
            for number, source in zip(blocks[step], blocks[0], strict=True):
                at, of = number * model.kernel_blocks, source * model.kernel_blocks
                wanted[:, at : at + model.kernel_blocks] = whole[:, of : of + model.kernel_blocks]
            for number, rank in enumerate(ranks):
                rank.load(blocks[step], store)
                assert raw(rank.kv) == raw(model.of_rank(wanted, number, size)), f"rank {number} of {size}"
        store = {}
        for rank in ranks:
            rank.save(blocks[step], store)
        assert sorted(store.values()) == sorted(parts(model, whole, blocks[0])), f"stored at size {size}"
    assert len(families) == 1


def parts(model: Model, kv: torch.Tensor, blocks: list[int]) -> list[bytes]:
    """Of each block and head: all layers of that head, tokens in order."""
    by_block = kv.unflatten(1, (NUM_BLOCKS, model.kernel_blocks))
    return [raw(by_block[:, block, :, head]) for block in blocks for head in range(model.heads)]


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [(2, [1, 2, 1]), (8, [1, 2, 1]), (2, [2, 4, 2]), (1, [1, 2, 8]), (4, [8, 1, 4]), (3, [1, 3, 6]), (6, [2, 3, 12])],
)
def test_what_one_size_stores_another_loads(heads: int, sizes: list[int]) -> None:
    pass_on(Model(heads), sizes, [[4, 0, 8], [1, 3, 2], [0, 5, 7]])


numbers = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=3, max_size=3, unique=True)


@settings(max_examples=40, deadline=None)
@given(
    model=models,
    sizes=st.lists(st.sampled_from(SIZES), min_size=2, max_size=3),
    blocks=st.lists(numbers, min_size=3, max_size=3),
)
def test_any_model_passes_between_any_sizes(model: Model, sizes: list[int], blocks: list[list[int]]) -> None:
    pass_on(model, sizes, blocks)


@pytest.mark.parametrize("trouble", SPOILS)
def test_where_heads_are_not_certain_only_equal_sizes_find_what_is_stored(
    trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, families = Model(heads=4), set()
    with caplog.at_level(logging.INFO):
        for size in (1, 2):
            kv, store = model.kv(size), dict[tuple[Family, bytes], bytes]()
            ranks = [Rank(model, kv, rank, size, SPOILS[trouble]) for rank in range(size)]
            for rank in ranks:
                assert rank.told.family("") == rank.parts.family(""), "the scheduler expects the same"
                families.add(rank.parts.family(""))
                rank.save([3, 1, 5], store)
            assert len(store) == 3 * size
            for number, rank in enumerate(ranks):
                rank.kv.zero_()
                rank.load([3, 1, 5], store)
                assert raw(rank.kv[:, [3, 1, 5]]) == raw(model.of_rank(kv, number, size)[:, [3, 1, 5]])
    assert len(families) == 2
    assert trouble in caplog.text
    assert "the KV store serves --tensor-parallel-size 2 only" in caplog.text


def test_models_with_other_heads_or_kernel_blocks_share_nothing() -> None:
    """One head at each rank of all."""
    unlike = Model(2), Model(4), Model(2, kernel_blocks=3), Model(2, kernel_blocks=5)
    last = [Rank(model, model.kv(1), 3, 4).parts for model in unlike]
    ids = {parts.split(first(parts), torch.zeros(3, 8, dtype=torch.uint8))[0][0].ids for parts in last}
    assert len({parts.family("") for parts in last}) == len(ids) == 4


@pytest.mark.parametrize("shape", [(9, 15, 4, 10), (9, 4, 15, 2, 5), (9, 60, 10)])
def test_shapes_that_may_mean_something_else_are_kept_whole(shape: tuple[int, ...]) -> None:
    """Heads behind the tokens, keys and values apart."""
    given, cache = config("", "m", heads=4), cache_config(NUM_BLOCKS, spec=FullAttentionSpec(TOKENS, 4, HEAD_SIZE))
    layout = Layout.of(given, cache, "")
    found = parts_of(given, cache, layout, 0, [torch.zeros(shape)] * LAYERS)
    assert (found.part_bytes, found.held) == (layout.block_bytes, range(1))
    assert found.family("") != parts_of(given, cache, layout, 0).family("")


@pytest.mark.parametrize("heads", [TOKENS, 2 * HEAD_SIZE])
def test_the_scheduler_knows_by_itself_that_two_axes_are_as_long(heads: int) -> None:
    given, cache = config("", "m", heads=heads), cache_config(NUM_BLOCKS, spec=FullAttentionSpec(TOKENS, heads, 5))
    layout = Layout.of(given, cache, "")
    assert parts_of(given, cache, layout, 0).part_bytes == layout.block_bytes


def test_parts_have_ids_of_their_own() -> None:
    of_all = [split_block_ids(part_ids(IDS, layout, part)) for layout in ("a", "b") for part in range(1, 300)]
    assert part_ids(IDS, "a", 0) == IDS
    assert len({block_id for ids in [split_block_ids(IDS), *of_all] for block_id in ids}) == 3 * (1 + 2 * 299)
    assert part_ids(IDS[16:], "a", 7) == part_ids(IDS, "a", 7)[16:]


def test_parts_are_chained_to_their_own_beginnings() -> None:
    """Object tiers gather what follows from that."""
    parts = Rank(Model(heads=2), Model(heads=2).kv(1), 0, 1).parts
    whole = Piece(parts.family(""), IDS, 0, ROOT)
    for start in (0, 2):
        (first, _), (beside, _) = parts.split(whole.part(start, 3), torch.zeros(3 - start, 2 * parts.part_bytes))
        assert first == whole.part(start, 3)
        assert beside.parent == (part_ids(first.parent, parts.layout, 1) if start else ROOT)
        assert (beside.first, beside.ids) == (start, part_ids(first.ids, parts.layout, 1))


def test_what_cannot_be_divided_is_refused() -> None:
    for rank, size in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ConfigError, match="cannot be divided"):
            heads_of(rank, size, 8)
