"""Single kernels against torch, over many shapes, on every instruction set this machine has."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_reference import attention
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engines.native.base import QuantisedTensor
from headwater.engines.native.cpu import binding
from headwater.engines.native.cpu.binding import HwAttention, HwBatch, HwLayer, HwMatrix, HwModel, Kernels
from headwater.engines.native.cpu.library import load_library
from headwater.engines.native.cpu.panels import PanelKind, pack, pack_quantised, padded, panel_bytes
from headwater.weights.cache import default_cache_folder

ISAS = ("avx512", "avx2", "portable")
DTYPES = {PanelKind.BF16: torch.bfloat16, PanelKind.F16: torch.float16, PanelKind.F32: torch.float32}
CASES = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module", params=ISAS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    library = load_library(Path(binding.__file__).parent, default_cache_folder())
    Kernels(library).close()
    if not Kernels.supported(library, request.param):
        pytest.skip(f"this machine has no {request.param}")
    opened = Kernels(library, threads=2, isa=request.param)
    yield opened
    opened.close()


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(
    kernels: Kernels,
    x: torch.Tensor,
    weight: torch.Tensor | QuantisedTensor,
    bias: torch.Tensor | None,
    kind: PanelKind,
) -> torch.Tensor:
    rows = len(x)
    if isinstance(weight, QuantisedTensor):
        (outputs, inputs), panels = weight.codes.shape, pack_quantised(weight, kind)
    else:
        (outputs, inputs), panels = weight.shape, pack(weight, kind)
    assert panels.nbytes == panel_bytes(kind, outputs, inputs)
    padded_x = torch.zeros(rows, padded(inputs) + 16)
    padded_x[:, :inputs] = x
    padded_bias = torch.zeros(padded(outputs))
    if bias is not None:
        padded_bias[:outputs] = bias
    out = torch.full((rows, padded(outputs) + 16), torch.nan)
    matrix = HwMatrix(
        kind=int(kind),
        n=padded(outputs),
        k=padded(inputs),
        data=panels.ctypes.data,
        bias=None if bias is None else padded_bias.data_ptr(),
    )
    kernels.linear(matrix, (padded_x.data_ptr(), padded_x.shape[1]), rows, (out.data_ptr(), out.shape[1]))
    assert bool(out[:, padded(outputs) :].isnan().all()), "wrote beyond the last panel"
    return out[:, :outputs]


@CASES
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 300])),
    outputs=st.integers(1, 200),
    inputs=st.one_of(st.integers(1, 200), st.sampled_from([2047, 2048, 2064, 4100])),
    kind=st.sampled_from([PanelKind.BF16, PanelKind.F16, PanelKind.F32]),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_linear(
    kernels: Kernels, rows: int, outputs: int, inputs: int, kind: PanelKind, biased: bool, seed: int
) -> None:
    x, weight = random(rows, inputs, seed=seed), random(outputs, inputs, seed=seed + 1).to(DTYPES[kind])
    bias = random(outputs, seed=seed + 2) if biased else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = linear(kernels, x, weight, bias, kind)
    torch.testing.assert_close(found.double(), expected, atol=2e-6 * inputs**0.5 * 4, rtol=1e-5)
    some = sorted({0, rows // 2, rows - 1})
    assert torch.equal(linear(kernels, x[some], weight, bias, kind), found[some]), "a row depends on its neighbours"


@pytest.mark.parametrize("kind", [PanelKind.BF16, PanelKind.F16])
def test_every_sixteen_bit_value_is_widened_exactly(kernels: Kernels, kind: PanelKind) -> None:
    """Subnormal ones too; a row with a single one picks one weight of each output."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(DTYPES[kind])
    weight = torch.where(every.isfinite(), every, 0).view(-1, 16)
    found = linear(kernels, torch.eye(16), weight, None, kind)
    assert torch.equal(found, weight.float().T)


def quantised(outputs: int, inputs: int, kind: PanelKind, seed: int) -> tuple[QuantisedTensor, torch.Tensor]:
    """Random codes, and the float32 values they stand for."""
    rng, bits, group = np.random.default_rng(seed), 4 if kind is PanelKind.Q4 else 8, kind.group or 0
    codes = rng.integers(0, 1 << bits, (outputs, inputs), dtype=np.uint8)
    scale, offset = rng.standard_normal((2, outputs, inputs // group)).astype(np.float16).astype(np.float32)
    wide_scale, wide_offset = (np.repeat(part, group, axis=1) for part in (scale, offset))
    values = torch.from_numpy(wide_scale * codes.astype(np.float32) + wide_offset)
    return QuantisedTensor(codes, scale, offset, group, bits), values


@CASES
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([72, 256, 257])),
    outputs=st.integers(1, 200),
    groups=st.one_of(st.integers(1, 9), st.sampled_from([64, 65, 129])),
    kind=st.sampled_from([PanelKind.Q4, PanelKind.Q8, PanelKind.Q8_16]),
    seed=st.integers(0, 1000),
)
def test_quantised_weights_give_the_bits_of_their_values(
    kernels: Kernels, rows: int, outputs: int, groups: int, kind: PanelKind, seed: int
) -> None:
    inputs = groups * (kind.group or 0)
    weight, values = quantised(outputs, inputs, kind, seed)
    x = random(rows, inputs, seed=seed)
    expected = linear(kernels, x, values, None, PanelKind.F32)
    assert torch.equal(linear(kernels, x, weight, None, kind), expected)


class PagedCase:
    """Random queries, keys and values of several sequences, and their paged storage."""

    def __init__(self, shape: tuple[int, int, int], lengths: list[tuple[int, int]], block_size: int, seed: int) -> None:
        self.kv_heads, self.group, self.head_dim = shape
        self.lengths, self.block_size = lengths, block_size
        heads = self.kv_heads * self.group
        self.q = [random(heads, total, self.head_dim, seed=seed + n) for n, (total, _) in enumerate(lengths)]
        self.k, self.v = (
            [random(self.kv_heads, total, self.head_dim, seed=seed + n) for n, (total, _) in enumerate(lengths, start)]
            for start in (100, 200)
        )
        self.generator = np.random.default_rng(seed)

    def store(self) -> tuple[torch.Tensor, np.ndarray]:
        """Blocks in random places, everything unused not a number."""
        needed = [-(-total // self.block_size) for total, _ in self.lengths]
        places = self.generator.permutation(sum(needed) + 3)
        tables = np.zeros((len(needed), max(needed)), np.int32)
        dims = padded(self.head_dim)
        keys = torch.full((len(places), self.kv_heads, self.block_size // 16, self.head_dim, 16), torch.nan)
        values = torch.full((len(places), self.kv_heads, dims // 16, self.block_size, 16), torch.nan)
        used = 0
        for n, count in enumerate(needed):
            tables[n, :count] = places[used : used + count]
            used += count
            for position in range(self.lengths[n][0]):
                block, slot = tables[n, position // self.block_size], position % self.block_size
                keys[block, :, slot // 16, :, slot % 16] = self.k[n][:, position]
                wide = torch.zeros(self.kv_heads, dims)
                wide[:, : self.head_dim] = self.v[n][:, position]
                values[block, :, :, slot] = wide.view(self.kv_heads, -1, 16)
        both = torch.cat([keys.flatten(2), values.flatten(2)], dim=2)
        return both.flatten(1).contiguous(), tables

    def run(self, kernels: Kernels, window: int) -> list[torch.Tensor]:
        """Attention of the last rows of each sequence, all in one call."""
        kv, tables = self.store()
        heads, counts = self.kv_heads * self.group, [count for _, count in self.lengths]
        query = torch.cat([q[:, -count:].transpose(0, 1).flatten(1) for q, count in zip(self.q, counts, strict=True)])
        out = torch.full_like(query, torch.nan)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        lens = np.array([total for total, _ in self.lengths], np.int32)
        positions = np.concatenate([np.arange(t - c, t) for t, c in self.lengths]).astype(np.int32)
        model = HwModel(
            num_heads=heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            softmax_scale=self.head_dim**-0.5,
        )
        batch = HwBatch(
            num_tokens=len(query),
            num_seqs=len(counts),
            positions=positions.ctypes.data,
            query_starts=starts.ctypes.data,
            context_lens=lens.ctypes.data,
            block_tables=tables.ctypes.data,
            table_stride=tables.shape[1],
            kv=kv.data_ptr(),
            block_size=self.block_size,
            block_floats=kv.shape[1],
        )
        call = HwAttention(
            query=query.data_ptr(), out=out.data_ptr(), query_stride=query.shape[1], layer=0, window=window
        )
        kernels.attend(model, batch, call)
        return [part.view(-1, heads, self.head_dim).transpose(0, 1) for part in out.split(counts)]


sequences = st.lists(
    st.tuples(st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 256, 300])), st.integers(1, 30)),
    min_size=1,
    max_size=4,
).map(lambda pairs: [(total, min(total, count)) for total, count in pairs])


@CASES
@given(
    shape=st.tuples(
        st.integers(1, 3), st.sampled_from([1, 2, 3, 5, 7, 8, 14]), st.sampled_from([16, 24, 64, 80, 96, 128])
    ),
    lengths=sequences,
    block_size=st.sampled_from([16, 32, 64]),
    window=st.sampled_from([0, 0, 1, 15, 40, 200]),
    seed=st.integers(0, 1000),
)
def test_attention(
    kernels: Kernels,
    shape: tuple[int, int, int],
    lengths: list[tuple[int, int]],
    block_size: int,
    window: int,
    seed: int,
) -> None:
    case = PagedCase(shape, lengths, block_size, seed)
    found = case.run(kernels, window)
    for n, (_, count) in enumerate(lengths):
        expected = attention(case.q[n].double(), case.k[n].double(), case.v[n].double(), window or None)[:, -count:]
        torch.testing.assert_close(found[n].double(), expected, atol=3e-6, rtol=1e-5)
    other_places = case.run(kernels, window)
    assert all(torch.equal(one, other) for one, other in zip(found, other_places, strict=True))


def test_scores_far_apart_neither_overflow_nor_vanish(kernels: Kernels) -> None:
    case = PagedCase((1, 1, 64), [(300, 300)], 16, seed=7)
    case.q = [q * 60 for q in case.q]
    (found,) = case.run(kernels, 0)
    expected = attention(*(part[0].double() for part in (case.q, case.k, case.v)), None)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("struct", [HwMatrix, HwLayer, HwModel, HwBatch, HwAttention])
def test_structs_have_the_size_of_the_kernels_own(struct: type[ctypes.Structure]) -> None:
    """A field added on one side alone would shift all that follow."""
    library = load_library(Path(binding.__file__).parent, default_cache_folder())
    library.hw_struct_bytes.restype = ctypes.c_int64
    assert library.hw_struct_bytes(struct.__name__.encode()) == ctypes.sizeof(struct)
