"""Engines' own KV events: read, put in order and put in our terms; over real sockets with a publisher like vLLM's."""

import asyncio
import itertools
import socket
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engines.kv_feed.subscription import Feed, FeedAddress, FeedOrder
from headwater.engines.kv_feed.translate import FeedTranslator, salt_of
from headwater.engines.kv_feed.wire import ForeignBatch, ForeignCleared, ForeignRemoved, ForeignStored, decode_batch
from headwater.errors import ProtocolError
from headwater.kv.identity import chain_block_ids, namespace
from headwater.kv.resident import ResidentBlocks
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored, WorkerEvent
from headwater.runtime.conformance import eventually, on_loop
from headwater.runtime.zeromq import ZmqContext
from vllm_publisher import Publisher

SIZE = 4
DEFAULT = namespace("fp", "layout")


def stored(hashes: Sequence[int], tokens: Sequence[int], parent: int | None = None, **fields: Any) -> ForeignStored:
    return ForeignStored(hashes, parent, tokens, SIZE, **fields)


def translated(*events: Any, translator: FeedTranslator | None = None, rank: int = 0) -> list[WorkerEvent]:
    return (translator or FeedTranslator("fp", "layout", SIZE)).apply(ForeignBatch(0.0, events, rank))


def ids(tokens: Sequence[int], key: bytes = DEFAULT) -> bytes:
    return chain_block_ids(key, array("I", tokens).tobytes(), SIZE)


# ---- wire


def test_maps_as_vllm_032_sends_them() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [702757842669265042, 12727516518541667169],
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["tenantA"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "of a later release": 1,
    }
    removed = {"type": "BlockRemoved", "block_hashes": [6118510708559803314], "medium": "CPU", "group_idx": 0}
    batch = decode_batch(
        msgspec.msgpack.encode([5.5, [event, removed, {"type": "AllBlocksCleared"}, {"type": "New"}], 2])
    )
    assert (batch.timestamp, batch.rank) == (5.5, 2)
    first, second, third = batch.events
    assert isinstance(first, ForeignStored)
    assert (first.hashes, first.parent, first.token_ids) == (event["block_hashes"], None, list(range(8)))
    assert (first.tier, first.extra_keys) == ("device", [["tenantA"], None])
    assert second == ForeignRemoved([6118510708559803314], "host", 0)
    assert third == ForeignCleared()


def test_arrays_signed_numbers_and_bytes() -> None:
    events = [
        ["BlockStored", [-5, 7], -9, [1, 2, 3, 4], 2, None, "CPU_PINNED"],
        ["BlockRemoved", [b"\x01" * 32]],
        ["AllBlocksCleared"],
    ]
    batch = decode_batch(msgspec.msgpack.encode([1, events]))
    assert batch.events[0] == ForeignStored([-5, 7], -9, [1, 2, 3, 4], 2, "host")
    assert batch.events[1] == ForeignRemoved([b"\x01" * 32])
    assert batch.rank == 0


def test_pairs_and_hashes_of_images_as_sglang_and_trtllm_send_them() -> None:
    """Speculative decoding names neighbours; for images there are numbers or texts that are no tokens."""
    plain = {"type": "BlockStored", "block_hashes": [-5], "parent_block_hash": None, "block_size": 2, "lora_id": None}
    pairs = plain | {"token_ids": [[7, 8], [8, 9]], "medium": "CPU_PINNED", "cache_salt": "s"}
    images = [plain | {"token_ids": [7, token]} for token in (1 << 61, "5f" * 32)]
    (event,) = decode_batch(msgspec.msgpack.encode([1.0, [*images, pairs], 0])).events
    assert isinstance(event, ForeignStored)
    assert (event.token_ids, event.hashes, event.tier, event.extra_keys) == ([7, 8], [-5], "host", [["s"]])


def test_a_salt_of_its_own_covers_the_first_block() -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2]}
    batch = decode_batch(msgspec.msgpack.encode([1, [event | {"block_size": 2, "cache_salt": "x"}]]))
    assert batch.events == [ForeignStored([1], None, [1, 2], 2, extra_keys=[["x"]])]


def test_a_salt_that_is_called_like_the_adapter_is_not_taken_for_it() -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": list(range(4))}
    event |= {"block_size": 4, "lora_name": "acme", "cache_salt": "acme"}
    batch = decode_batch(msgspec.msgpack.encode([1, [event]]))
    both = namespace("fp", "layout", adapter="acme", salt="acme")
    assert FeedTranslator("fp", "layout", SIZE).apply(batch) == [BlocksStored(ids(range(4), both))]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [1]}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1, 2, 3], 4]]]),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", ["text"]]]]),
        msgspec.msgpack.encode([1.0, [7]]),
    ],
)
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(payload)


# ---- translation


def test_ids_are_those_of_the_same_tokens() -> None:
    translator = FeedTranslator("fp", "layout", SIZE)
    tokens = list(range(12))
    assert translated(stored([1, 2], tokens[:8]), translator=translator) == [BlocksStored(ids(tokens[:8]))]
    parent = ids(tokens)[16:32]
    assert translated(stored([3], tokens[8:], 2), translator=translator) == [BlocksStored(ids(tokens)[32:], parent)]
    assert translated(ForeignRemoved([3, 99]), translator=translator) == [BlocksRemoved(ids(tokens)[32:])]


def test_a_salt_of_ours_carries_the_namespace() -> None:
    key = namespace("fp", "layout", salt="tenant")
    salt = salt_of(key, DEFAULT)
    translator = FeedTranslator("fp", "layout", SIZE)
    event = stored([1], range(4), extra_keys=[[salt]])
    assert translated(event, translator=translator) == [BlocksStored(ids(range(4), key))]
    later = stored([2], range(4, 8), 1)
    assert translated(later, translator=translator) == [BlocksStored(ids(range(8), key)[16:], ids(range(4), key))]
    assert salt_of(DEFAULT, DEFAULT) is None
    assert salt_of(b"", DEFAULT) is None


def test_other_salts_and_adapters_have_their_own_namespaces() -> None:
    (foreign,) = translated(stored([1], range(4), extra_keys=[["x"]]))
    (lookalike,) = translated(stored([1], range(4), extra_keys=[["hw:zz"]]))
    (too_long,) = translated(stored([1], range(4), extra_keys=[["hw:" + "00" * 65]]))
    (adapter,) = translated(stored([1], range(4), adapter="a", extra_keys=[["a"]]))
    (plain,) = translated(stored([1], range(4)))
    assert foreign == BlocksStored(ids(range(4), namespace("fp", "layout", salt="x")))
    assert adapter == BlocksStored(ids(range(4), namespace("fp", "layout", adapter="a")))
    told = (foreign, lookalike, too_long, adapter, plain)
    assert len({event.block_ids for event in told if isinstance(event, BlocksStored)}) == 5


def test_media_tell_blocks_of_equal_tokens_apart() -> None:
    (cat,) = translated(stored([1], range(4), extra_keys=[[["cat", 0]]]))
    (dog,) = translated(stored([1], range(4), extra_keys=[[["dog", 0]]]))
    assert cat != dog


def test_copies_count() -> None:
    translator = FeedTranslator("fp", "layout", SIZE)
    event = stored([1, 2], range(8))
    assert len(translated(event, translator=translator)) == 1
    assert translated(event, translator=translator) == []
    assert translated(ForeignRemoved([2]), translator=translator) == []
    assert translated(ForeignRemoved([2, 1]), translator=translator) == [BlocksRemoved(ids(range(8))[16:])]


def test_a_block_of_a_lower_tier_goes_on_from_one_of_the_device() -> None:
    translator = FeedTranslator("fp", "layout", SIZE)
    translated(stored([1], range(4)), translator=translator)
    told = translated(stored([2], range(4, 8), 1, tier="host"), translator=translator)
    assert told == [BlocksStored(ids(range(8))[16:], ids(range(4)), "host")]


def test_blocks_without_a_known_parent_are_left_out() -> None:
    translator = FeedTranslator("fp", "layout", SIZE)
    assert translated(stored([5, 6], range(8), 4), translator=translator) == []
    assert translator.num_orphans == 2
    assert translated(ForeignRemoved([5]), translator=translator) == []


def test_a_rank_that_clears_leaves_the_others() -> None:
    translator = FeedTranslator("fp", "layout", SIZE)
    translated(stored([1], range(4)), translator=translator)
    translated(stored([1], range(4)), stored([2], range(4, 8)), translator=translator, rank=1)
    assert translated(ForeignCleared(), translator=translator, rank=1) == [BlocksRemoved(ids(range(4, 8)))]
    assert translated(ForeignCleared(), translator=translator) == [BlocksCleared()]
    assert translator.clear() == [BlocksCleared()]


def test_blocks_of_other_sizes_and_groups_say_nothing() -> None:
    assert translated(ForeignStored([1], None, [1, 2], 2), stored([2], range(4), group=1)) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 3)), max_size=40))
def test_what_is_told_adds_up(steps: list[tuple[bool, int, int]]) -> None:
    """Against a count of copies per block, for sequences 0 to 5 of up to three blocks each."""
    translator, resident = FeedTranslator("fp", "layout", SIZE), ResidentBlocks()
    copies: dict[bytes, int] = {}
    for store, sequence, length in steps:
        tokens = [sequence, *range(SIZE * length - 1)]
        hashes = [sequence * 10 + number for number in range(length)]
        joined = ids(tokens)
        names = [joined[16 * number : 16 * number + 16] for number in range(length)]
        if store:
            told = translated(stored(hashes, tokens), translator=translator)
            for name in names:
                copies[name] = copies.get(name, 0) + 1
        else:
            told = translated(ForeignRemoved(hashes[::-1]), translator=translator)
            for name in names:
                copies[name] = max(0, copies.get(name, 0) - 1)
        for event in told:
            assert isinstance(event, BlocksStored | BlocksRemoved | BlocksCleared)
            resident.apply(event)
        assert {name for name, count in copies.items() if count} == {name for name in copies if name in resident}


# ---- order


class Heard:
    """A sink that keeps what it hears; `life` begins anew when something was lost."""

    def __init__(self) -> None:
        self.life: list[float] = []
        self.lost: list[str] = []

    def on_batch(self, batch: ForeignBatch) -> None:
        self.life.append(batch.timestamp)

    def on_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.life.clear()


def batch_at(moment: float) -> ForeignBatch:
    return ForeignBatch(moment, [])


@given(st.sets(st.integers(0, 30)), st.integers(0, 10))
def test_whatever_is_skipped_is_replayed_in_order(skipped: set[int], late: int) -> None:
    """Batches 0 to 30, some of which do not arrive; answers to a question come `late` batches later."""
    heard = Heard()
    asked: list[int] = []
    order = FeedOrder(heard, lambda start: asked.append(start) or True)
    due: int | None = None

    def answer(upto: int) -> None:
        for number in range(asked[-1], upto + 1):
            order.on_replayed(number, batch_at(number))
        order.on_replay_end()

    order.begin()
    answer(-1)
    for number in range(32):
        questions = len(asked)
        if number not in skipped or number == 31:
            order.on_live(number, batch_at(number))
        if len(asked) > questions:
            due = number + late
        if due is not None and number >= due:
            due = None
            answer(number)
    if due is not None:
        answer(31)
    assert heard.life == list(range(32))
    assert heard.lost == []


def test_what_cannot_be_replayed_begins_anew() -> None:
    heard = Heard()
    order = FeedOrder(heard, lambda _: False)
    order.begin()
    for number in (3, 4, 9, 10):
        order.on_live(number, batch_at(number))
    assert heard.life == [9, 10]
    assert (order.num_gaps, order.num_lost, len(heard.lost)) == (1, 1, 1)


def test_a_rolled_buffer_begins_anew() -> None:
    heard = Heard()
    order = FeedOrder(heard, lambda _: True)
    order.begin()
    order.on_replay_end()
    order.on_live(0, batch_at(0))
    order.on_live(50, batch_at(50))
    order.on_replayed(49, batch_at(49))
    order.on_replay_end()
    assert heard.life == [49, 50]
    assert len(heard.lost) == 1


def test_what_a_replay_has_brought_is_not_taken_again() -> None:
    heard = Heard()
    order = FeedOrder(heard, lambda _: True)
    order.begin()
    for number in range(3):
        order.on_replayed(number, batch_at(number))
    order.on_replay_end()
    order.on_live(2, batch_at(2))
    order.on_live(3, batch_at(3))
    assert heard.life == [0, 1, 2, 3]
    assert heard.lost == []


def test_what_was_kept_of_a_life_that_has_ended_is_forgotten() -> None:
    heard = Heard()
    order = FeedOrder(heard, lambda _: True)
    order.begin()
    order.on_replay_end()
    order.on_live(0, batch_at(0))
    order.on_live(8, batch_at(8))
    order.on_live(0, batch_at(100))
    order.on_replay_end()
    order.on_live(1, batch_at(101))
    assert heard.life == [100, 101]
    assert heard.lost == ["the engine was started anew"]


def test_what_is_kept_while_a_replay_is_asked_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.engines.kv_feed.subscription._MAX_KEPT", 2)
    heard = Heard()
    order = FeedOrder(heard, lambda _: True)
    order.begin()
    for number in (5, 6, 7):
        order.on_live(number, batch_at(number))
    order.on_replay_end(answered=False)
    assert heard.life == [5, 6]


def test_a_new_life_of_the_engine_begins_anew() -> None:
    heard = Heard()
    order = FeedOrder(heard, lambda _: True)
    order.begin()
    order.on_replay_end()
    for number in range(5):
        order.on_live(number, batch_at(number))
    order.on_live(2, batch_at(2))  # seen, as after a replay
    assert heard.life == [0, 1, 2, 3, 4]
    order.on_live(0, batch_at(100))
    order.on_live(1, batch_at(101))
    assert heard.life == [100, 101]
    assert heard.lost == ["the engine was started anew"]


# ---- sockets


@asynccontextmanager
async def feed(address: FeedAddress, heard: Heard) -> AsyncIterator[Feed]:
    context = ZmqContext()
    following = Feed(context, address, heard)
    try:
        yield following
    finally:
        following.close()
        await context.term()


def count_of(heard: Heard, count: int) -> Any:
    return lambda: len(heard.life) == count


class TestSockets:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @on_loop
    async def test_a_late_subscriber_hears_everything(self) -> None:
        heard = Heard()
        with Publisher(self.folder) as publisher:
            for moment in range(5):
                publisher.publish([], float(moment))
            async with feed(publisher.address, heard):
                await eventually(count_of(heard, 5), "the first five are replayed")
                publisher.publish([], 5.0)
                await eventually(count_of(heard, 6), "a sixth comes live")
                assert heard.life == [0, 1, 2, 3, 4, 5]

    @on_loop
    async def test_gaps_heal_and_lives_end(self) -> None:
        heard = Heard()
        moments = itertools.count(1)
        with Publisher(self.folder) as publisher:
            async with feed(publisher.address, heard) as following:
                publisher.publish([], float(next(moments)))
                await eventually(count_of(heard, 1), "the first comes")
                publisher.lose([], float(next(moments)))
                publisher.lose([], float(next(moments)))
                publisher.publish([], float(next(moments)))
                await eventually(count_of(heard, 4), "the lost two are replayed")
                assert heard.life == [1, 2, 3, 4]
                assert following.order.num_gaps == 1
                publisher.garble()
                publisher.restart()
                await asyncio.sleep(0.05)
                publisher.publish([], float(next(moments)))
                await eventually(lambda: heard.life == [5], "a new life is heard")
                assert heard.lost == ["the engine was started anew"]

    @on_loop
    async def test_a_publisher_that_dials_is_listened_to(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            free_port = taken.getsockname()[1]
        heard = Heard()
        endpoint = f"tcp://127.0.0.1:{free_port}"
        async with feed(FeedAddress.published(endpoint, "kv", None, "host"), heard):
            with Publisher(None, dial=endpoint) as publisher:
                for _ in range(100):
                    publisher.publish([], 1.0)
                    await asyncio.sleep(0.02)
                    if heard.life:
                        break
        assert heard.life


def test_wildcards_are_where_the_engine_is() -> None:
    found = FeedAddress.published("tcp://*:5557", "t", "tcp://[::]:5558", "10.0.0.7")
    assert found == FeedAddress("tcp://10.0.0.7:5557", "t", "tcp://10.0.0.7:5558", dials=False)
    assert FeedAddress.published("tcp://*:1", "", None, "fe80::1").endpoint == "tcp://[fe80::1]:1"
    assert FeedAddress.published("ipc:///x", "", None, "h").dials is False
