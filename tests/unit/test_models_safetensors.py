"""Safetensors checkpoints: what is read, and what hostile or damaged files are refused for."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.engines.native.checkpoints import open_checkpoint
from headwater.errors import ModelError
from headwater.weights import ResolvedModel
from model_fixtures import TinyModel

Tiny = Callable[..., TinyModel]


@pytest.fixture
def model(tiny_model: Tiny) -> TinyModel:
    return tiny_model("llama-biased")


def with_file(model: TinyModel, *files: Path) -> ResolvedModel:
    return replace(model.resolved, weight_files=files)


def rewritten(model: TinyModel, path: Path, changes: dict[str, torch.Tensor | None]) -> ResolvedModel:
    tensors: dict[str, Any] = load_file(model.resolved.weight_files[0]) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
    return with_file(model, path)


def test_tensors_are_those_of_the_model(model: TinyModel) -> None:
    checkpoint = open_checkpoint(model.resolved)
    for name, expected in model.reference.state_dict().items():
        assert torch.equal(checkpoint.tensor(name), expected)
    assert checkpoint.fingerprint == model.resolved.weights_digest
    assert checkpoint.config.eos_token_ids == (2,)
    assert checkpoint.config.bos_token_id == 1


def test_sixteen_bit_tensors_stay_as_stored(model: TinyModel, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    value = model.reference.state_dict()[name].bfloat16()
    got = open_checkpoint(rewritten(model, tmp_path / "m.safetensors", {name: value})).tensor(name)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, r"lack the tensor model\.norm\.weight"),
        ({"model.norm.weight": torch.zeros(63)}, r"shape \[63\].*\[64\]"),
        ({"lm_head.weight": None}, r"lack the tensor lm_head\.weight"),
    ],
)
def test_files_that_do_not_fit_the_configuration(
    model: TinyModel, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        open_checkpoint(rewritten(model, tmp_path / "m.safetensors", changes))


def test_whole_numbers_are_no_weights(model: TinyModel, tmp_path: Path) -> None:
    changed = rewritten(model, tmp_path / "m.safetensors", {"model.norm.weight": torch.zeros(64, dtype=torch.int64)})
    with pytest.raises(ModelError, match=r"int64.*supported: float32, float16, bfloat16"):
        open_checkpoint(changed).tensor("model.norm.weight")


def test_a_tensor_in_two_files_is_refused(model: TinyModel, tmp_path: Path) -> None:
    extra = tmp_path / "extra.safetensors"
    save_file({"model.norm.weight": torch.zeros(64)}, extra)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is in model\.safetensors and in extra\.safetensors"):
        open_checkpoint(with_file(model, *model.resolved.weight_files, extra))


def header(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, stop: int, shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape or [(stop - start) // 4], "data_offsets": [start, stop]}


HOSTILE = {
    "empty": b"",
    "too short": b"\1\2\3",
    "length beyond the file": header({}, length=10**6),
    "length beyond all memory": header({}, length=2**63),
    "not json": header(b"{" * 50),
    "not an object": header([]),
    "data missing": header({"a": entry(0, 64)}),
    "offsets beyond the data": header({"a": entry(0, 1 << 40)}, b"\0" * 64),
    "offsets reversed": header({"a": entry(64, 0, [16])}, b"\0" * 64),
    "shape and offsets differ": header({"a": entry(0, 64, [1 << 40])}, b"\0" * 64),
    "overlap": header({"a": entry(0, 64), "b": entry(32, 96)}, b"\0" * 96),
    "negative shape": header({"a": entry(0, 64, [-16])}, b"\0" * 64),
    "unknown type": header({"a": entry(0, 64) | {"dtype": "PICKLE"}}, b"\0" * 64),
    "pickle": b"PK\3\4" + b"\0" * 100,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(model: TinyModel, tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(ModelError, match=r"hostile\.safetensors is not a usable safetensors file"):
        open_checkpoint(with_file(model, path))
