"""GGUF checkpoints: every tensor type against the format's definition, names, row order, configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gguf_fixtures import add_vocabulary, byte_level_tokens, finish, write_model
from headwater.engines.native.checkpoints import GgufCheckpoint, open_checkpoint
from headwater.engines.native.torch_backend import TorchBackend, TorchOptions
from headwater.errors import ModelError
from headwater.weights import ResolvedModel, resolve
from model_fixtures import MAX_POSITIONS, Driver, TinyModel, random_ids, reference_logits, reference_of

Tiny = Callable[..., TinyModel]


def resolved(path: Path) -> ResolvedModel:
    return resolve(str(path), cache=path.parent / "cache")


def run(checkpoint: Any, ids: list[int]) -> torch.Tensor:
    return Driver(TorchBackend(checkpoint, MAX_POSITIONS, TorchOptions(linear="float32"))).run(ids)


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2", "qwen3", "mistral"])
def test_a_model_gives_the_logits_it_was_written_from(tiny_model: Tiny, tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    family = "llama" if name in {"mistral", "llama-biased"} else name
    write_model(tmp_path / "model.gguf", model.reference, family)
    checkpoint = open_checkpoint(resolved(tmp_path / "model.gguf"))
    ids = random_ids(50, 300)
    torch.testing.assert_close(run(checkpoint, ids), reference_logits(model.reference, ids), atol=1e-3, rtol=0)


def test_tensors_come_back_under_their_names(tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model("llama-biased")
    write_model(tmp_path / "model.gguf", model.reference, "llama")
    checkpoint = open_checkpoint(resolved(tmp_path / "model.gguf"))
    state = model.reference.state_dict()
    assert sorted(checkpoint.names()) == sorted(state)
    for name, expected in state.items():
        assert torch.equal(checkpoint.tensor(name), expected), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantised_model_runs_with_its_quantised_values(tiny_model: Tiny, tmp_path: Path, kind: str) -> None:
    model = tiny_model("llama")
    write_model(tmp_path / "model.gguf", model.reference, "llama", quantise=kind)
    checkpoint = GgufCheckpoint(resolved(tmp_path / "model.gguf"))
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    assert embedding.dtype == {"BF16": torch.bfloat16, "F16": torch.float16}.get(kind, torch.float32)
    ids = random_ids(50, 300)
    expected = reference_logits(reference_of(checkpoint), ids)
    torch.testing.assert_close(run(checkpoint, ids), expected, atol=1e-3, rtol=0)
    step = {"F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 127, "Q5_0": 1 / 15, "Q5_1": 1 / 15}.get(kind, 1 / 7)
    largest = model.reference.model.embed_tokens.weight.abs().max()
    assert (embedding.float() - model.reference.model.embed_tokens.weight).abs().max() <= step * largest


def halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint8)


def small_scale(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(-0.1, 0.1, 1).astype(np.float16)


def nibbles(data: np.ndarray) -> list[int]:
    """All low halves, then all high halves."""
    return [int(b) & 15 for b in data] + [int(b) >> 4 for b in data]


def q4_0(rng: np.random.Generator) -> tuple[np.ndarray, list[float]]:
    d, qs = small_scale(rng), rng.integers(0, 256, 16, dtype=np.uint8)
    return np.concatenate((halves(d), qs)), [float(d[0]) * (q - 8) for q in nibbles(qs)]


def q4_1(rng: np.random.Generator) -> tuple[np.ndarray, list[float]]:
    d, m, qs = small_scale(rng), small_scale(rng), rng.integers(0, 256, 16, dtype=np.uint8)
    return np.concatenate((halves(d), halves(m), qs)), [float(d[0]) * q + float(m[0]) for q in nibbles(qs)]


def fifth_bits(high: np.ndarray) -> list[int]:
    word = int.from_bytes(high.tobytes(), "little")
    return [(word >> i & 1) << 4 for i in range(32)]


def q5_0(rng: np.random.Generator) -> tuple[np.ndarray, list[float]]:
    d = small_scale(rng)
    high, qs = rng.integers(0, 256, 4, dtype=np.uint8), rng.integers(0, 256, 16, dtype=np.uint8)
    values = [low | bit for low, bit in zip(nibbles(qs), fifth_bits(high), strict=True)]
    return np.concatenate((halves(d), high, qs)), [float(d[0]) * (q - 16) for q in values]


def q5_1(rng: np.random.Generator) -> tuple[np.ndarray, list[float]]:
    d, m = small_scale(rng), small_scale(rng)
    high, qs = rng.integers(0, 256, 4, dtype=np.uint8), rng.integers(0, 256, 16, dtype=np.uint8)
    values = [low | bit for low, bit in zip(nibbles(qs), fifth_bits(high), strict=True)]
    return np.concatenate((halves(d), halves(m), high, qs)), [float(d[0]) * q + float(m[0]) for q in values]


def q8_0(rng: np.random.Generator) -> tuple[np.ndarray, list[float]]:
    d, qs = small_scale(rng), rng.integers(-128, 128, 32, dtype=np.int8)
    return np.concatenate((halves(d), qs.view(np.uint8))), [float(d[0]) * int(q) for q in qs]


def k_scales(packed: np.ndarray) -> list[tuple[int, int]]:
    """The eight 6-bit (scale, minimum) pairs that K types pack into 12 bytes."""
    p = [int(b) for b in packed]
    pairs = [(p[i] & 63, p[i + 4] & 63) for i in range(4)]
    for i in range(4, 8):
        scale = (p[i + 4] & 15) | (p[i - 4] >> 6) << 4
        minimum = (p[i + 4] >> 4) | (p[i] >> 6) << 4
        pairs.append((scale, minimum))
    return pairs


def q4_k(rng: np.random.Generator) -> tuple[np.ndarray, list[float]]:
    d, dmin = small_scale(rng), small_scale(rng)
    scales, qs = rng.integers(0, 256, 12, dtype=np.uint8), rng.integers(0, 256, 128, dtype=np.uint8)
    values: list[float] = []
    for part, (scale, minimum) in enumerate(k_scales(scales)):
        group = qs[part // 2 * 32 : part // 2 * 32 + 32]
        quants = [(int(b) >> 4 if part % 2 else int(b) & 15) for b in group]
        values += [float(d[0]) * scale * q - float(dmin[0]) * minimum for q in quants]
    return np.concatenate((halves(d), halves(dmin), scales, qs)), values


def q5_k(rng: np.random.Generator) -> tuple[np.ndarray, list[float]]:
    d, dmin = small_scale(rng), small_scale(rng)
    scales, high = rng.integers(0, 256, 12, dtype=np.uint8), rng.integers(0, 256, 32, dtype=np.uint8)
    qs = rng.integers(0, 256, 128, dtype=np.uint8)
    values: list[float] = []
    for part, (scale, minimum) in enumerate(k_scales(scales)):
        group = qs[part // 2 * 32 : part // 2 * 32 + 32]
        low = [(int(b) >> 4 if part % 2 else int(b) & 15) for b in group]
        quants = [q + 16 * (int(high[i]) >> part & 1) for i, q in enumerate(low)]
        values += [float(d[0]) * scale * q - float(dmin[0]) * minimum for q in quants]
    return np.concatenate((halves(d), halves(dmin), scales, high, qs)), values


def q6_k(rng: np.random.Generator) -> tuple[np.ndarray, list[float]]:
    low, high = rng.integers(0, 256, 128, dtype=np.uint8), rng.integers(0, 256, 64, dtype=np.uint8)
    scales, d = rng.integers(-128, 128, 16, dtype=np.int8), small_scale(rng)
    values = [0.0] * 256
    for half in range(2):
        ql, qh, base = low[64 * half :], high[32 * half :], 128 * half
        for i in range(32):
            quants = (
                (int(ql[i]) & 15) | (int(qh[i]) & 3) << 4,
                (int(ql[i + 32]) & 15) | (int(qh[i]) >> 2 & 3) << 4,
                (int(ql[i]) >> 4) | (int(qh[i]) >> 4 & 3) << 4,
                (int(ql[i + 32]) >> 4) | (int(qh[i]) >> 6 & 3) << 4,
            )
            for quarter, q in enumerate(quants):
                scale = int(scales[8 * half + 2 * quarter + i // 16])
                values[base + 32 * quarter + i] = float(d[0]) * scale * (q - 32)
    return np.concatenate((low, high, scales.view(np.uint8), halves(d))), values


BLOCKS = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip


def write_one_tensor(path: Path, kind: str, rows: int, blocks: int, data: np.ndarray) -> None:
    """A Llama whose embedding has the given blocks; nothing else of it is ever read."""
    quantised = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[quantised][0] * blocks
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, size),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 4),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    add_vocabulary(writer, byte_level_tokens())
    writer.add_tensor("token_embd.weight", data.reshape(rows, -1), raw_dtype=quantised)
    shapes = {"attn_q": (size, size), "attn_k": (size, size), "attn_v": (size, size), "attn_output": (size, size)}
    shapes |= {"ffn_gate": (32, size), "ffn_up": (32, size), "ffn_down": (size, 32)}
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(shape, np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.zeros(size, np.float32))
    finish(writer)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_mean_what_the_format_says(tmp_path: Path, kind: str) -> None:
    rng, rows, blocks = np.random.default_rng(4), 3, 2
    made = [BLOCKS[kind](rng) for _ in range(rows * blocks)]
    path = tmp_path / "model.gguf"
    write_one_tensor(path, kind, rows, blocks, np.concatenate([data for data, _ in made]))
    expected = torch.tensor([values for _, values in made], dtype=torch.float64).reshape(rows, -1)
    checkpoint = GgufCheckpoint(resolved(path))
    got = checkpoint.tensor("model.embed_tokens.weight")
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-6)
    codes = checkpoint.quantised("model.embed_tokens.weight")
    assert codes is not None
    assert codes.codes.max() < 2**codes.bits
    scale, offset = (torch.from_numpy(np.repeat(part, codes.group, axis=1)) for part in (codes.scale, codes.offset))
    assert torch.equal(torch.addcmul(offset.double(), scale.double(), torch.from_numpy(codes.codes)).float(), got)
    assert checkpoint.quantised("model.layers.0.mlp.up_proj.weight") is None


def test_codes_of_interleaved_heads_are_put_in_order_too(tiny_model: Tiny, tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", tiny_model("llama").reference, "llama", quantise="Q4_1")
    checkpoint = GgufCheckpoint(resolved(tmp_path / "model.gguf"))
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{part}.weight"
        codes = checkpoint.quantised(name)
        assert codes is not None
        scale, offset = (torch.from_numpy(np.repeat(p, codes.group, axis=1)) for p in (codes.scale, codes.offset))
        assert torch.equal(scale * torch.from_numpy(codes.codes) + offset, checkpoint.tensor(name))


def test_llama3_scaling_comes_as_divisors(tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model("llama", "llama3")
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 16, 2) / 16)
    scaled = model.reference.model.rotary_emb.inv_freq
    divisors = (plain / scaled).numpy().astype(np.float32)
    write_model(tmp_path / "m.gguf", model.reference, "llama", tensors={"rope_freqs.weight": divisors})
    checkpoint = open_checkpoint(resolved(tmp_path / "m.gguf"))
    assert checkpoint.config.rope.kind == "divisors"
    ids = random_ids(60, 300)
    torch.testing.assert_close(run(checkpoint, ids), reference_logits(model.reference, ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_scaling_in_metadata(tiny_model: Tiny, tmp_path: Path, rope: str) -> None:
    model = tiny_model("llama", rope)
    parameters = model.reference.config.rope_parameters
    metadata = {"llama.rope.scaling.type": rope, "llama.rope.scaling.factor": float(parameters["factor"])}
    if rope == "yarn":
        metadata["llama.rope.scaling.original_context_length"] = parameters["original_max_position_embeddings"]
    write_model(tmp_path / "m.gguf", model.reference, "llama", metadata=metadata)
    checkpoint = open_checkpoint(resolved(tmp_path / "m.gguf"))
    assert checkpoint.config.rope.kind == rope
    assert dict(checkpoint.config.rope.parameters)["factor"] == parameters["factor"]


def test_longrope_comes_as_tensors(tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model("llama", "longrope")
    parameters = model.reference.config.rope_parameters
    tensors = {
        f"rope_factors_{kind}.weight": np.array(parameters[f"{kind}_factor"], np.float32) for kind in ("long", "short")
    }
    metadata = {
        "llama.rope.scaling.original_context_length": parameters["original_max_position_embeddings"],
        "llama.rope.scaling.attn_factor": float(model.reference.model.rotary_emb.attention_scaling),
    }
    write_model(tmp_path / "m.gguf", model.reference, "llama", tensors=tensors, metadata=metadata)
    ids = random_ids(MAX_POSITIONS, 300)
    got = run(open_checkpoint(resolved(tmp_path / "m.gguf")), ids)
    torch.testing.assert_close(got, reference_logits(model.reference, ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("gemma3", {}, "GGUF architecture 'gemma3' is not supported.*llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "mixture-of-experts"),
        ("qwen2", {"qwen2.rope.scaling.type": "linear", "qwen2.rope.dimension_count": 8}, "8 rotated"),
        ("llama", {"llama.rope.dimension_count": 8}, "8 rotated"),
        ("llama", {"llama.rope.scaling.type": "magic"}, "rope scaling 'magic' is not supported"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tiny_model: Tiny, tmp_path: Path, family: str, metadata: dict[str, Any], message: str
) -> None:
    write_model(tmp_path / "m.gguf", tiny_model("qwen2").reference, family, metadata=metadata)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(resolved(tmp_path / "m.gguf"))


def test_heads_that_differ_by_layer_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count_kv": [2, 2, 1]}
    write_model(tmp_path / "m.gguf", tiny_model("llama").reference, "llama", metadata=metadata)
    with pytest.raises(ModelError, match="head_count_kv is a list"):
        open_checkpoint(resolved(tmp_path / "m.gguf"))


@pytest.mark.parametrize(("key", "value"), [("block_count", 5000), ("embedding_length", 1 << 31)])
def test_sizes_that_no_model_has_are_refused(tiny_model: Tiny, tmp_path: Path, key: str, value: int) -> None:
    """Damaged or hostile metadata must not decide how much memory is taken."""
    path = tmp_path / "m.gguf"
    write_model(path, tiny_model("llama").reference, "llama")
    data = bytearray(path.read_bytes())
    at = data.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match=rf"llama.{key} is {value}, not a number from 1 to "):
        open_checkpoint(resolved(path))


def test_a_sliding_window_in_metadata(tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model("mistral-sliding")
    write_model(tmp_path / "m.gguf", model.reference, "llama", metadata={"llama.attention.sliding_window": 21})
    ids = random_ids(60, 300)
    got = run(open_checkpoint(resolved(tmp_path / "m.gguf")), ids)
    torch.testing.assert_close(got, reference_logits(model.reference, ids), atol=1e-3, rtol=0)


def test_a_missing_tensor_is_named(tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model("llama")
    state = model.reference.state_dict()

    class Incomplete:
        config = model.reference.config

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {name: value for name, value in state.items() if "layers.1.mlp.up_proj" not in name}

    write_model(tmp_path / "m.gguf", Incomplete(), "llama")
    with pytest.raises(ModelError, match=r"lack the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        open_checkpoint(resolved(tmp_path / "m.gguf"))


def test_unknown_names_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tiny_model("llama").reference, "llama")
    with pytest.raises(ModelError, match="no tensor for nonsense"):
        open_checkpoint(resolved(tmp_path / "m.gguf")).tensor("nonsense")


def test_split_files_are_read_as_one(tiny_model: Tiny, tmp_path: Path) -> None:
    """As llama.cpp splits: metadata in the first part, tensors in all."""
    model = tiny_model("llama")
    state = list(model.reference.state_dict().items())

    class Part:
        def __init__(self, number: int) -> None:
            self.config = model.reference.config
            self._state = dict(state[number::2])

        def state_dict(self) -> dict[str, torch.Tensor]:
            return self._state

    for number in range(2):
        metadata = {"split.count": 2, "split.no": number}
        write_model(tmp_path / f"m-0000{number + 1}-of-00002.gguf", Part(number), "llama", metadata=metadata)
    whole = resolved(tmp_path / "m-00001-of-00002.gguf")
    assert (whole.name, len(whole.weight_files)) == ("m", 2)
    checkpoint = open_checkpoint(whole)
    ids = random_ids(20, 300)
    torch.testing.assert_close(run(checkpoint, ids), reference_logits(model.reference, ids), atol=1e-3, rtol=0)
    with pytest.raises(ModelError, match="not the first part"):
        resolved(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match="parts of m are missing: m-00002-of-00002"):
        resolved(tmp_path / "m-00001-of-00002.gguf")
