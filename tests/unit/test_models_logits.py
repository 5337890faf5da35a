"""Logits of every backend against transformers in float32: whole prompts, chunks, decode, mixed batches."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from headwater.engines.native.base import Backend, Checkpoint
from headwater.engines.native.checkpoints import GgufCheckpoint, open_checkpoint
from headwater.engines.native.torch_backend import TorchBackend, TorchOptions
from headwater.weights import ResolvedModel
from model_fixtures import (
    MAX_POSITIONS,
    TINY_MODELS,
    Driver,
    Stream,
    TinyModel,
    build_tiny_model,
    random_ids,
    reference_logits,
)

TOLERANCE = 1e-3
Opener = Callable[[Checkpoint, int], Driver]


def open_torch(checkpoint: Checkpoint, max_model_len: int) -> Backend:
    return TorchBackend(checkpoint, max_model_len, TorchOptions(linear="float32"))


def open_kernels(checkpoint: Checkpoint, max_model_len: int) -> Backend:
    from headwater.engines.native.cpu.backend import CpuBackend, CpuOptions
    from headwater.engines.native.cpu.library import KernelsUnavailable

    try:
        return CpuBackend(checkpoint, CpuOptions(max_model_len=max_model_len))
    except KernelsUnavailable:
        if shutil.which("g++") or shutil.which("c++"):
            raise
        pytest.skip("no compiler and no built kernels")


@pytest.fixture(params=[open_torch, open_kernels], ids=["torch", "kernels"])
def open_driver(request: pytest.FixtureRequest) -> Iterator[Opener]:
    drivers: list[Driver] = []

    def open_one(checkpoint: Checkpoint, max_model_len: int) -> Driver:
        drivers.append(Driver(request.param(checkpoint, max_model_len)))
        return drivers[-1]

    yield open_one
    for driver in drivers:
        driver.backend.close()


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 1, "the reference says too little to compare with"
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "rope"), TINY_MODELS)
def test_a_whole_prompt(tiny_model: Callable[..., TinyModel], open_driver: Opener, family: str, rope: str) -> None:
    model = tiny_model(family, rope)
    length = 40 if rope == "longrope" else MAX_POSITIONS
    ids = random_ids(length, 300)
    driver = open_driver(open_checkpoint(model.resolved), length)
    assert_close(driver.run(ids), reference_logits(model.reference, ids))


@pytest.mark.parametrize(("family", "rope"), TINY_MODELS)
def test_chunks_then_decode(tiny_model: Callable[..., TinyModel], open_driver: Opener, family: str, rope: str) -> None:
    model = tiny_model(family, rope)
    ids = random_ids(MAX_POSITIONS if rope != "longrope" else 40, 300, seed=1)
    cut = len(ids) - 6
    driver = open_driver(open_checkpoint(model.resolved), len(ids))
    stream = Stream([])
    got = [driver.step([(stream, ids[i : min(i + 7, cut)])])[0] for i in range(0, cut, 7)]
    got += [driver.step([(stream, [token])])[0] for token in ids[cut:]]
    assert_close(torch.cat(got), reference_logits(model.reference, ids))


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_beyond_the_original_length(tiny_model: Callable[..., TinyModel], open_driver: Opener, rope: str) -> None:
    """Served with a longer context, a prompt of that length is computed as transformers does."""
    model = tiny_model("llama", rope)
    length = MAX_POSITIONS if rope == "longrope" else 2 * MAX_POSITIONS
    ids = random_ids(length, 300, seed=3)
    driver = open_driver(open_checkpoint(model.resolved), length)
    assert_close(driver.run(ids, chunk=50), reference_logits(model.reference, ids))


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen2-sliding", "qwen3"])
def test_decodes_and_prompts_in_one_batch(
    tiny_model: Callable[..., TinyModel], open_driver: Opener, family: str
) -> None:
    model = tiny_model(family)
    driver = open_driver(open_checkpoint(model.resolved), MAX_POSITIONS)
    prompts = [random_ids(length, 300, seed=length) for length in (1, 15, 16, 33, 60)]
    running = [(Stream([]), ids) for ids in prompts]
    for stream, ids in running[:3]:
        driver.step([(stream, ids[:-1])]) if len(ids) > 1 else None
    parts = [(stream, ids[-1:]) for stream, ids in running[:3]]
    parts += [(running[3][0], running[3][1]), (running[4][0], running[4][1][:50])]
    got = driver.step(parts)
    for (_, fed), logits, ids in zip(parts, got, prompts, strict=True):
        seen = ids if len(fed) != 50 else ids[:50]
        assert_close(logits, reference_logits(model.reference, seen)[-len(fed) :])


def test_only_wanted_rows_get_logits(tiny_model: Callable[..., TinyModel], open_driver: Opener) -> None:
    model = tiny_model("llama")
    driver = open_driver(open_checkpoint(model.resolved), MAX_POSITIONS)
    ids = random_ids(20, 300)
    whole = driver.run(ids)
    seen: list[Any] = []
    forward = driver.backend.forward
    driver.backend.forward = lambda batch: forward(seen.append(batch) or batch)  # type: ignore[method-assign]
    driver.run(ids)
    rows = seen[0].logit_rows[[3, 19]]
    torch.testing.assert_close(forward(replace(seen[0], logit_rows=rows)), whole[[3, 19]], atol=1e-5, rtol=0)
    assert forward(replace(seen[0], logit_rows=rows[:0])).shape == (0, 300)


def test_a_block_moves_by_its_bytes(tiny_model: Callable[..., TinyModel], open_driver: Opener) -> None:
    """What one worker wrote into its blocks lets another go on from there."""
    model = tiny_model("llama")
    ids = random_ids(33, 300)
    first, second = (open_driver(open_checkpoint(model.resolved), MAX_POSITIONS) for _ in range(2))
    assert first.backend.kv_layout == second.backend.kv_layout
    source, target = Stream([]), Stream([50, 7, 11], 32)
    first.step([(source, ids[:32])])
    for old, new in zip(source.blocks, target.blocks, strict=False):
        content = memoryview(first.backend.block_view(old))  # type: ignore[arg-type]
        assert content.nbytes == first.backend.block_bytes
        memoryview(second.backend.block_view(new))[:] = content  # type: ignore[arg-type]
    assert_close(second.step([(target, ids[32:])])[0], reference_logits(model.reference, ids)[-1:])


def test_sharded_safetensors_read_the_same(tiny_model: Callable[..., TinyModel], tmp_path: Any) -> None:
    whole = open_checkpoint(tiny_model("qwen3").resolved)
    sharded = build_tiny_model(tmp_path, "qwen3", "default", shard_bytes=60_000)
    assert len(sharded.resolved.weight_files) > 2
    parts = open_checkpoint(sharded.resolved)
    assert sorted(parts.names()) == sorted(whole.names())
    for name in whole.names():
        assert torch.equal(parts.tensor(name), whole.tensor(name))


def test_sixteen_bit_products_stay_near_float32(tiny_model: Callable[..., TinyModel]) -> None:
    model = tiny_model("llama")
    driver = Driver(TorchBackend(open_checkpoint(model.resolved), MAX_POSITIONS, TorchOptions(linear="fp16")))
    ids = random_ids(60, 300)
    torch.testing.assert_close(driver.run(ids), reference_logits(model.reference, ids), atol=0.1, rtol=0)


@pytest.mark.model
def test_the_demo_model_equals_transformers_own_gguf_loading(demo_model: ResolvedModel) -> None:
    """The two read the same file in two ways."""
    import transformers

    file = demo_model.weight_files[0]
    reference = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    driver = Driver(open_torch(GgufCheckpoint(demo_model), 128))
    ids = random_ids(70, 49_152)
    assert_close(driver.run(ids), reference_logits(reference, ids))


@pytest.mark.model
def test_the_demo_model_equals_its_reference(
    demo_model: ResolvedModel, demo_reference: Any, open_driver: Opener
) -> None:
    driver = open_driver(open_checkpoint(demo_model), 128)
    ids = random_ids(70, 49_152, seed=2)
    assert_close(driver.run(ids, chunk=23), reference_logits(demo_reference, ids))
