"""The Triton kernels in Triton's interpreter, and captured decode without a GPU, against gathered attention."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed")

from headwater.engines.native.base import FlatBatch, NativeModelConfig, RopeConfig
from headwater.engines.native.checkpoints import open_checkpoint
from headwater.engines.native.torch_backend import TorchBackend, TorchOptions
from headwater.engines.native.torch_backend.attention import GatherAttention
from headwater.engines.native.torch_backend.batch import device_batch
from headwater.engines.native.torch_backend.graphs import DecodeGraphs, batch_sizes
from headwater.engines.native.torch_backend.kv import KvStorage
from headwater.engines.native.torch_backend.triton_attention import TritonAttention
from model_fixtures import MAX_POSITIONS, Driver, Stream, TinyModel, random_ids

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE = 16


def config(heads: int, kv_heads: int, dim: int) -> NativeModelConfig:
    return NativeModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=heads * dim,
        intermediate_size=8,
        num_layers=3,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def flat(rows: list[int], contexts: list[int], num_blocks: int) -> FlatBatch:
    """A batch of sequences with so many rows and so long contexts, on blocks in a scattered order."""
    order = np.random.default_rng(5).permutation(num_blocks).astype(np.int32)
    width = max(-(-context // BLOCK_SIZE) for context in contexts)
    tables, used = np.zeros((len(rows), width), np.int32), 0
    for number, context in enumerate(contexts):
        count = -(-context // BLOCK_SIZE)
        tables[number, :count] = order[used : used + count]
        used += count
    starts = np.cumsum([0, *rows]).astype(np.int32)
    positions = [np.arange(context - count, context) for count, context in zip(rows, contexts, strict=True)]
    return FlatBatch(
        token_ids=np.zeros(starts[-1], np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_starts=starts,
        context_lens=np.array(contexts, np.int32),
        block_tables=tables,
        logit_rows=np.arange(starts[-1], dtype=np.int32),
        num_decode=sum(count == 1 for count in rows),
    )


def storage(model: NativeModelConfig, num_blocks: int, dtype: torch.dtype) -> KvStorage:
    kv = KvStorage(model, num_blocks, BLOCK_SIZE, dtype, DEVICE)
    generator = torch.Generator().manual_seed(1)
    for layer in range(model.num_layers):
        for side in kv.layer(layer):
            side.copy_(torch.randn(side.shape, generator=generator))
    return kv


def both(
    model: NativeModelConfig, batch: FlatBatch, window: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same attention by our kernels and by torch, on the middle layer of block-first storage."""
    kv = storage(model, 100, dtype)
    shape = (len(batch.token_ids), model.num_heads, model.head_dim)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    ours, theirs = TritonAttention(model, BLOCK_SIZE), GatherAttention(BLOCK_SIZE)
    ours.plan(batch, device_batch(batch, BLOCK_SIZE, DEVICE))
    theirs.plan(batch, device_batch(batch, BLOCK_SIZE, torch.device("cpu")))
    keys, values = kv.layer(1)
    expected = theirs.attend(query.cpu().float(), keys.cpu().float(), values.cpu().float(), window)
    return ours.attend(query, keys, values, window).cpu().float(), expected


HEADS = [(4, 4, 16), (9, 3, 64), (8, 2, 100), (7, 1, 32)]


@pytest.mark.parametrize("window", [0, 1, 20, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_prompts_and_decodes_together(heads: int, kv_heads: int, dim: int, window: int) -> None:
    batch = flat([1, 1, 37, 90, 5], [1, 70, 37, 150, 64], 100)
    got, expected = both(config(heads, kv_heads, dim), batch, window)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 33, 600])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64)])
def test_decode_over_several_stretches(heads: int, kv_heads: int, dim: int, window: int) -> None:
    batch = flat([1, 1, 1, 1], [1030, 3, 100, 128], 100)
    got, expected = both(config(heads, kv_heads, dim), batch, window)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_sixteen_bit_storage() -> None:
    batch = flat([1, 1, 40], [70, 3, 40], 100)
    got, expected = both(config(4, 2, 32), batch, 0, torch.float16)
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=0)


def test_a_decode_row_does_not_depend_on_its_neighbours() -> None:
    """Neither on the batch nor on the grid that a longer neighbour makes larger."""
    model = config(4, 2, 32)
    together, _ = both(model, flat([1, 1], [600, 700], 100), 0)
    kv, attention = storage(model, 100, torch.float32), TritonAttention(model, BLOCK_SIZE)
    alone = flat([1], [600], 100)
    query = torch.randn((2, 4, 32), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    attention.plan(alone, device_batch(alone, BLOCK_SIZE, DEVICE))
    assert torch.equal(attention.attend(query[:1], *kv.layer(1), 0).cpu(), together[:1])


def test_batch_sizes_are_sorted_and_end_at_the_largest() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert batch_sizes(300)[-3:] == [256, 288, 300]


class _Replayed:
    """Stands for a captured graph: replaying computes again from the same input tensors into the same output."""

    def __init__(self, graphs: Any, inputs: Any) -> None:
        self._graphs, self._inputs = graphs, inputs
        self.logits = torch.zeros(len(inputs.token_ids), graphs.vocab_size)

    def replay(self) -> None:
        self.logits.copy_(self._graphs.run(self._inputs))


class UncapturedGraphs(DecodeGraphs):
    """All of `DecodeGraphs` but the capture itself, which needs a GPU."""

    vocab_size = 300

    def _capture(self, size: int, pool: Any) -> tuple[Any, torch.Tensor]:
        graph = _Replayed(self, self.inputs(size))
        graph.pool = lambda: None  # type: ignore[attr-defined]
        return graph, graph.logits


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures for real")
def test_padded_decode_equals_the_plain_one(tiny_model: Any) -> None:
    """Three sequences run as four; the fourth row must write to no one's block."""
    model: TinyModel = tiny_model("mistral-sliding")
    checkpoint = open_checkpoint(model.resolved)
    plain, padded = (TorchBackend(checkpoint, MAX_POSITIONS, TorchOptions(linear="float32")) for _ in range(2))
    drivers = Driver(plain), Driver(padded)
    attention = TritonAttention(checkpoint.config, BLOCK_SIZE)
    options = TorchOptions(max_num_seqs=8)
    shape = (BLOCK_SIZE, MAX_POSITIONS // BLOCK_SIZE)
    graphs = UncapturedGraphs(padded._decoder, padded._kv, attention, shape, options)  # type: ignore[arg-type]
    prompts = [random_ids(length, 300, seed=length) for length in (16, 30, 5)]
    results = []
    for driver in drivers:
        streams = [Stream([]) for _ in prompts]
        for stream, ids in zip(streams, prompts, strict=True):
            driver.step([(stream, ids)])
        if driver is drivers[1]:
            padded._graphs = graphs
        results.append([torch.cat(driver.step([(s, [7 + n]) for s in streams])) for n in range(4)])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures for real")
def test_graphs_serve_only_plain_decodes(tiny_model: Any) -> None:
    checkpoint = open_checkpoint(tiny_model("llama").resolved)
    backend = TorchBackend(checkpoint, MAX_POSITIONS, TorchOptions(linear="float32"))
    backend.allocate_kv(64, BLOCK_SIZE)
    attention = TritonAttention(checkpoint.config, BLOCK_SIZE)
    shape = (BLOCK_SIZE, MAX_POSITIONS // BLOCK_SIZE)
    options = TorchOptions(max_num_seqs=2)
    graphs = UncapturedGraphs(backend._decoder, backend._kv, attention, shape, options)  # type: ignore[arg-type]
    decode = flat([1, 1], [5, 9], 64)
    assert graphs.serves(decode)
    assert not graphs.serves(flat([1, 1, 1], [5, 9, 2], 64)), "too many sequences"
    assert not graphs.serves(flat([1, 3], [5, 9], 64)), "a prompt"
    assert not graphs.serves(replace(decode, logit_rows=decode.logit_rows[:1])), "not all rows sample"
