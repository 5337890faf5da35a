"""Sums of what is copied: the same however it comes, and never those of something else."""

import os

import pytest

from headwater.kv.checksum import PART_BYTES, checksum
from headwater.kv.stores.copying import copy_summed

ID = bytes(range(16))
SIZES = (1, 4096, PART_BYTES // 2, PART_BYTES // 2 + 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 5 * PART_BYTES + 7)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("readonly", [False, True])
def test_a_copy_is_whole_and_its_sum_is_that_of_the_payload(size: int, readonly: bool) -> None:
    payload = os.urandom(size)
    target = memoryview(bytearray(size))
    source = memoryview(payload if readonly else bytearray(payload))
    assert copy_summed(target, source, ID) == checksum(ID, payload) == checksum(ID, bytearray(payload))
    assert target == payload


@pytest.mark.parametrize("size", SIZES)
def test_a_flipped_bit_in_any_part_and_another_id_give_another_sum(size: int) -> None:
    payload = bytearray(os.urandom(size))
    sums = {checksum(ID, payload), checksum(bytes(16), payload)}
    places = {0, size - 1, *range(PART_BYTES - 1, size, PART_BYTES)}
    for place in places:
        payload[place] ^= 0x10
        sums.add(checksum(ID, payload))
        payload[place] ^= 0x10
    assert len(sums) == 2 + len(places)


def test_parts_that_change_places_or_are_missing_give_another_sum() -> None:
    first, second = os.urandom(PART_BYTES), os.urandom(PART_BYTES)
    assert len({checksum(ID, payload) for payload in (first, first + second, second + first, first + first)}) == 4


@pytest.mark.parametrize("size", [4096, PART_BYTES, 2 * PART_BYTES])
def test_views_of_other_lengths_and_targets_not_to_be_written_are_refused(size: int) -> None:
    for wrong in (size - 1, 2 * size):
        with pytest.raises(ValueError, match=r"does not fit|different structures"):
            copy_summed(memoryview(bytearray(size)), memoryview(bytearray(wrong)), ID)
    kept = bytes(size)
    with pytest.raises(TypeError):
        copy_summed(memoryview(kept), memoryview(os.urandom(size)), ID)
    assert not any(kept)
