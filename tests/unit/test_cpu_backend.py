"""The CPU backend against a plain float64 decoder, and its bit-for-bit invariances."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_reference import RandomCheckpoint, flat_batch, reference_logits, small

from headwater.engines.native.base import FlatBatch, NativeModelConfig
from headwater.engines.native.cpu.backend import CpuBackend, CpuOptions
from headwater.engines.native.cpu.binding import Kernels
from headwater.engines.native.cpu.library import load_library
from headwater.errors import ConfigError, InternalError, ModelError
from headwater.weights.cache import default_cache_folder

MODELS = {
    "llama": {},
    "phi-head-80": {"head_dim": 80, "num_heads": 6, "num_kv_heads": 2},
    "qwen2-odd-sizes": {
        "attention_bias": True,
        "num_heads": 7,
        "num_kv_heads": 1,
        "head_dim": 8,
        "hidden_size": 56,
        "intermediate_size": 100,
    },
    "qwen3": {"qk_norm": True, "tie_word_embeddings": False, "vocab_size": 301, "head_dim": 96, "num_kv_heads": 4},
    "mistral-window": {"sliding_window": 20, "head_dim": 128, "num_heads": 2, "num_kv_heads": 1},
    "mixed-window": {"sliding_window": 33, "sliding_layers": (True, False)},
    "all-biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "many-queries-per-head": {"num_heads": 26, "num_kv_heads": 1, "head_dim": 16},
}
ISAS = ("avx512", "avx2", "portable")


def supported_isas() -> list[str]:
    library = load_library(Path(__file__).parent, default_cache_folder())
    Kernels(library).close()
    return [isa for isa in ISAS if Kernels.supported(library, isa)]


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def open_backend(tmp_path: Path) -> Any:
    opened = []

    def open_one(
        config: NativeModelConfig | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> CpuBackend:
        checkpoint = RandomCheckpoint(config or small(), dtype)
        backend = CpuBackend(checkpoint, CpuOptions(weights_cache=tmp_path, **options))
        backend.allocate_kv(64, 16)
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        backend.close()


def logits(backend: CpuBackend, batch: FlatBatch) -> torch.Tensor:
    return backend.forward(batch).clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_the_reference(open_backend: Any, model: str, dtype: torch.dtype) -> None:
    config, ids = small(**MODELS[model]), tokens(150)
    expected = reference_logits(RandomCheckpoint(config, dtype), ids)
    for isa in supported_isas():
        backend = open_backend(config, dtype, isa=isa)
        torch.testing.assert_close(
            logits(backend, flat_batch([(ids, 0)], [range(10)])).double(), expected, atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("model", MODELS)
def test_bits_do_not_depend_on_chunking_batch_placement_or_threads(open_backend: Any, model: str) -> None:
    config, ids = small(**MODELS[model]), tokens(150)
    backend = open_backend(config)
    alone = logits(backend, flat_batch([(ids, 0)], [range(10)]))
    for threads in (1, 2, 3):
        other = open_backend(config, threads=threads)
        neighbours = [(tokens(count, seed=count), 0) for count in (1, 40, 9)]
        table = [63, 11, 62, 12, 61, 13, 60, 14, 59, 15]
        begin, parts = 0, []
        for count in (1, 17, 1, 33, 64, 5, 29):
            batch = flat_batch(
                [*neighbours[:2], (ids[begin : begin + count], begin), neighbours[2]], [[20], [21, 22, 23], table, [24]]
            )
            parts.append(logits(other, batch)[41 : 41 + count])
            begin += count
        assert begin == len(ids)
        assert torch.equal(torch.cat(parts), alone)


def test_all_variants_with_fused_multiply_add_give_the_same_bits(open_backend: Any) -> None:
    isas = [isa for isa in supported_isas() if isa != "portable"]
    if len(isas) < 2:
        pytest.skip("this machine runs one vector variant only")
    ids = tokens(150)
    first, second = (logits(open_backend(isa=isa), flat_batch([(ids, 0)], [range(10)])) for isa in isas)
    assert torch.equal(first, second)


def test_more_rows_than_one_row_block(open_backend: Any) -> None:
    config, ids = small(num_layers=1), tokens(400)
    backend = open_backend(config)
    expected = reference_logits(RandomCheckpoint(config, torch.bfloat16), ids)
    found = logits(backend, flat_batch([(ids, 0)], [range(25)]))
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
    last = logits(backend, flat_batch([(ids, 0)], [range(25)], rows=[399, 7]))
    assert torch.equal(last, found[[399, 7]])
    assert logits(backend, flat_batch([(ids, 0)], [range(25)], rows=[])).shape == (0, config.vocab_size)


def test_garbage_in_reused_blocks_never_reaches_a_result(open_backend: Any) -> None:
    backend, ids = open_backend(), tokens(37)
    clean = logits(backend, flat_batch([(ids, 0)], [range(3)]))
    for block in range(backend.num_blocks):
        np.frombuffer(backend.block_view(block), np.float32)[:] = np.nan
    assert torch.equal(logits(backend, flat_batch([(ids, 0)], [[9, 4, 30]])), clean)


def test_a_copied_block_serves_as_prefix(open_backend: Any) -> None:
    source, target, ids = open_backend(), open_backend(), tokens(40)
    whole = logits(source, flat_batch([(ids, 0)], [[5, 6, 7]]))
    for block, copy in ((5, 50), (6, 3)):
        target.block_view(copy)[:] = source.block_view(block)
    assert torch.equal(logits(target, flat_batch([(ids[32:], 32)], [[50, 3, 8]])), whole[32:])


def test_wrong_batches_are_refused(open_backend: Any) -> None:
    backend, ids = open_backend(), tokens(20)
    good = flat_batch([(ids, 0)], [[1, 2]])
    breakages = {
        "token_ids": good.token_ids + 250,
        "positions": good.positions + 1,
        "query_starts": np.array([0, 19], np.int32),
        "context_lens": np.array([21], np.int32),
        "block_tables": np.array([[1, 64]], np.int32),
        "logit_rows": np.array([20], np.int32),
    }
    for field, value in breakages.items():
        batch = flat_batch([(ids, 0)], [[1, 2]])
        setattr(batch, field, value)
        with pytest.raises(InternalError, match="malformed batch"):
            backend.forward(batch)
    with pytest.raises(InternalError, match="longer than 16"):
        backend.forward(flat_batch([(ids, 0)], [[1]]))
    with pytest.raises(InternalError, match="block 64 of 64"):
        backend.block_view(64)


def test_limits_are_named(open_backend: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="head dimension 520"):
        open_backend(small(head_dim=520))
    with pytest.raises(ConfigError, match="cannot run 1 kernel threads with instruction set 'sse9'"):
        open_backend(isa="sse9")
    backend = CpuBackend(RandomCheckpoint(small()), CpuOptions(weights_cache=tmp_path))
    with pytest.raises(ConfigError, match="multiple of 16"):
        backend.allocate_kv(4, 8)
    backend.close()
    backend.close()
