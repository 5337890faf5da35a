"""The kernels' C interface in Python: mirrors of the structs in csrc/abi.h and one class that makes the calls.

Calls release the interpreter lock. Pointers are raw: whoever fills a struct keeps the memory alive and has checked
every index, see `CpuBackend`.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from headwater.errors import ConfigError

Fields = Sequence[tuple[str, type[Any]]]
_i64, _pointer, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class HwMatrix(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("kind", _i64),
        ("n", _i64),
        ("k", _i64),
        ("data", _pointer),
        ("bias", _pointer),
    ]


class HwLayer(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("attention_norm", _pointer),
        ("mlp_norm", _pointer),
        ("q_norm", _pointer),
        ("k_norm", _pointer),
        ("window", _i64),
        ("qkv", HwMatrix),
        ("output", HwMatrix),
        ("gate_up", HwMatrix),
        ("down", HwMatrix),
    ]


class HwModel(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("num_layers", _i64),
        ("hidden", _i64),
        ("intermediate", _i64),
        ("num_heads", _i64),
        ("num_kv_heads", _i64),
        ("head_dim", _i64),
        ("rms_eps", _float),
        ("softmax_scale", _float),
        ("cos", _pointer),
        ("sin", _pointer),
        ("layers", ctypes.POINTER(HwLayer)),
        ("final_norm", _pointer),
        ("head", HwMatrix),
        ("embedding", HwMatrix),
    ]


class HwBatch(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("num_tokens", _i64),
        ("num_seqs", _i64),
        ("num_logit_rows", _i64),
        ("token_ids", _pointer),
        ("positions", _pointer),
        ("query_starts", _pointer),
        ("context_lens", _pointer),
        ("block_tables", _pointer),
        ("logit_rows", _pointer),
        ("table_stride", _i64),
        ("kv", _pointer),
        ("block_size", _i64),
        ("block_floats", _i64),
        ("logits", _pointer),
        ("logits_stride", _i64),
    ]


class HwAttention(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("query", _pointer),
        ("out", _pointer),
        ("query_stride", _i64),
        ("layer", _i64),
        ("window", _i64),
    ]


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "hw_struct_bytes": (_i64, [ctypes.c_char_p]),
    "hw_best_isa": (ctypes.c_char_p, []),
    "hw_runs_isa": (_i64, [ctypes.c_char_p]),
    "hw_open": (_pointer, [ctypes.c_char_p, _i64]),
    "hw_close": (None, [_pointer]),
    "hw_scratch_floats": (_i64, [ctypes.POINTER(HwModel), _i64, _i64]),
    "hw_forward": (None, [_pointer, ctypes.POINTER(HwModel), ctypes.POINTER(HwBatch), _pointer]),
    "hw_linear": (None, [_pointer, ctypes.POINTER(HwMatrix), _pointer, _i64, _i64, _pointer, _i64]),
    "hw_attend": (
        None,
        [_pointer, ctypes.POINTER(HwModel), ctypes.POINTER(HwBatch), ctypes.POINTER(HwAttention)],
    ),
}


class Kernels:
    """One team of compute threads and the calls it serves, one at a time. Close it when done."""

    def __init__(self, library: ctypes.CDLL, *, threads: int = 1, isa: str | None = None) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        self.isa = isa or library.hw_best_isa().decode()
        self._handle: int | None = library.hw_open(self.isa.encode(), threads)
        if self._handle is None:
            raise ConfigError(f"cannot run {threads} kernel threads with instruction set {self.isa!r} on this machine")

    @staticmethod
    def supported(library: ctypes.CDLL, isa: str) -> bool:
        return bool(library.hw_runs_isa(isa.encode()))

    def scratch_floats(self, model: HwModel, num_tokens: int, num_logit_rows: int) -> int:
        return int(self._library.hw_scratch_floats(ctypes.byref(model), num_tokens, num_logit_rows))

    def forward(self, model: HwModel, batch: HwBatch, scratch: int) -> None:
        self._library.hw_forward(self._open_handle(), ctypes.byref(model), ctypes.byref(batch), scratch)

    def linear(self, matrix: HwMatrix, x: tuple[int, int], rows: int, out: tuple[int, int]) -> None:
        """`x` and `out` are (address, stride in floats)."""
        self._library.hw_linear(self._open_handle(), ctypes.byref(matrix), *x, rows, *out)

    def attend(self, model: HwModel, batch: HwBatch, call: HwAttention) -> None:
        self._library.hw_attend(self._open_handle(), ctypes.byref(model), ctypes.byref(batch), ctypes.byref(call))

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.hw_close(handle)

    def _open_handle(self) -> int:
        if self._handle is None:
            raise ConfigError("these kernels are closed")
        return self._handle
