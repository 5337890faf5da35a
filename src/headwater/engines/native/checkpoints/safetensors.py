"""Tensors from safetensors files, one or many, mapped and read as they are stored.

The safetensors library checks each header (size limit, bounds, overlaps); we check that names are unique over the
shards and, when a tensor is read, that its type is a floating-point one we compute with.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from headwater.engines.native.checkpoints.config import check_config, parse_config
from headwater.engines.native.checkpoints.layout import check_shapes
from headwater.errors import ModelError
from headwater.weights import ResolvedModel

_READABLE: Final = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsCheckpoint:
    """`Checkpoint` over safetensors files. Files stay mapped while it lives."""

    def __init__(self, model: ResolvedModel) -> None:
        files = model.weight_files
        config = replace(parse_config(model.config), bos_token_id=model.bos_token_id, eos_token_ids=model.eos_token_ids)
        self.config = check_config(config)
        self.fingerprint = model.weights_digest
        self._files = [_open(file) for file in files]
        self._owner: dict[str, int] = {}
        for number, file in enumerate(self._files):
            for name in _names(file):
                if self._owner.setdefault(name, number) != number:
                    raise ModelError(f"tensor {name} is in {files[self._owner[name]].name} and in {files[number].name}")
        check_shapes(self.config, {name: _shape(self._files[number], name) for name, number in self._owner.items()})

    def names(self) -> Iterable[str]:
        return self._owner.keys()

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._owner:
            raise ModelError(f"the safetensors files have no tensor {name}")
        values: torch.Tensor = self._files[self._owner[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        if values.dtype not in _READABLE:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in _READABLE)
            raise ModelError(f"tensor {name} has type {values.dtype}, which is not supported (supported: {kinds})")
        return values


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file.name} is not a usable safetensors file: {error}", hint="Download it again.") from error


def _names(file: safe_open) -> list[str]:
    return list(file.keys())  # type: ignore[no-untyped-call]


def _shape(file: safe_open, name: str) -> tuple[int, ...]:
    return tuple(file.get_slice(name).get_shape())  # type: ignore[no-untyped-call]
