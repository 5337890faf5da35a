"""Weight panels: the layout the kernels read, see csrc/abi.h.

A panel holds 16 output rows. Its elements are ordered by input k, then output; bf16 panels pair k and k + 1, so that
one 32-bit lane holds both. Rows and inputs are padded with zeros to multiples of 16.
"""

from enum import IntEnum

import torch

PANEL_ROWS = 16
LAYOUT_VERSION = 1
"""Changes when bytes in a panel move; prepared files of another version are not used."""


class PanelKind(IntEnum):
    """How one weight is stored; all are widened to float32 exactly."""

    BF16 = 0
    F16 = 1
    F32 = 2

    @property
    def dtype(self) -> torch.dtype:
        return (torch.bfloat16, torch.float16, torch.float32)[self]


def padded(size: int) -> int:
    return (size + PANEL_ROWS - 1) // PANEL_ROWS * PANEL_ROWS


def panel_bytes(kind: PanelKind, rows: int, inputs: int) -> int:
    """Bytes of a [rows, inputs] matrix in panels."""
    return padded(rows) * padded(inputs) * kind.dtype.itemsize


def holds(kind: PanelKind, tensor: torch.Tensor) -> bool:
    """Whether every value of `tensor` is the same in `kind`."""
    return tensor.dtype == kind.dtype or torch.equal(tensor.to(kind.dtype).to(tensor.dtype), tensor)


def pack(tensor: torch.Tensor, kind: PanelKind, out: torch.Tensor) -> None:
    """Write the panels of `tensor` [rows, inputs] into the bytes `out`, which has `panel_bytes`."""
    rows, inputs = tensor.shape
    values = torch.zeros(padded(rows), padded(inputs), dtype=kind.dtype)
    values[:rows, :inputs] = tensor
    unit = torch.int16 if kind is PanelKind.F16 else torch.int32
    by_row = values.view(unit).view(values.shape[0] // PANEL_ROWS, PANEL_ROWS, -1)
    out.view(unit).view(by_row.shape[0], -1, PANEL_ROWS).copy_(by_row.transpose(1, 2))
