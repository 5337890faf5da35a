"""Simulated requests: which blocks are the same."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.bench.traces import TraceRow
from headwater.kv.identity import num_shared_blocks
from headwater.kv.index import block_keys
from headwater.sim.mixes import MIXES, Mix
from headwater.sim.run import Load
from headwater.sim.workload import SimRequest, from_trace

BLOCK_SIZES = [16, 48, 64, 100, 512, 700, 1024]
"""Those that divide 512 and those that do not, also greater ones."""


def row(tokens: int, *hash_ids: int, at_s: float = 0.0) -> TraceRow:
    return TraceRow(at_s, tokens, 10, hash_ids)


def ids(one: TraceRow, block_size: int) -> bytes:
    return next(iter(from_trace([one], block_size))).block_ids


@given(
    shared=st.integers(0, 4),
    own=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    last=st.tuples(st.integers(1, 512), st.integers(1, 512)),
    block_size=st.sampled_from(BLOCK_SIZES),
)
def test_requests_share_exactly_the_blocks_that_end_in_common_hash_blocks(
    shared: int, own: tuple[int, int], last: tuple[int, int], block_size: int
) -> None:
    common = list(range(1, shared + 1))
    rows = [
        row(
            (shared + count - 1) * 512 + tail,
            *common,
            *range(base, base + count),
        )
        for count, tail, base in zip(own, last, (100, 200), strict=True)
    ]
    first, second = (ids(one, block_size) for one in rows)
    assert len(first) == rows[0].input_tokens // block_size * 16
    expected = shared * 512 // block_size
    possible = min(len(first), len(second)) // 16
    assert num_shared_blocks(first, second) == min(expected, possible)


@given(block_size=st.sampled_from(BLOCK_SIZES), chunks=st.integers(1, 5), tail=st.integers(1, 512))
def test_no_two_blocks_of_a_prompt_look_the_same_to_the_index(block_size: int, chunks: int, tail: int) -> None:
    keys = block_keys(ids(row((chunks - 1) * 512 + tail, *range(chunks)), block_size))
    assert len(set(keys)) == len(keys)


def test_rows_without_hash_ids_share_nothing() -> None:
    requests = list(from_trace([row(2000), row(2000)], 64))
    assert len({key for one in requests for key in block_keys(one.block_ids)}) == 2 * (2000 // 64)


def test_lengths_of_nothing_become_one() -> None:
    (request,) = from_trace([TraceRow(3.0, 0, 0)], 64)
    assert (request.prompt_tokens, request.output_tokens, request.block_ids) == (1, 1, b"")
    assert len(request.prompt()) == 4


def test_block_ids_are_spread_like_hashes() -> None:
    """Consistent hashing divides the range of keys among workers: it must not see them all in one corner."""
    rows = [row(1024, 2 * number, 2 * number + 1) for number in range(400)] + [row(1024) for _ in range(400)]
    for half in (rows[:400], rows[400:]):
        sixteenths = [block_keys(request.block_ids)[-1] >> 60 for request in from_trace(half, 64)]
        counts = [sixteenths.count(part) for part in range(16)]
        assert min(counts) > 10
        assert max(counts) < 50


SMALL = Mix("small", 20, 2.0, 2, 100, 3, 30, 40, 2.0, document_tokens=50)


@pytest.mark.parametrize("mix", [SMALL, *MIXES.values()], ids=lambda mix: mix.name)
def test_mixes_are_valid_and_the_same_for_the_same_seed(mix: Mix) -> None:
    mix = Mix(**{name: getattr(mix, name) for name in Mix.__slots__} | {"num_sessions": 20})
    requests = mix.requests(64, seed=3)
    assert requests == mix.requests(64, seed=3)
    assert requests != mix.requests(64, seed=4)
    assert len(requests) == mix.num_sessions * mix.turns
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    for one in requests:
        assert len(one.block_ids) == one.prompt_tokens // 64 * 16
        computed = one.prompt_tokens + one.output_tokens - 1
        assert len(one.block_ids + one.answer_ids) == computed // 64 * 16
        assert one.output_tokens >= 1


def test_a_next_turn_continues_prompt_and_answer() -> None:
    turns: dict[str | None, list[SimRequest]] = {}
    for one in SMALL.requests(16):
        turns.setdefault(one.session_id, []).append(one)
    for session in turns.values():
        assert len(session) == SMALL.turns
        for earlier, later in pairwise(session):
            known = earlier.block_ids + earlier.answer_ids
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens
            assert num_shared_blocks(known, later.block_ids) == len(known) // 16


def test_sessions_share_their_system_prompt_and_nothing_else() -> None:
    firsts: dict[str | None, SimRequest] = {}
    for one in SMALL.requests(16):
        firsts.setdefault(one.session_id, one)
    shared = {
        num_shared_blocks(one.block_ids, other.block_ids)
        for one in firsts.values()
        for other in firsts.values()
        if one is not other
    }
    assert shared == {0, SMALL.system_tokens // 16}


def test_a_load_reads_its_file_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "day.of.trace.jsonl.gz"
    lines = [{"timestamp": t, "input_length": 600, "output_length": 5, "hash_ids": [t, t + 1]} for t in (500, 0, 200)]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    load = Load(path, 64, limit=2)
    assert load.name == "day"
    assert [one.at_s for one in load.requests()] == [0.0, 0.2]
