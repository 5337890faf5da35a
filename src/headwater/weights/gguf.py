"""Reading the GGUF container: header, metadata and tensor table, without numpy or torch.

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64 | metadata | tensor table | padding | data

The file is not trusted: every length is checked against what is left of the file before it is used, names are unique,
offsets are aligned and lie inside. Refused with `ModelError`: big-endian files, versions other than 2 and 3, nested
arrays, tensors of more than 4 dimensions, and anything that runs past the end.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwater.errors import ModelError

GgufScalar = int | float | bool | str
GgufValue = GgufScalar | list[int] | list[float] | list[bool] | list[str]

_MAGIC: Final = b"GGUF"
_HEADER: Final = struct.Struct("<4sIQQ")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_TENSOR_TAIL: Final = struct.Struct("<IQ")
_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_SCALAR_CODES: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_MAX_METADATA: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 20
_MAX_NAME_BYTES: Final = 1 << 10
_MAX_DIMS: Final = 4
_MAX_ALIGNMENT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufType:
    """A tensor type: `block_elements` values take `block_bytes` bytes."""

    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES: Final = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    30: GgufType("BF16", 1, 2),
}
"""What we read, by type number."""

_OTHER_TYPE_NAMES: Final = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is row-major, as torch has it: the file's order reversed."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    type: GgufType
    start: int
    """Offset from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One parsed GGUF file. Holds no descriptor."""

    path: Path
    version: int
    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str) -> float | None:
        value = self.metadata.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def flag(self, key: str) -> bool | None:
        value = self.metadata.get(key)
        return value if isinstance(value, bool) else None

    def texts(self, key: str) -> list[str] | None:
        value = self.metadata.get(key)
        return [v for v in value if isinstance(v, str)] if isinstance(value, list) else None

    def integers(self, key: str) -> list[int] | None:
        value = self.metadata.get(key)
        return [v for v in value if isinstance(v, int)] if isinstance(value, list) else None

    def numbers(self, key: str) -> list[float] | None:
        value = self.metadata.get(key)
        return [float(v) for v in value if not isinstance(v, str)] if isinstance(value, list) else None


class _Cursor:
    """Bounds-checked reading of little-endian values."""

    __slots__ = ("_data", "file_name", "position", "size")

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self.file_name = path.name
        self.size = len(data)
        self.position = 0

    def fail(self, why: str) -> ModelError:
        return ModelError(f"{self.file_name} is not a usable GGUF file: {why}", hint="Download the file again.")

    def take(self, num_bytes: int) -> int:
        """Advance, and return where the taken bytes start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.fail(f"{num_bytes} bytes at offset {start} run past its end ({self.size} bytes)")
        self.position = start + num_bytes
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self._data, self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self._data, self.take(8))[0])

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self._data, self.take(layout.size))

    def string(self, max_bytes: int | None = None) -> str:
        length = self.u64()
        if max_bytes is not None and length > max_bytes:
            raise self.fail(f"a name of {length} bytes at offset {self.position - 8}")
        start = self.take(length)
        # Some writers cut multi-byte characters in free text; a broken character must not make a model unusable.
        return self._data[start : start + length].decode("utf-8", "replace")

    def value(self) -> GgufValue:
        kind = self.u32()
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self._scalars(kind, 1)[0]

    def _array(self) -> GgufValue:
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            if count > (self.size - self.position) // 8:
                raise self.fail(f"an array of {count} strings at offset {self.position}")
            return [self.string() for _ in range(count)]
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[int] | list[float] | list[bool]:
        code = _SCALAR_CODES.get(kind)
        if code is None:
            raise self.fail(f"unknown value type {kind} at offset {self.position}")
        start = self.take(count * struct.calcsize(f"<{code}"))
        values = list(struct.unpack_from(f"<{count}{code}", self._data, start))
        return [bool(v) for v in values] if kind == _BOOL else values


def is_gguf(path: Path) -> bool:
    """Whether the file starts like a GGUF file."""
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Parse header, metadata and tensor table. Raises `ModelError`."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path), path)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path.name}: {error}") from error


def _parse(cursor: _Cursor, path: Path) -> GgufFile:
    magic, version, num_tensors, num_metadata = cursor.unpack(_HEADER)
    if magic != _MAGIC:
        raise cursor.fail("it does not start with GGUF")
    if version not in (2, 3):
        raise cursor.fail(f"version {version:#x} (supported: 2 and 3, little-endian)")
    if num_metadata > _MAX_METADATA or num_tensors > _MAX_TENSORS:
        raise cursor.fail(f"{num_metadata} metadata entries and {num_tensors} tensors are too many")
    metadata = _metadata(cursor, num_metadata)
    tensors = _tensors(cursor, num_tensors, _alignment(cursor, metadata))
    return GgufFile(path, version, metadata, tensors)


def _metadata(cursor: _Cursor, count: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for _ in range(count):
        key = cursor.string(_MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value()
    return metadata


def _alignment(cursor: _Cursor, metadata: dict[str, GgufValue]) -> int:
    alignment = metadata.get("general.alignment", 32)
    valid = isinstance(alignment, int) and 0 < alignment <= _MAX_ALIGNMENT and alignment & (alignment - 1) == 0
    if not isinstance(alignment, int) or not valid:
        raise cursor.fail(f"alignment {alignment!r} is not a power of two up to {_MAX_ALIGNMENT}")
    return alignment


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    entries = [_tensor_entry(cursor) for _ in range(count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, dims, type_number, offset in entries:
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} appears twice")
        tensor_type = _tensor_type(cursor, name, type_number)
        num_bytes = _tensor_bytes(cursor, name, dims, tensor_type)
        if offset % alignment or data_start + offset + num_bytes > cursor.size:
            raise cursor.fail(f"tensor {name!r} at offset {offset} is misaligned or runs past the end of the file")
        tensors[name] = GgufTensor(
            name, tuple(reversed(dims)), type_number, tensor_type, data_start + offset, num_bytes
        )
    return tensors


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string(_MAX_NAME_BYTES)
    num_dims = cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions")
    dims = tuple(cursor.u64() for _ in range(num_dims))
    type_number, offset = cursor.unpack(_TENSOR_TAIL)
    return name, dims, type_number, offset


def _tensor_type(cursor: _Cursor, name: str, type_number: int) -> GgufType:
    found = TENSOR_TYPES.get(type_number)
    if found is None:
        given = _OTHER_TYPE_NAMES.get(type_number, f"number {type_number}")
        supported = ", ".join(t.name for t in TENSOR_TYPES.values())
        raise ModelError(
            f"{cursor.file_name}: tensor {name!r} has type {given}, which is not supported (supported: {supported})",
            hint="Take a Q4_K_M, Q5_K_M, Q6_K or Q8_0 file of the same model.",
        )
    return found


def _tensor_bytes(cursor: _Cursor, name: str, dims: tuple[int, ...], tensor_type: GgufType) -> int:
    if 0 in dims or dims[0] % tensor_type.block_elements:
        raise cursor.fail(f"tensor {name!r} of type {tensor_type.name} has shape {dims}")
    elements = 1
    for dim in dims:
        elements *= dim
    return elements // tensor_type.block_elements * tensor_type.block_bytes
