"""Blocks kept as 8-bit integers: how far off they are, and that nothing else changes."""

import asyncio
from typing import Any

import numpy as np
import pytest

from headwater.kv.block import ROOT, Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.stores.base import Absent, Kept
from headwater.kv.stores.conformance import TierConformance
from headwater.kv.stores.memory import MemoryTier
from headwater.kv.stores.quantized import GROUP, QuantizedTier, dtype_of, exact_family, packed_family
from headwater.runtime.conformance import run_leak_checked
from kv_fixtures import buffers, chain

VALUES = 64 * 128


def payload_of(values: Any, dtype: str) -> bytes:
    if dtype == "bf16":
        return bytes((values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
    return bytes(values.astype("<f4" if dtype == "f32" else "<f2").tobytes())


def values_of(payload: memoryview | bytes, dtype: str) -> Any:
    if dtype == "bf16":
        return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(payload, "<f4" if dtype == "f32" else "<f2").astype(np.float32)


class TestQuantizedTierKeepsTheContract(TierConformance):
    """With a layout that is none of its own, blocks pass as they are."""

    async def open_tier(self) -> QuantizedTier:
        return QuantizedTier(MemoryTier(64 * 8192))

    async def damage(self, tier: object, block_id: bytes) -> None:
        assert isinstance(tier, QuantizedTier)
        assert isinstance(tier.inner, MemoryTier)
        tier.inner.corrupt(block_id)


@pytest.mark.parametrize(("dtype", "rounding"), [("f32", 1e-6), ("f16", 2**-11), ("bf16", 2**-8)])
def test_no_value_is_off_by_more_than_a_254th_of_the_largest_in_its_group(dtype: str, rounding: float) -> None:
    async def check() -> None:
        family = Family("m", f"hw1.{dtype}.l2.h2.d16.b16", "", VALUES * (4 if dtype == "f32" else 2))
        tier = QuantizedTier(MemoryTier(1 << 20))
        draw = np.random.default_rng(1)
        values = draw.standard_normal(VALUES) * np.exp(draw.standard_normal(VALUES))
        values[:GROUP] = 0.0
        payload = payload_of(values, dtype)
        [block_id] = chain("a", 1)
        block = Block(block_id, ROOT, 0, checksum(block_id, payload))
        assert await tier.put(family, [block], [memoryview(payload)]) == [Kept.STORED]
        assert tier.usage().used_bytes == VALUES + VALUES // GROUP * 4
        into = buffers(1, len(payload))
        [found] = await tier.get(family, block_id, into)
        assert isinstance(found, Block)
        assert found.checksum == checksum(block_id, into[0])
        exact, kept = (values_of(one, dtype).reshape(-1, GROUP) for one in (payload, into[0]))
        largest = np.abs(exact).max(axis=1, keepdims=True)
        assert np.all(np.abs(exact - kept) <= largest * (1 / 254 + rounding))
        assert np.all(kept[0] == 0.0)
        assert isinstance(tier.inner, MemoryTier)
        tier.inner.corrupt(block_id)
        assert await tier.get(family, block_id, into) == [Absent.DAMAGED]
        await tier.close()

    run_leak_checked(check())


def test_only_layouts_that_name_one_type_are_packed() -> None:
    assert dtype_of(Family("m", "hw1.bf16.l2", "", 1280)) == "bf16"
    assert dtype_of(Family("m", "vllm float16 NHD", "", 1280)) == "f16"
    assert dtype_of(Family("m", "hw1.bf16.l2", "", 1282)) is None, "no whole groups"
    for layout in ("mocker.b16", "fp8", "f16 and f32", ""):
        assert dtype_of(Family("m", layout, "", 1280)) is None
    family = Family("m", "bf16", "", 1280)
    assert packed_family(family, "bf16").payload_bytes == 640 + 40
    assert exact_family(packed_family(family, "bf16")) == exact_family(family) == family


def test_what_was_kept_whole_before_is_a_miss_not_a_wrong_block() -> None:
    async def check() -> None:
        family = Family("m", "f16", "", 1280)
        inner = MemoryTier(1 << 20)
        [block_id] = chain("a", 1)
        payload = memoryview(bytes(1280))
        await inner.put(family, [Block(block_id, ROOT, 0, checksum(block_id, payload))], [payload])
        tier = QuantizedTier(inner)
        assert await tier.get(family, block_id, buffers(1, 1280)) == [Absent.MISSING]
        await tier.close()

    asyncio.run(check())
