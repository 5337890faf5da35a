"""A tier that keeps blocks as 8-bit integers: half the bytes of 16-bit KV, a quarter of 32-bit. Off by default: lossy.

Each group of 64 values is scaled by its largest magnitude, so no value is off by more than a 254th of the largest in
its group. A block that went through such a tier is close to the one that was computed, not equal to it: outputs are no
longer the same bit for bit. Layouts that do not name a floating-point type of ours are kept as they are.

The tier below sees packed blocks under a layout of its own, with checksums of what it keeps; what is unpacked gets a
checksum of its own.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from headwater.errors import ConfigError, StoreClosed
from headwater.kv.block import Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.shares import ShareUsage
from headwater.kv.stores.base import Absent, Kept, TierEvent, TierStore, TierUsage
from headwater.kv.stores.finishing import finished
from headwater.types import Tier

T = TypeVar("T")

GROUP = 64
_SUFFIX = "/int8"
_SCALE_BYTES = 4
_MAX_CODE = 127

Dtype = Literal["f32", "f16", "bf16"]
_NAMES: dict[str, Dtype] = {
    "f32": "f32", "float32": "f32", "f16": "f16", "float16": "f16", "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip
_VALUE_BYTES: dict[Dtype, int] = {"f32": 4, "f16": 2, "bf16": 2}


def dtype_of(family: Family) -> Dtype | None:
    """The type of the values, if the layout names one and the payload is whole groups of it."""
    named = _named(family.layout)
    if len(named) != 1:
        return None
    dtype = named.pop()
    return dtype if family.payload_bytes % (GROUP * _VALUE_BYTES[dtype]) == 0 else None


def _named(layout: str) -> set[Dtype]:
    return {_NAMES[word] for word in re.split(r"[^a-z0-9]+", layout.lower()) if word in _NAMES}


def packed_family(family: Family, dtype: Dtype) -> Family:
    num_values = family.payload_bytes // _VALUE_BYTES[dtype]
    packed_bytes = num_values + num_values // GROUP * _SCALE_BYTES
    return msgspec.structs.replace(family, layout=family.layout + _SUFFIX, payload_bytes=packed_bytes)


def exact_family(family: Family) -> Family:
    """Of a family as the tier below names it, the one that was packed; others are what they are."""
    layout = family.layout.removesuffix(_SUFFIX)
    if layout == family.layout:
        return family
    exact = msgspec.structs.replace(family, layout=layout)
    num_values = family.payload_bytes * GROUP // (GROUP + _SCALE_BYTES)
    return msgspec.structs.replace(exact, payload_bytes=num_values * _VALUE_BYTES[_named(layout).pop()])


class QuantizedTier:
    """See the module docstring. Owns the tier below."""

    def __init__(self, inner: TierStore, num_threads: int = 2) -> None:
        """Raises `ConfigError` without numpy."""
        try:
            import numpy as np
        except ModuleNotFoundError:
            raise ConfigError("8-bit tiers need numpy", hint='pip install "headwater[native]"') from None
        self.tier: Tier = inner.tier
        self.inner = inner
        self._np = np
        self._closed = False
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-quantize")

    def known(self, ids: bytes) -> bytes:
        return self.inner.known(ids)

    async def contains(self, family: Family, ids: bytes, first: int = 0) -> bytes:
        dtype = dtype_of(family)
        return await self.inner.contains(packed_family(family, dtype) if dtype else family, ids, first)

    async def put(self, family: Family, blocks: Sequence[Block], payloads: Sequence[memoryview]) -> list[Kept]:
        dtype = dtype_of(family)
        if dtype is None:
            return await self.inner.put(family, blocks, payloads)
        packed = await self._on_thread(partial(self._pack_all, dtype, payloads))
        packed_blocks = [
            block._replace(checksum=checksum(block.id, payload)) for block, payload in zip(blocks, packed, strict=True)
        ]
        return await self.inner.put(packed_family(family, dtype), packed_blocks, packed)

    async def get(self, family: Family, ids: bytes, into: Sequence[memoryview]) -> list[Block | Absent]:
        dtype = dtype_of(family)
        if dtype is None:
            return await self.inner.get(family, ids, into)
        small = packed_family(family, dtype)
        packed = [memoryview(bytearray(small.payload_bytes)) for _ in into]
        found = await self.inner.get(small, ids, packed)
        return await self._on_thread(partial(self._unpack_all, dtype, found, packed, into))

    async def remove(self, ids: bytes) -> int:
        return await self.inner.remove(ids)

    async def clear(self, *, tenant: str | None = None, model: str | None = None) -> int:
        return await self.inner.clear(tenant=tenant, model=model)

    def limit(self, tenant: str, fraction: float) -> None:
        self.inner.limit(tenant, fraction)

    def shares(self) -> list[ShareUsage]:
        return self.inner.shares()

    def usage(self) -> TierUsage:
        return self.inner.usage()

    def drain_events(self) -> list[TierEvent]:
        return self.inner.drain_events()

    def resident(self) -> Iterator[tuple[bytes, bytes]]:
        return self.inner.resident()

    async def close(self) -> None:
        self._closed = True
        await self.inner.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise StoreClosed(f"the {self.tier} tier is closed")
        return await finished(asyncio.get_running_loop().run_in_executor(self._threads, work))

    def _pack_all(self, dtype: Dtype, payloads: Sequence[memoryview]) -> list[memoryview]:
        return [self._pack(dtype, payload) for payload in payloads]

    def _pack(self, dtype: Dtype, payload: memoryview) -> memoryview:
        np = self._np
        values = self._floats(dtype, payload).reshape(-1, GROUP)
        # Infinities and NaNs have no place in a cache; they become the largest that has.
        values = np.nan_to_num(values, copy=False, nan=0.0)
        scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(_MAX_CODE)
        codes = np.rint(np.divide(values, scales, out=np.zeros_like(values), where=scales > 0)).astype(np.int8)
        return memoryview(codes.tobytes() + scales.astype("<f4").tobytes())

    def _unpack_all(
        self, dtype: Dtype, found: list[Block | Absent], packed: Sequence[memoryview], into: Sequence[memoryview]
    ) -> list[Block | Absent]:
        answers: list[Block | Absent] = []
        for block, payload, view in zip(found, packed, into, strict=True):
            if isinstance(block, Block):
                self._unpack(dtype, payload, view)
                block = block._replace(checksum=checksum(block.id, view))
            answers.append(block)
        return answers

    def _unpack(self, dtype: Dtype, packed: memoryview, into: memoryview) -> None:
        np = self._np
        num_values = len(into) // _VALUE_BYTES[dtype]
        codes = np.frombuffer(packed, np.int8, num_values).reshape(-1, GROUP)
        scales = np.frombuffer(packed, "<f4", offset=num_values).reshape(-1, 1)
        values = codes.astype(np.float32) * scales
        if dtype == "bf16":
            np.frombuffer(into, "<u2")[:] = _to_bf16(np, values).reshape(-1)
        else:
            np.frombuffer(into, "<f4" if dtype == "f32" else "<f2")[:] = values.reshape(-1)

    def _floats(self, dtype: Dtype, payload: memoryview) -> Any:
        np = self._np
        if dtype == "bf16":
            return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)
        return np.frombuffer(payload, "<f4" if dtype == "f32" else "<f2").astype(np.float32)


def _to_bf16(np: Any, values: Any) -> Any:
    """Rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bare(tier: TierStore) -> TierStore:
    """The tier that keeps the bytes."""
    return tier.inner if isinstance(tier, QuantizedTier) else tier
