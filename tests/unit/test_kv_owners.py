"""Whose blocks are, where an engine's KV events do not say it."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engines.kv_feed import owners as module
from headwater.engines.kv_feed.owners import BlockOwners
from headwater.engines.kv_feed.translate import FeedTranslator
from headwater.engines.kv_feed.wire import ForeignBatch, ForeignStored
from headwater.kv.identity import chain_block_ids, namespace
from headwater.protocol.events import BlocksStored, WorkerEvent

SIZE = 4
PLAIN, ANN, BOB = (namespace("model", "layout", salt=salt) for salt in ("", "ann", "bob"))


def packed(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


FIRST, OTHER = packed(1, 2, 3, 4), packed(1, 2, 3, 5)


@pytest.fixture
def owners() -> BlockOwners:
    return BlockOwners(SIZE, PLAIN)


def test_without_tenants_everything_is_the_models_own(owners: BlockOwners) -> None:
    assert owners.of(1, FIRST) == PLAIN, "also before the first request"
    owners.begin(1, array("I", OTHER), PLAIN)
    assert owners.of(2, FIRST) == PLAIN, "whatever it begins with"


def test_a_block_is_whose_prompt_begins_with_it(owners: BlockOwners) -> None:
    owners.begin(1, array("I", FIRST + packed(9)), ANN)
    owners.begin(2, array("I", OTHER), BOB)
    assert owners.of(11, FIRST) == ANN
    assert owners.of(12, OTHER) == BOB
    assert owners.of(13, packed(7, 7, 7, 7)) is None


def test_those_who_begin_alike_have_hashes_of_their_own(owners: BlockOwners) -> None:
    owners.begin(1, array("I", FIRST), ANN)
    assert owners.of(11, FIRST) == ANN
    owners.begin(2, array("I", FIRST), BOB)
    assert owners.of(12, FIRST) == BOB, "ann has hers"
    owners.begin(3, array("I", FIRST), PLAIN)
    assert owners.of(13, FIRST) == PLAIN
    assert [owners.of(number, FIRST) for number in (11, 12, 13)] == [ANN, BOB, PLAIN]
    assert owners.of(14, FIRST) is None


def test_what_may_be_of_two_is_of_nobody(owners: BlockOwners) -> None:
    owners.begin(1, array("I", FIRST), ANN)
    owners.begin(2, array("I", FIRST), BOB)
    assert owners.of(11, FIRST) is None
    owners.end(1, 0.0)
    assert owners.of(11, FIRST) is None, "it may be told of a moment later"
    owners.end(99, 60.0)
    assert owners.of(11, FIRST) == BOB


def test_what_an_event_says_is_not_asked_for_any_more(owners: BlockOwners) -> None:
    translator = FeedTranslator("model", "layout", SIZE, owners)
    owners.begin(1, array("I", FIRST), ANN)
    owners.begin(2, array("I", FIRST), PLAIN)
    named = ForeignStored([11], None, [1, 2, 3, 4], SIZE, extra_keys=[[f"hw:{ANN.hex()}"]])
    plain = ForeignStored([12], None, [1, 2, 3, 4], SIZE)
    told = translator.apply(ForeignBatch(0.0, [named, plain]))
    assert told == [BlocksStored(chain_block_ids(key, FIRST, SIZE)) for key in (ANN, PLAIN)]


def test_a_short_prompt_grows_into_its_block(owners: BlockOwners) -> None:
    owners.begin(1, array("I", packed(1, 2)), ANN)
    owners.begin(2, array("I", packed(8)), BOB)
    assert owners.of(11, FIRST) == ANN
    owners.begin(3, array("I", OTHER), BOB)
    assert owners.of(12, OTHER) == BOB, "a whole block counts more than its beginning"


def test_the_model_and_its_adapters_are_told_apart(owners: BlockOwners) -> None:
    tuned = namespace("model", "layout", adapter="tuned")
    owners.begin(1, array("I", FIRST), tuned)
    owners.begin(2, array("I", OTHER), PLAIN)
    assert (owners.of(1, FIRST), owners.of(2, OTHER)) == (tuned, PLAIN)


def test_an_adapter_that_is_named_without_its_salt_is_told_by_who_asked_for_it(owners: BlockOwners) -> None:
    """As events of TensorRT-LLM's second cache manager may do."""
    translator = FeedTranslator("model", "layout", SIZE, owners)
    bobs = namespace("model", "layout", adapter="tuned", salt="bob")
    theirs = namespace("model", "layout", adapter="other")

    def stored(foreign: int, adapter: str | None, first: int) -> list[WorkerEvent]:
        extra = [[adapter]] if adapter else ()
        event = ForeignStored([foreign], None, [first, 2, 3, 4], SIZE, adapter=adapter, extra_keys=extra)
        return translator.apply(ForeignBatch(0.0, [event]))

    owners.begin(1, array("I", FIRST), ANN, None)
    owners.begin(2, array("I", FIRST), bobs, "tuned")
    assert stored(11, "tuned", 1) == [BlocksStored(chain_block_ids(bobs, FIRST, SIZE))]
    assert stored(12, "other", 1) == [BlocksStored(chain_block_ids(theirs, FIRST, SIZE))], "no request of ours"
    assert stored(13, None, 1) == [BlocksStored(chain_block_ids(ANN, FIRST, SIZE))]
    owners.begin(3, array("I", OTHER), bobs, "tuned")
    owners.begin(4, array("I", OTHER), namespace("model", "layout", adapter="tuned", salt="ann"), "tuned")
    other = ForeignStored([14], None, [1, 2, 3, 5], SIZE, adapter="tuned", extra_keys=[["tuned"]])
    assert translator.apply(ForeignBatch(0.0, [other])) == [], "it may be of two tenants"


def test_where_salts_are_named_an_adapter_alone_says_that_there_is_none(owners: BlockOwners) -> None:
    translator = FeedTranslator("model", "layout", SIZE, owners)
    anns, plain = (namespace("model", "layout", adapter="tuned", salt=salt) for salt in ("ann", ""))
    owners.begin(1, array("I", OTHER), ANN)
    salted = ForeignStored([11], None, [1, 2, 3, 5], SIZE, extra_keys=[[f"hw:{ANN.hex()}"]])
    translator.apply(ForeignBatch(0.0, [salted]))
    owners.begin(2, array("I", FIRST), anns, "tuned")
    alone = ForeignStored([12], None, [1, 2, 3, 4], SIZE, adapter="tuned", extra_keys=[["tuned"]])
    both = ForeignStored([13], None, [1, 2, 3, 4], SIZE, adapter="tuned", extra_keys=[["tuned", f"hw:{anns.hex()}"]])
    told = translator.apply(ForeignBatch(0.0, [alone, both]))
    assert told == [BlocksStored(chain_block_ids(key, FIRST, SIZE)) for key in (plain, anns)]


def test_memory_is_bounded(owners: BlockOwners, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KNOWN", 3)
    for number in range(10):
        owners.begin(number, array("I", packed(number, 0, 0, 0)), ANN)
        assert owners.of(number, packed(number, 0, 0, 0)) == ANN
        owners.end(number, float(number))
    assert len(owners._known) == len(owners._hashes) == 3
    for foreign in range(20, 30):
        owners.learn(foreign, FIRST, BOB)
    assert (len(owners._known), owners._hashes) == (3, {})
    assert len(owners._begun) == len(owners._by_block) == len(owners._ended) == 6, "those of the last five seconds"
    owners.begin(10, array("I", packed(9)), ANN)
    owners.end(10, 100.0)
    owners.end(11, 200.0)
    assert (owners._begun, owners._by_block, owners._short) == ({}, {}, {})


def test_the_translator_leaves_out_what_is_of_nobody(owners: BlockOwners) -> None:
    translator = FeedTranslator("model", "layout", SIZE, owners)
    owners.begin(1, array("I", FIRST + OTHER), ANN)
    tokens = [1, 2, 3, 4, 1, 2, 3, 5]
    (told,) = translator.apply(ForeignBatch(0.0, [ForeignStored([11, 12], None, tokens, SIZE)]))
    assert told == BlocksStored(chain_block_ids(ANN, FIRST + OTHER, SIZE))
    for stream, owner in ((2, BOB), (3, PLAIN)):
        owners.begin(stream, array("I", FIRST), owner)
    stranger = ForeignStored([21, 22], None, tokens, SIZE)
    child = ForeignStored([23], 22, [1, 2, 3, 4], SIZE)
    assert translator.apply(ForeignBatch(0.0, [stranger, child])) == []
    assert translator.num_orphans == 3


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "stored"]), st.integers(0, 5), st.sampled_from([PLAIN, ANN, BOB])),
        max_size=60,
    )
)
def test_no_block_is_ever_given_to_another_tenant(steps: list[tuple[str, int, bytes]]) -> None:
    """Blocks are stored only of sequences that run; they have one hash for each pair of tokens and namespace."""
    owners, running, now = BlockOwners(SIZE, PLAIN), dict[int, tuple[bytes, bytes]](), 0.0
    several = False
    for stream, (step, number, owner) in enumerate(steps):
        now += 1.0
        if step == "begin":
            first = packed(number % 2, 0, 0, 0)
            owners.begin(stream, array("I", first), owner)
            running[stream] = first, owner
            several = several or owner != PLAIN
        elif running:
            chosen = list(running)[number % len(running)]
            first, owner = running[chosen]
            if step == "stored":
                assert owners.of(hash((first, owner)), first) in (owner, None)
            else:
                del running[chosen]
                owners.end(chosen, now)
    assert several or owners.of(0, FIRST) == PLAIN
