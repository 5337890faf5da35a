"""Buffers of all kinds as addresses, and memory that peers may map."""

import array
import ctypes
import mmap
import os
from multiprocessing.shared_memory import SharedMemory

import numpy
import pytest
import torch

from headwater.errors import TransferRefused
from headwater.transfer.memory import Buffer, allocate, buffer_of, map_sealed

SOURCES = {
    "bytes": lambda: b"abcd" * 8,
    "bytearray": lambda: bytearray(b"abcd" * 8),
    "array": lambda: array.array("I", [0x64636261] * 8),
    "memoryview": lambda: memoryview(b"abcd" * 8),
    "numpy": lambda: numpy.frombuffer(bytearray(b"abcd" * 8), dtype=numpy.float32).reshape(2, 4),
    "torch": lambda: torch.frombuffer(bytearray(b"abcd" * 8), dtype=torch.bfloat16).reshape(4, 4),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_the_address_leads_to_the_bytes(kind: str) -> None:
    made = buffer_of(SOURCES[kind]())
    assert ctypes.string_at(made.address, made.num_bytes) == b"abcd" * 8
    assert made.view == b"abcd" * 8
    assert made.readonly == (kind in ("bytes", "memoryview"))
    made.release()
    made.release()


def test_mappings_and_shared_memory() -> None:
    mapping = mmap.mmap(-1, 4096)
    mapping[:3] = b"abc"
    made = buffer_of(mapping)
    assert ctypes.string_at(made.address, 3) == b"abc"
    with pytest.raises(BufferError):
        mapping.close()
    made.release()
    mapping.close()
    shared = SharedMemory(create=True, size=4096)
    made = buffer_of(shared.buf)
    made.view[:3] = b"xyz"
    assert bytes(shared.buf[:3]) == b"xyz"
    made.release()
    shared.close()
    shared.unlink()


@pytest.mark.parametrize("source", [7, "text", b"", torch.zeros(0), torch.zeros(4, 4).t(), memoryview(b"abcd")[::2]])
def test_what_is_no_buffer_is_refused(source: object) -> None:
    with pytest.raises(TransferRefused):
        buffer_of(source)


def test_allocated_memory_is_shared_with_who_maps_it() -> None:
    made = allocate(10_000)
    other = map_sealed(os.dup(made.fd), 10_000)
    assert made.view[9_999] == 0
    made.view[9_999] = 7
    assert other.view[9_999] == 7
    other.release()
    made.release()


def test_memory_that_could_be_cut_short_is_refused_and_its_descriptor_closed() -> None:
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    short = allocate(4096)
    plain = os.open(__file__, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    for fd in (unsealed, os.dup(short.fd), plain):
        with pytest.raises(TransferRefused):
            map_sealed(fd, 8192)
    assert len(os.listdir("/proc/self/fd")) == before - 2
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(short.fd, 100)
    short.release()


def test_a_buffer_keeps_its_owner() -> None:
    tensor = torch.arange(64, dtype=torch.uint8)
    made: Buffer = buffer_of(tensor)
    del tensor
    assert bytes(made.view) == bytes(range(64))


@pytest.mark.parametrize("num_bytes", [0, -1, 1 << 55])
def test_memory_that_is_not_there_is_refused(num_bytes: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferRefused, match="cannot allocate"):
        allocate(num_bytes)
    assert len(os.listdir("/proc/self/fd")) == before
