"""KV events that are taken out of a queue: numbers, tiers, duplicates, partial blocks, and who may read them."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.engines.kv_feed import draining
from headwater.engines.kv_feed.drained import DrainedEvents
from headwater.engines.kv_feed.draining import Draining, ReaderLock
from headwater.engines.kv_feed.translate import FeedTranslator
from headwater.engines.kv_feed.wire import ForeignBatch
from headwater.errors import Unavailable
from headwater.kv.identity import chain_block_ids, namespace, split_block_ids
from headwater.kv.resident import ResidentBlocks
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored, WorkerEvent
from headwater.runtime.conformance import eventually

SIZE = 4
DEFAULT = namespace("model", "layout")


class Heard:
    """Translates what it hears and keeps what that adds up to, by tier."""

    def __init__(self) -> None:
        self.translator = FeedTranslator("model", "layout", SIZE)
        self.events: list[WorkerEvent] = []
        self.lost: list[str] = []
        self.resident = {tier: ResidentBlocks() for tier in ("device", "host", "disk")}
        self.drained = DrainedEvents(self, SIZE, {7: "tuned"})

    def on_batch(self, batch: ForeignBatch) -> None:
        self.hear(self.translator.apply(batch))

    def on_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.hear(self.translator.clear())

    def hear(self, events: list[WorkerEvent]) -> None:
        self.events += events
        for event in events:
            assert isinstance(event, BlocksStored | BlocksRemoved | BlocksCleared)
            for tier, resident in self.resident.items():
                if event.tier in (tier, None):
                    resident.apply(event)

    def held(self, tier: str = "device") -> int:
        return len(self.resident[tier])


def stored(
    number: int, hashes: Sequence[int | str], parent: int | str | None = None, start: int = 0, **fields: Any
) -> dict[str, Any]:
    blocks = [
        {
            "type": "stored_block",
            "block_hash": one,
            "tokens": [
                {"type": "unique_token", "token_id": start + place * SIZE + token, "token_extra_id": 0}
                for token in range(SIZE)
            ],
            "cache_level": 0,
            "priority": 35,
            **fields,
        }
        for place, one in enumerate(hashes)
    ]
    return event(number, {"type": "stored", "parent_hash": parent, "blocks": blocks})


def event(number: int, data: dict[str, Any], window: int = 4096, rank: int | None = None) -> dict[str, Any]:
    found = {"event_id": number, "data": data, "window_size": window}
    return found if rank is None else found | {"attention_dp_rank": rank}


def removed(number: int, *hashes: int | str) -> dict[str, Any]:
    return event(number, {"type": "removed", "block_hashes": list(hashes)})


def moved(number: int, one: int, before: int, after: int) -> dict[str, Any]:
    diff = {"type": "event_diff", "old_value": before, "new_value": after}
    return event(number, {"type": "updated", "block_hash": one, "cache_level": diff, "priority": None})


def created(number: int, window: int = 4096) -> dict[str, Any]:
    return event(number, {"type": "created", "num_blocks_per_cache_level": [48, 0]}, window)


def ids(count: int, key: bytes = DEFAULT) -> list[bytes]:
    packed = b"".join(token.to_bytes(4, "little") for token in range(count * SIZE))
    return list(split_block_ids(chain_block_ids(key, packed, SIZE)))


def test_blocks_get_our_ids_also_when_a_run_comes_in_parts() -> None:
    heard = Heard()
    heard.drained.take([created(0), stored(1, [11, 12])])
    heard.drained.take([stored(2, [13], parent=12, start=2 * SIZE)])
    expected = ids(3)
    assert all(block in heard.resident["device"] for block in expected)
    assert heard.resident["device"].snapshot() == [BlocksStored(b"".join(expected))]
    heard.drained.take([removed(3, 13, 99)])
    assert heard.held() == 2
    assert heard.lost == []


def test_a_block_that_is_told_of_again_counts_once_and_its_run_goes_on() -> None:
    heard = Heard()
    heard.drained.take([stored(0, [11]), stored(1, [11, 12])])
    assert heard.held() == 2
    heard.drained.take([removed(2, 12), removed(3, 11)])
    assert heard.held() == 0


def test_partial_blocks_are_left_out() -> None:
    heard = Heard()
    half = stored(0, [11, 12])
    half["data"]["blocks"][1]["tokens"].pop()
    heard.drained.take([half, removed(1, 12)])
    assert heard.held() == 1


def test_blocks_of_another_size_are_no_partial_ones() -> None:
    heard = Heard()
    longer = stored(0, [11])
    longer["data"]["blocks"][0]["tokens"] *= 2
    heard.drained.take([longer])
    assert heard.lost == [f"an event cannot be read: ValueError('a block has {2 * SIZE} tokens, and not {SIZE}')"]


def test_tiers_are_followed_and_a_move_is_never_a_moment_without_the_block() -> None:
    heard = Heard()
    heard.drained.take([stored(0, [11, 12]), moved(1, 12, 0, 1)])
    assert (heard.held("device"), heard.held("host")) == (1, 1)
    assert [type(one).__name__ for one in heard.events[-2:]] == ["BlocksStored", "BlocksRemoved"]
    assert heard.events[-2] == BlocksStored(ids(2)[1], ids(2)[0], "host")
    heard.drained.take([moved(2, 12, 1, 0), moved(3, 12, 0, 5), moved(4, 77, 0, 1)])
    assert (heard.held("device"), heard.held("host"), heard.held("disk")) == (1, 0, 1)
    heard.drained.take([removed(5, 12)])
    assert heard.held("disk") == 0


def test_a_change_of_priority_changes_nothing() -> None:
    heard = Heard()
    only = {"type": "updated", "block_hash": 11, "cache_level": None, "priority": {"old_value": 1, "new_value": 2}}
    heard.drained.take([stored(0, [11]), event(1, only)])
    assert heard.held() == 1


def test_a_gap_forgets_all_and_goes_on() -> None:
    heard = Heard()
    heard.drained.take([stored(0, [11, 12]), stored(2, [21])])
    assert heard.lost == ["1 events are missing"]
    assert heard.held() == 1
    heard.drained.take([stored(3, [13], parent=12, start=2 * SIZE)])
    assert heard.translator.num_orphans == 1
    assert heard.held() == 1


def test_numbers_that_begin_again_are_a_new_life() -> None:
    heard = Heard()
    heard.drained.take([stored(5, [11, 12])])
    assert heard.lost == []
    heard.drained.take([created(0), stored(1, [31])])
    assert heard.lost == ["the engine was started anew"]
    assert heard.held() == 1


def test_ranks_count_for_themselves() -> None:
    heard = Heard()
    other = stored(0, [11])
    other["attention_dp_rank"] = 1
    heard.drained.take([stored(0, [11]), other, removed(1, 11)])
    assert heard.lost == []
    assert heard.held() == 1


def test_only_the_widest_window_counts() -> None:
    heard = Heard()
    narrow = stored(2, [50])
    narrow["window_size"] = 128
    heard.drained.take([created(0, 128), created(1, 4096), narrow, stored(3, [11])])
    assert heard.held() == 1
    assert ids(1)[0] in heard.resident["device"]


def test_salts_adapters_and_media_have_blocks_of_their_own() -> None:
    heard = Heard()
    ours = namespace("model", "layout", salt="s")
    heard.drained.take([stored(0, [11], cache_salt=f"hw:{ours.hex()}"), stored(1, [12], cache_salt="theirs")])
    heard.drained.take([stored(2, [13], lora_id=7), stored(3, [14], mm_keys=[{"hash": "ab", "start_offset": 0}])])
    heard.drained.take([stored(4, [15], lora_id=7, cache_salt="tuned")])
    resident = heard.resident["device"]
    assert len(resident) == 5
    assert ids(1, namespace("model", "layout", adapter="tuned", salt="tuned"))[0] in resident
    assert ids(1, ours)[0] in resident
    assert ids(1, namespace("model", "layout", salt="theirs"))[0] in resident
    assert ids(1, namespace("model", "layout", adapter="tuned"))[0] in resident
    assert ids(1)[0] not in resident


def test_media_of_the_second_manager_are_left_out_and_nothing_else() -> None:
    """Their token ids are texts."""
    heard = Heard()
    image = stored(1, ["b1", "b2"], parent="b0", start=SIZE)
    for token in image["data"]["blocks"][0]["tokens"]:
        token["token_id"] = "5f" * 32
    heard.drained.take([stored(0, ["b0"]), image, stored(2, ["c1"], parent="b0", start=SIZE)])
    assert heard.lost == []
    assert heard.held() == 2
    assert all(one in heard.resident["device"] for one in ids(2))
    heard.drained.take([removed(3, "b1", "b2", "b0")])
    assert heard.held() == 1


@pytest.mark.parametrize(
    "bad",
    [
        stored(1, [12], start=-2),
        stored(1, [[]]),
        {},
        {"event_id": 1, "data": {"type": "stored"}},
        5,
        {"event_id": "x", "data": {}},
    ],
)
def test_what_cannot_be_read_is_lost_and_the_rest_goes_on(bad: Any) -> None:
    heard = Heard()
    heard.drained.take([stored(0, [11]), bad])
    assert len(heard.lost) == 1
    assert heard.held() == 0
    heard.drained.take([stored(9, [21])])
    assert heard.held() == 1


# ---- reading


class Queue:
    """Events that go to whoever asks."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.asked = 0
        self.fails = False

    async def drain(self) -> Sequence[Any]:
        self.asked += 1
        if self.fails:
            raise Unavailable("no answer")
        taken, self.events = self.events, []
        return taken


def reader(queue: Queue, told: list[WorkerEvent], lock: ReaderLock | None = None) -> Draining:
    return Draining("it", FeedTranslator("model", "layout", SIZE), told.extend, queue.drain, SIZE, lock=lock)


def test_events_are_taken_out_and_told() -> None:
    async def scenario() -> None:
        queue, told = Queue(), list[WorkerEvent]()
        draining = reader(queue, told)
        task = asyncio.ensure_future(draining.run())
        queue.events = [stored(0, [11])]
        await eventually(lambda: told == [BlocksStored(ids(1)[0])], "it is told")
        queue.fails = True
        await eventually(lambda: told[-1] == BlocksCleared(), "what did not come may have been anything")
        cleared = len(told)
        draining.wake()
        asked = queue.asked
        await eventually(lambda: queue.asked > asked, "it is asked again")
        assert len(told) == cleared, "there is nothing more to forget"
        task.cancel()

    asyncio.run(scenario())


def test_a_second_reader_of_this_host_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_LOCK_RETRY_S", 0.01)
    folder = tmp_path / "run"

    async def scenario() -> None:
        queue, told = Queue(), list[WorkerEvent]()
        first, second = (reader(queue, told, ReaderLock("http://one", folder)) for _ in range(2))
        tasks = [asyncio.ensure_future(one.run()) for one in (first, second)]
        await eventually(lambda: queue.asked == 1, "the first asks")
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        asked = queue.asked
        await asyncio.sleep(0.1)
        assert queue.asked == asked, "the second one must not read while the first has the lock"
        await first.close()
        await eventually(lambda: queue.asked > asked, "the second one takes over")
        assert ReaderLock("http://another", folder).acquire()
        tasks[1].cancel()
        await second.close()

    asyncio.run(scenario())


def test_who_finds_gaps_all_the_time_stands_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draining, "_BUSY_S", 0.001)
    monkeypatch.setattr(draining, "_STAND_BACK_S", 0.2)

    async def scenario() -> None:
        queue, told = Queue(), list[WorkerEvent]()
        task = asyncio.ensure_future(reader(queue, told).run())
        for number in range(0, 8, 2):
            queue.events = [stored(number, [number + 11])]
            await eventually(lambda: queue.events == [], "it is taken")
        asked = queue.asked
        await asyncio.sleep(0.05)
        assert queue.asked == asked
        assert told[-1] == BlocksCleared()
        await eventually(lambda: queue.asked > asked, "it tries again later")
        task.cancel()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "somebody else reads them too" in caplog.text
