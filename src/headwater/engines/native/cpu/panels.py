"""Weight panels: the layout the kernels read, see csrc/tile.h.

A panel holds 16 output rows. Its elements are ordered by input k, then output. bf16 panels pair k and k + 1, so that
one 32-bit lane holds both. Quantised panels are groups along k: scale and offset of the 16 outputs, then their codes.
Rows and inputs are padded with zeros to multiples of 16.
"""

from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.engines.native.base import QuantisedTensor

PANEL_ROWS = 16
LAYOUT_VERSION = 3
"""Changes when bytes in a panel move; prepared files of another version are not used."""

_NIBBLES = 8
_PARAMETER_BYTES = 2 * 4 * PANEL_ROWS


class PanelKind(IntEnum):
    """How one weight is stored; all give the same float32 value as the checkpoint."""

    BF16 = 0
    F16 = 1
    F32 = 2
    Q4 = 3
    """4-bit codes in groups of 32."""
    Q8 = 4
    """8-bit codes in groups of 32."""
    Q8_16 = 5
    """8-bit codes in groups of 16."""

    @property
    def group(self) -> int | None:
        """Inputs that share a scale; None for floating point."""
        return {PanelKind.Q4: 32, PanelKind.Q8: 32, PanelKind.Q8_16: 16}.get(self)


_DTYPES = {PanelKind.BF16: torch.bfloat16, PanelKind.F16: torch.float16, PanelKind.F32: torch.float32}


def padded(size: int) -> int:
    return (size + PANEL_ROWS - 1) // PANEL_ROWS * PANEL_ROWS


def panel_bytes(kind: PanelKind, rows: int, inputs: int) -> int:
    """Bytes of a [rows, inputs] matrix in panels."""
    if kind.group is None:
        return padded(rows) * padded(inputs) * _DTYPES[kind].itemsize
    code_bits = 4 if kind is PanelKind.Q4 else 8
    group_bytes = _PARAMETER_BYTES + kind.group * PANEL_ROWS * code_bits // 8
    return padded(rows) // PANEL_ROWS * (padded(inputs) // kind.group) * group_bytes


def narrowest(tensor: torch.Tensor) -> PanelKind:
    """The narrowest floating-point kind that holds every value exactly."""
    return next(kind for kind in (PanelKind.BF16, PanelKind.F16, PanelKind.F32) if _holds(kind, tensor))


def _holds(kind: PanelKind, tensor: torch.Tensor) -> bool:
    dtype = _DTYPES[kind]
    return tensor.dtype == dtype or torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def quantised_kind(tensor: QuantisedTensor) -> PanelKind | None:
    """The kind that holds `tensor` as it is; None when there is none."""
    kinds = {(4, 32): PanelKind.Q4, (8, 32): PanelKind.Q8, (8, 16): PanelKind.Q8_16}
    return kinds.get((tensor.bits, tensor.group)) if tensor.codes.shape[1] % tensor.group == 0 else None


def pack(tensor: torch.Tensor, kind: PanelKind) -> NDArray[np.uint8]:
    """The panels of a floating-point matrix [rows, inputs], as bytes."""
    rows, inputs = tensor.shape
    values = torch.zeros(padded(rows), padded(inputs), dtype=_DTYPES[kind])
    values[:rows, :inputs] = tensor
    unit = torch.int16 if kind is PanelKind.F16 else torch.int32
    by_row = values.view(unit).view(values.shape[0] // PANEL_ROWS, PANEL_ROWS, -1)
    packed: NDArray[np.uint8] = by_row.transpose(1, 2).contiguous().view(torch.uint8).flatten().numpy()
    return packed


def pack_quantised(tensor: QuantisedTensor, kind: PanelKind) -> NDArray[np.uint8]:
    """The panels of a quantised matrix, as bytes."""
    rows, inputs = tensor.codes.shape
    panels, groups = padded(rows) // PANEL_ROWS, inputs // tensor.group

    def by_panel(array: NDArray[np.generic]) -> NDArray[np.generic]:
        """[rows, groups, ...] -> [panels, groups, ..., 16], padded with zeros."""
        wide = np.zeros((padded(rows), *array.shape[1:]), array.dtype)
        wide[:rows] = array
        return np.moveaxis(wide.reshape(panels, PANEL_ROWS, *array.shape[1:]), 1, -1)

    codes = tensor.codes.reshape(rows, groups, tensor.group)
    if kind is PanelKind.Q4:
        nibbles = codes.reshape(rows, groups, -1, _NIBBLES).astype(np.uint32)
        shifted = nibbles << (4 * np.arange(_NIBBLES, dtype=np.uint32))
        packed = by_panel(np.bitwise_or.reduce(shifted, axis=-1))
    else:
        packed = by_panel(codes)
    parts = [by_panel(tensor.scale), by_panel(tensor.offset), packed]
    flat = [np.ascontiguousarray(part).view(np.uint8).reshape(panels, groups, -1) for part in parts]
    return np.concatenate(flat, axis=-1).reshape(-1)
