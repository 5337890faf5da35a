"""Watches: whatever the reader's pace, it ends with the true picture and holds no more than the cluster is large."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.protocol.cluster import CatalogueEntry
from headwater.runtime.registry.base import (
    InstanceGone,
    InstancePut,
    ModelGone,
    ModelPut,
    Outage,
    RegistryEvent,
    Synced,
)
from headwater.runtime.registry.conformance import example_card, example_instance
from headwater.runtime.registry.feed import Feed, Watch

NAMES = ("a", "b", "c")

changes = st.one_of(
    st.builds(
        lambda name, blocks: InstancePut(example_instance(name, kv_blocks=blocks)),
        st.sampled_from(NAMES),
        st.integers(0, 2),
    ),
    st.builds(InstanceGone, st.sampled_from(NAMES)),
    st.builds(lambda name: ModelPut(CatalogueEntry(name, example_card(name))), st.sampled_from(NAMES)),
    st.builds(ModelGone, st.sampled_from(NAMES)),
    st.builds(Outage, st.booleans()),
    st.just(Synced()),
)


async def take(watch: Watch, count: int) -> list[RegistryEvent]:
    taken: list[RegistryEvent] = []
    while len(taken) < count:
        try:
            taken.append(await asyncio.wait_for(anext(watch), 0.001))
        except TimeoutError:
            break
    return taken


@settings(max_examples=200, deadline=None)
@given(
    before=st.lists(changes, max_size=6),
    steps=st.lists(st.tuples(st.lists(changes, max_size=5), st.integers(0, 4)), max_size=8),
)
def test_a_reader_of_any_pace_ends_with_the_true_picture(
    before: list[RegistryEvent], steps: list[tuple[list[RegistryEvent], int]]
) -> None:
    async def check() -> None:
        feed = Feed()
        feed.apply(before)
        watch = feed.watch()
        seen = Feed()
        told: list[RegistryEvent] = []
        for events, reads in steps:
            feed.apply(events)
            assert len(watch._pending) <= 2 * len(NAMES) + 2 + len(watch._told)
            taken = await take(watch, reads)
            told += taken
            seen.apply(taken)
        rest = await take(watch, 1000)
        told += rest
        seen.apply(rest)
        assert seen.instances == feed.instances
        assert seen.models == feed.models
        synced = [event for event in told if isinstance(event, Synced)]
        assert len(synced) <= 1
        for number, event in enumerate(told):
            if isinstance(event, InstanceGone):
                puts = [e for e in told[:number] if isinstance(e, InstancePut)]
                assert event.worker_id in {put.instance.worker_id for put in puts}, "gone, but never told of"

    asyncio.run(check())


def test_what_existed_comes_before_synced_even_if_it_changes_meanwhile() -> None:
    async def check() -> None:
        feed = Feed()
        feed.apply([InstancePut(example_instance("a")), Synced()])
        watch = feed.watch()
        feed.apply([InstancePut(example_instance("a", kv_blocks=9)), InstancePut(example_instance("b"))])
        assert await take(watch, 9) == [
            InstancePut(example_instance("a", kv_blocks=9)),
            Synced(),
            InstancePut(example_instance("b")),
        ]

    asyncio.run(check())


def test_short_lived_instances_leave_nothing_with_a_reader_that_sleeps() -> None:
    async def check() -> None:
        feed = Feed()
        watch = feed.watch()
        for number in range(10_000):
            name = f"w{number}"
            feed.apply([InstancePut(example_instance(name)), InstanceGone(name)])
        assert len(watch._pending) == 0
        assert await take(watch, 1) == []

    asyncio.run(check())


def test_nothing_new_is_not_told() -> None:
    async def check() -> None:
        feed = Feed()
        feed.apply([InstancePut(example_instance("a")), Outage(reachable=True), InstanceGone("x"), ModelGone("x")])
        watch = feed.watch()
        await take(watch, 9)
        feed.apply([InstancePut(example_instance("a")), InstanceGone("x"), Outage(reachable=True)])
        assert await take(watch, 9) == []

    asyncio.run(check())
