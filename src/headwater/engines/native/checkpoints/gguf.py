"""Tensors from GGUF files under their Hugging Face names: quantised ones dequantised, others as stored.

`tensor` gives quantised matrices in float32, with exactly the values of the file, as llama.cpp and transformers read
them; `quantised` gives the same values as codes with scales, at a fraction of the bytes.

Llama files hold q and k rows in llama.cpp's order (the two halves of a head interleaved); they are put back.
"""

import mmap
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from headwater.engines.native.base import QuantisedTensor
from headwater.engines.native.checkpoints import gguf_config
from headwater.engines.native.checkpoints.config import check_config
from headwater.engines.native.checkpoints.gguf_blocks import quantised_tensor
from headwater.engines.native.checkpoints.layout import check_shapes
from headwater.errors import ModelError
from headwater.weights import ResolvedModel
from headwater.weights.gguf import GgufFile, GgufTensor, read_gguf

_VALUES = 2
"""Version of the way from stored to final values: what was prepared from other values must not be taken for these."""
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint:
    """`Checkpoint` and `QuantisedCheckpoint` over the shards of a GGUF model. Files stay mapped while it lives."""

    def __init__(self, model: ResolvedModel) -> None:
        shards = [read_gguf(file) for file in model.weight_files]
        self.fingerprint = sha256(f"{_VALUES}/{model.weights_digest}".encode()).hexdigest()
        self._maps = [_map(shard) for shard in shards]
        self._tensors = {name: (number, t) for number, shard in enumerate(shards) for name, t in shard.tensors.items()}
        self._names = {hf: name for name in self._tensors if (hf := gguf_config.hugging_face_name(name))}
        by_name = {name: tensor for name, (_, tensor) in self._tensors.items()}
        config = gguf_config.gguf_config(shards[0], by_name, self._rope())
        self.config = check_config(replace(config, bos_token_id=model.bos_token_id, eos_token_ids=model.eos_token_ids))
        check_shapes(self.config, {hf: by_name[name].shape for hf, name in self._names.items()})
        self._interleaved = shards[0].text("general.architecture") == "llama"

    def names(self) -> Iterable[str]:
        return self._names.keys()

    def tensor(self, name: str) -> torch.Tensor:
        gguf_name = self._gguf_name(name)
        values, heads = self._load(gguf_name), self._interleaved_heads(name)
        return _deinterleave(values, heads) if heads else values

    def quantised(self, name: str) -> QuantisedTensor | None:
        gguf_name = self._gguf_name(name)
        tensor = self._tensors[gguf_name][1]
        found = quantised_tensor(_rows(self._raw(gguf_name), tensor), tensor.type.name, tensor.type.block_bytes)
        heads = self._interleaved_heads(name)
        if found is None or not heads:
            return found
        codes, scale, offset = (
            _deinterleave(torch.from_numpy(part), heads).numpy() for part in (found.codes, found.scale, found.offset)
        )
        return replace(found, codes=codes, scale=scale, offset=offset)

    def _gguf_name(self, name: str) -> str:
        if name not in self._names:
            raise ModelError(f"the GGUF file has no tensor for {name}")
        return self._names[name]

    def _interleaved_heads(self, name: str) -> int:
        """Heads whose rows are interleaved in the file; 0: rows are in order."""
        if self._interleaved and ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if self._interleaved and ".k_proj." in name else 0

    def _raw(self, gguf_name: str) -> NDArray[np.uint8]:
        number, tensor = self._tensors[gguf_name]
        return np.frombuffer(self._maps[number], np.uint8, tensor.num_bytes, tensor.start)

    def _load(self, gguf_name: str) -> torch.Tensor:
        tensor, raw = self._tensors[gguf_name][1], self._raw(gguf_name)
        stored = _STORED.get(tensor.type.name)
        if stored is not None:
            return torch.from_numpy(raw.copy()).view(stored).view(tensor.shape)
        return torch.from_numpy(_dequantise(raw, tensor)).view(tensor.shape)

    def _rope(self) -> gguf_config.GgufRope:
        return gguf_config.GgufRope(
            self._vector(gguf_config.ROPE_DIVISORS),
            self._vector(gguf_config.ROPE_LONG),
            self._vector(gguf_config.ROPE_SHORT),
        )

    def _vector(self, gguf_name: str) -> tuple[float, ...] | None:
        return tuple(self._load(gguf_name).float().tolist()) if gguf_name in self._tensors else None


def _map(gguf: GgufFile) -> mmap.mmap:
    with gguf.path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _rows(raw: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.uint8]:
    return raw.reshape(-1, tensor.shape[-1] // tensor.type.block_elements * tensor.type.block_bytes)


def _dequantise(raw: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(_rows(raw, tensor), GGMLQuantizationType(tensor.type_number))
    return np.ascontiguousarray(values, dtype=np.float32)


def _deinterleave(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows (head, pair, half) -> (head, half, pair)."""
    rows = values.shape[0]
    by_head = values.view(num_heads, rows // num_heads // 2, 2, *values.shape[1:])
    return by_head.transpose(1, 2).reshape(values.shape)
