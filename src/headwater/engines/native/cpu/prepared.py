"""The prepared weight file: panels ready to be mapped, one copy in the page cache for all workers of a host.

File: header (magic, version, place, size and SHA-256 of the index), tensors at 4096-byte borders, index (JSON). It is
written once under a lock and renamed into place when complete. Whatever does not fit exactly (other version, damaged
index, wrong sizes) is rebuilt, never trusted. Where the folder cannot be written, the same bytes live in memory of
this process alone.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch

from headwater.engines.base import Progress, ProgressSink
from headwater.engines.native.base import Checkpoint
from headwater.engines.native.cpu.layout import TensorPlan, model_plan
from headwater.engines.native.cpu.panels import (
    LAYOUT_VERSION,
    PanelKind,
    narrowest,
    pack,
    pack_quantised,
    quantised_kind,
)
from headwater.errors import InternalError, ModelError

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 1800.0

_MAGIC = b"HWPANELS"
_HEADER = struct.Struct("<8sIIQ32s")  # magic, version, index bytes, index offset, index digest
_ALIGNMENT = 4096
_MAX_INDEX_BYTES = 64 * 1024 * 1024
_PACK_ROWS = 4096
_POPULATE_BYTES = 256 * 1024 * 1024
_MADV_POPULATE_READ = 22


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one tensor lies."""

    name: str
    kind: int
    offset: int
    nbytes: int


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fingerprint: str
    entries: list[Entry]


class _Unfit(InternalError):
    """The file is not the one wanted; the message says why."""


class PreparedWeights:
    """A mapped prepared file. Addresses stay valid until `close`."""

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


def prepare(checkpoint: Checkpoint, folder: Path, progress: ProgressSink) -> PreparedWeights:
    """Map the prepared weights of `checkpoint`, building them first where needed."""
    plans = model_plan(checkpoint.config)
    path = folder / _file_name(checkpoint.fingerprint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _map_or_build(path, plans, checkpoint, progress)
    except OSError as error:
        logger.warning("cannot keep prepared weights in %s (%s): this process holds its own copy", folder, error)
    with os.fdopen(os.memfd_create("headwater-weights"), "w+b") as file:
        _write(file, plans, checkpoint, progress)
        return _map(file, plans, checkpoint, progress)


def _file_name(fingerprint: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{8,128}", fingerprint):
        raise InternalError(f"checkpoint fingerprint {fingerprint!r} is not a hex digest")
    return f"{fingerprint[:40]}-v{LAYOUT_VERSION}.panels"


def _map_or_build(
    path: Path, plans: Sequence[TensorPlan], checkpoint: Checkpoint, progress: ProgressSink
) -> PreparedWeights:
    if weights := _map_path(path, plans, checkpoint, progress):
        return weights
    with _lock(path.with_name(path.name + ".lock"), progress):
        if weights := _map_path(path, plans, checkpoint, progress):
            return weights
        temporary = path.with_name(path.name + ".partial")  # the lock makes it ours, also when left by a crash
        try:
            with temporary.open("w+b") as file:
                _write(file, plans, checkpoint, progress)
                os.fsync(file.fileno())
                weights = _map(file, plans, checkpoint, progress)
            temporary.replace(path)
            _remove_others(path)
        finally:
            temporary.unlink(missing_ok=True)
        return weights


def _remove_others(path: Path) -> None:
    """Files of the same checkpoint in another layout; who has one mapped keeps it."""
    for other in path.parent.glob(f"{path.name.split('-')[0]}-v*.panels"):
        if other != path:
            other.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path, progress: ProgressSink) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s") from None
                progress(Progress("convert", detail="another worker is preparing the weights"))
                time.sleep(0.2)
        yield


def _write(file: BinaryIO, plans: Sequence[TensorPlan], checkpoint: Checkpoint, progress: ProgressSink) -> None:
    total = sum(plan.parameters for plan in plans)
    done, entries = 0, []
    file.write(b"\0" * _HEADER.size)
    for plan in plans:
        progress(Progress("convert", done, total, "parameters", plan.name))
        _align(file)
        offset = file.tell()
        kind = _write_tensor(file, plan, checkpoint)
        entries.append(Entry(plan.name, int(kind), offset, plan.nbytes(kind)))
        done += plan.parameters
    progress(Progress("convert", done, total, "parameters"))
    index = msgspec.json.encode(Index(checkpoint.fingerprint, entries))
    _align(file)
    place = file.tell()
    file.write(index)
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, LAYOUT_VERSION, len(index), place, hashlib.sha256(index).digest()))
    file.flush()


def _align(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))


def _write_tensor(file: BinaryIO, plan: TensorPlan, checkpoint: Checkpoint) -> PanelKind:
    """Packs a stretch of rows at a time, so that memory stays bounded whatever the size."""
    quantised = plan.read_quantised(checkpoint)
    kind = quantised_kind(quantised) if quantised else None
    if quantised and kind is not None:
        for start in range(0, plan.rows, _PACK_ROWS):
            rows = slice(start, start + _PACK_ROWS)
            codes, scale, offset = quantised.codes[rows], quantised.scale[rows], quantised.offset[rows]
            file.write(pack_quantised(replace(quantised, codes=codes, scale=scale, offset=offset), kind).data)
        return kind
    tensor = plan.read(checkpoint)
    if plan.inputs is None:
        values = torch.zeros(plan.nbytes(PanelKind.F32) // 4)
        values[: tensor.shape[0]] = tensor
        file.write(values.numpy().data)
        return PanelKind.F32
    kind = narrowest(tensor)
    for start in range(0, plan.rows, _PACK_ROWS):
        file.write(pack(tensor[start : start + _PACK_ROWS], kind).data)
    return kind


def _map_path(
    path: Path, plans: Sequence[TensorPlan], checkpoint: Checkpoint, progress: ProgressSink
) -> PreparedWeights | None:
    try:
        with path.open("rb") as file:
            return _map(file, plans, checkpoint, progress)
    except FileNotFoundError:
        return None
    except _Unfit as error:
        logger.warning("rebuilding %s: %s", path, error)
        return None


def _map(
    file: BinaryIO, plans: Sequence[TensorPlan], checkpoint: Checkpoint, progress: ProgressSink
) -> PreparedWeights:
    size = os.fstat(file.fileno()).st_size
    index = _read_index(file, size)
    if index.fingerprint != checkpoint.fingerprint:
        raise _Unfit("it belongs to another checkpoint")
    if [entry.name for entry in index.entries] != [plan.name for plan in plans]:
        raise _Unfit("its tensors are not those of this model")
    for entry, plan in zip(index.entries, plans, strict=True):
        _check_entry(entry, plan, size)
    mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    _populate(mapping, size, progress)
    return PreparedWeights(mapping, index.entries)


def _read_index(file: BinaryIO, size: int) -> Index:
    file.seek(0)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise _Unfit("it is cut off")
    magic, version, index_bytes, place, digest = _HEADER.unpack(header)
    if magic != _MAGIC or version != LAYOUT_VERSION:
        raise _Unfit("it has another format")
    if index_bytes > _MAX_INDEX_BYTES or place + index_bytes != size:
        raise _Unfit("its size is wrong")
    file.seek(place)
    content = file.read(index_bytes)
    if hashlib.sha256(content).digest() != digest:
        raise _Unfit("its index is damaged")
    try:
        return msgspec.json.decode(content, type=Index)
    except msgspec.DecodeError as error:
        raise _Unfit(f"its index cannot be read: {error}") from error


def _check_entry(entry: Entry, plan: TensorPlan, size: int) -> None:
    if entry.kind not in set(PanelKind) or (plan.inputs is None and entry.kind != PanelKind.F32):
        raise _Unfit(f"{entry.name} has unknown kind {entry.kind}")
    fits = 0 <= entry.offset <= size - entry.nbytes and entry.offset % _ALIGNMENT == 0
    if not fits or entry.nbytes != plan.nbytes(PanelKind(entry.kind)):
        raise _Unfit(f"{entry.name} lies outside its place")


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
