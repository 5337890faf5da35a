"""The prepared weight file: panels ready to be mapped.

Header (magic, version, place, size and SHA-256 of the index, boot id), tensors at 4096-byte borders, index (JSON) with
a SHA-256 of every tensor. Nothing is followed before it is checked against the model's own plan. The file is not
forced to the disk when it is written, which can take longer than all the rest: within the same boot of the machine the
page cache holds what was written; after another boot every tensor is checked once, and a file that a crash or a bad
disk has damaged is refused.
"""

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from headwater.engines.base import Progress, ProgressSink
from headwater.engines.native.base import Checkpoint
from headwater.engines.native.cpu.layout import TensorPlan
from headwater.engines.native.cpu.panels import (
    LAYOUT_VERSION,
    PanelKind,
    narrowest,
    pack,
    pack_quantised,
    quantised_kind,
)
from headwater.errors import InternalError

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")

_MAGIC = b"HWPANELS"
_HEADER = struct.Struct("<8sIIQ32s36s")  # magic, version, index bytes, index offset, index digest, boot id
_BOOT_ID_OFFSET = _HEADER.size - 36
_UNKNOWN_BOOT = b"unknown".ljust(36)
_ALIGNMENT = 4096
_MAX_INDEX_BYTES = 64 * 1024 * 1024
_PACK_ROWS = 4096
_POPULATE_BYTES = 256 * 1024 * 1024
_MADV_POPULATE_READ = 22


class UnfitFile(InternalError):
    """The file is not the one wanted; the message says why."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one tensor lies."""

    name: str
    kind: int
    offset: int
    nbytes: int
    digest: str


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fingerprint: str
    entries: list[Entry]


class PanelFile:
    """A mapped file. Addresses stay valid until `close`."""

    def __init__(self, mapping: mmap.mmap, entries: Sequence[Entry]) -> None:
        self._mapping = mapping
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)
        self._entries = {entry.name: entry for entry in entries}

    @property
    def nbytes(self) -> int:
        return len(self._mapping)

    def kind(self, name: str) -> PanelKind:
        return PanelKind(self._entries[name].kind)

    def address(self, name: str) -> int:
        return self._bytes.ctypes.data + self._entries[name].offset

    def optional_address(self, name: str) -> int | None:
        return self.address(name) if name in self._entries else None

    def close(self) -> None:
        del self._bytes
        self._mapping.close()


def write_panels(file: BinaryIO, plans: Sequence[TensorPlan], checkpoint: Checkpoint, progress: ProgressSink) -> None:
    """Convert every tensor, one at a time. Raises `ModelError` for a checkpoint that does not fit its configuration."""
    total = sum(plan.parameters for plan in plans)
    done, entries = 0, []
    file.write(b"\0" * _HEADER.size)
    for plan in plans:
        progress(Progress("convert", done, total, "parameters", plan.name))
        entries.append(_write_tensor(file, plan, checkpoint))
        done += plan.parameters
    progress(Progress("convert", done, total, "parameters"))
    index = msgspec.json.encode(Index(checkpoint.fingerprint, entries))
    place = _align(file)
    file.write(index)
    file.seek(0)
    digest = hashlib.sha256(index).digest()
    file.write(_HEADER.pack(_MAGIC, LAYOUT_VERSION, len(index), place, digest, _boot_id()))
    file.flush()


def _align(file: BinaryIO) -> int:
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    return file.tell()


def _write_tensor(file: BinaryIO, plan: TensorPlan, checkpoint: Checkpoint) -> Entry:
    kind, chunks = _packed(plan, checkpoint)
    offset, digest = _align(file), hashlib.sha256()
    for chunk in chunks:
        file.write(chunk.data)
        digest.update(chunk.data)
    return Entry(plan.name, int(kind), offset, plan.nbytes(kind), digest.hexdigest())


def _packed(plan: TensorPlan, checkpoint: Checkpoint) -> tuple[PanelKind, Iterator[NDArray[np.uint8]]]:
    """The kind that keeps every value, and the panels a stretch of rows at a time, so that memory stays bounded."""
    stretches = [slice(start, start + _PACK_ROWS) for start in range(0, plan.rows, _PACK_ROWS)]
    codes = plan.read_quantised(checkpoint)
    kind = quantised_kind(codes) if codes else None
    if codes and kind is not None:
        parts = (
            replace(codes, codes=codes.codes[rows], scale=codes.scale[rows], offset=codes.offset[rows])
            for rows in stretches
        )
        return kind, (pack_quantised(part, kind) for part in parts)
    tensor = plan.read(checkpoint)
    if plan.inputs is None:
        values = torch.zeros(plan.nbytes(PanelKind.F32) // 4)
        values[: tensor.shape[0]] = tensor
        return PanelKind.F32, iter([values.numpy().view(np.uint8)])
    dense = narrowest(tensor)
    return dense, (pack(tensor[rows], dense) for rows in stretches)


def map_panels(
    file: BinaryIO, plans: Sequence[TensorPlan], checkpoint: Checkpoint, progress: ProgressSink
) -> PanelFile:
    """Map a file for reading. Raises `UnfitFile`."""
    size = os.fstat(file.fileno()).st_size
    index, boot_id = _read_index(file, size)
    if index.fingerprint != checkpoint.fingerprint:
        raise UnfitFile("it belongs to another checkpoint")
    if [entry.name for entry in index.entries] != [plan.name for plan in plans]:
        raise UnfitFile("its tensors are not those of this model")
    for entry, plan in zip(index.entries, plans, strict=True):
        _check_entry(entry, plan, size)
    mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    if boot_id != _boot_id() or boot_id == _UNKNOWN_BOOT:
        _check_contents(mapping, index.entries, progress)
    _populate(mapping, size, progress)
    return PanelFile(mapping, index.entries)


def mark_checked(path: Path) -> None:
    """Note that the contents are known to be right in this boot of the machine."""
    boot_id = _boot_id()
    with path.open("r+b") as file:
        file.seek(_BOOT_ID_OFFSET)
        if file.read(len(boot_id)) != boot_id:
            file.seek(_BOOT_ID_OFFSET)
            file.write(boot_id)


def _boot_id() -> bytes:
    try:
        return BOOT_ID_FILE.read_bytes()[:36].ljust(36)
    except OSError:
        return _UNKNOWN_BOOT


def _read_index(file: BinaryIO, size: int) -> tuple[Index, bytes]:
    file.seek(0)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise UnfitFile("it is cut off")
    magic, version, index_bytes, place, digest, boot_id = _HEADER.unpack(header)
    if magic != _MAGIC or version != LAYOUT_VERSION:
        raise UnfitFile("it has another format")
    if index_bytes > _MAX_INDEX_BYTES or place + index_bytes != size:
        raise UnfitFile("its size is wrong")
    file.seek(place)
    content = file.read(index_bytes)
    if hashlib.sha256(content).digest() != digest:
        raise UnfitFile("its index is damaged")
    try:
        return msgspec.json.decode(content, type=Index), boot_id
    except msgspec.DecodeError as error:
        raise UnfitFile(f"its index cannot be read: {error}") from error


def _check_entry(entry: Entry, plan: TensorPlan, size: int) -> None:
    if entry.kind not in set(PanelKind) or (plan.inputs is None and entry.kind != PanelKind.F32):
        raise UnfitFile(f"{entry.name} has unknown kind {entry.kind}")
    fits = 0 <= entry.offset <= size - entry.nbytes and entry.offset % _ALIGNMENT == 0
    if not fits or entry.nbytes != plan.nbytes(PanelKind(entry.kind)):
        raise UnfitFile(f"{entry.name} lies outside its place")


def _check_contents(mapping: mmap.mmap, entries: Sequence[Entry], progress: ProgressSink) -> None:
    content = memoryview(mapping)
    for entry in entries:
        progress(Progress("load", entry.offset, len(content), "bytes", "checking the prepared weights"))
        if hashlib.sha256(content[entry.offset : entry.offset + entry.nbytes]).hexdigest() != entry.digest:
            raise UnfitFile(f"{entry.name} is damaged")


def _populate(mapping: mmap.mmap, size: int, progress: ProgressSink) -> None:
    """Read the file into the page cache and map its pages now rather than in the first request."""
    for start in range(0, size, _POPULATE_BYTES):
        progress(Progress("load", start, size, "bytes"))
        try:
            mapping.madvise(_MADV_POPULATE_READ, start, min(_POPULATE_BYTES, size - start))
        except OSError:  # kernels before 5.14: pages come when touched
            mapping.madvise(mmap.MADV_WILLNEED)
            break
    progress(Progress("load", size, size, "bytes"))
