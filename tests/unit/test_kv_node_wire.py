"""Whatever clients say that decodes: the store answers or refuses, and its books stay in order."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from headwater.clock import VirtualClock
from headwater.errors import HeadwaterError, ProtocolError
from headwater.kv.admission import AdmitAll
from headwater.kv.block import ROOT, Family
from headwater.kv.node import wire
from headwater.kv.node.prices import NodePrices
from headwater.kv.node.requests import Requests
from headwater.kv.node.store import NodeStore
from headwater.kv.stores.disk import DiskOptions, DiskTier
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.ledgered import TierOptions
from kv_fixtures import chain

SIZES = (1, 4096, 8192, 1 << 20, 1 << 30)
IDS = chain("wire", 40)
FAMILIES = [Family("m", "f32", tenant, size) for tenant in ("", "gold") for size in SIZES]

families = st.sampled_from(FAMILIES)
ids = st.one_of(st.lists(st.sampled_from(IDS), max_size=12).map(b"".join), st.binary(max_size=40))
chains = st.builds(
    wire.Chain, families, ids, st.integers(0, wire.MAX_POSITION), st.one_of(st.just(ROOT), st.sampled_from(IDS))
)
tickets = st.integers(0, 40)
slots = st.integers(0, 70)
seconds = st.sampled_from([0.0, 0.001, 5.0])
tiers = st.sampled_from(["host", "disk", "peer", "object"])

REQUESTS: dict[type[Any], dict[str, st.SearchStrategy[Any]]] = {
    wire.Reserve: {"chain": chains},
    wire.Commit: {"ticket": tickets, "checksums": st.dictionaries(slots, st.integers(0, 2**64 - 1), max_size=12)},
    wire.Lease: {"chain": chains, "timeout_s": seconds},
    wire.Release: {"ticket": tickets, "damaged": st.lists(slots, max_size=5), "copied_bytes": st.integers(0, 1 << 40)},
    wire.Used: {"chain": chains, "copied_ms": st.floats(0, 1e9)},
    wire.Locate: {"chain": chains, "timeout_s": seconds},
    wire.Prefetch: {"chain": chains, "timeout_s": seconds},
    wire.Describe: {
        "family": families,
        "token_ms": st.floats(0, 1e9),
        "pair_ms": st.floats(0, 1e9),
        "block_tokens": st.integers(1, 99),
    },
    wire.Limit: {"tenant": st.sampled_from(["", "gold"]), "fraction": st.floats(1e-9, 1.0)},
    wire.Pin: {"ids": ids, "seconds": seconds},
    wire.Remove: {"ids": ids},
    wire.Clear: {"tenant": st.sampled_from([None, "", "gold"]), "model": st.sampled_from([None, "m", "x"])},
    wire.AskStatus: {},
    wire.ListBlocks: {"tier": tiers, "after": st.integers(-1, 1 << 40), "limit": st.integers(1, 20)},
    wire.Verify: {"tier": tiers},
    wire.Warm: {"max_bytes": st.integers(0, 1 << 40)},
}  # fmt: skip

requests = st.one_of([st.builds(kind, st.integers(0, 9), **fields) for kind, fields in REQUESTS.items()])


def test_every_request_is_tried() -> None:
    """But the greeting, which the connection answers."""
    assert {*REQUESTS, wire.Hello} == set(wire.Request.__args__)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2), requests), max_size=25), st.floats(0, 200))
def test_no_request_confuses_the_books(said: list[tuple[int, wire.Request]], later_s: float) -> None:
    async def check(folder: Path) -> None:
        clock = VirtualClock()
        host = HostTier(TierOptions(256 << 10, min_block_bytes=4096), clock)
        disk = DiskTier(DiskOptions(folder, TierOptions(1 << 20, min_block_bytes=16384)), clock)
        store = NodeStore(host, [disk], {"disk": AdmitAll()}, NodePrices(), clock)
        try:
            await tell(store, clock, said)
            clock.advance(later_s)
            host.tick()
            host.ledger.check()
            disk.ledger.check()
        finally:
            await store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(Path(folder) / "tier"))


async def tell(store: NodeStore, clock: VirtualClock, said: list[tuple[int, wire.Request]]) -> None:
    """All of it, and then both clients go."""
    answers = Requests(store, clock, lambda: [])
    ledger = store.host.ledger
    for holder, request in said:
        again = wire.decode_request(wire.encode(request)[wire.LENGTH_BYTES :])
        assert again == request
        await answer(answers, holder, request)
        ledger.check()
    for holder in (1, 2):
        answers.drop(holder)
    ledger.check()
    assert not answers._writing
    assert not any(ledger._readers)


async def answer(answers: Requests, holder: int, request: wire.Request) -> None:
    try:
        if isinstance(request, wire.Used):
            answers.used(request)
        elif (answers.answer_now(holder, request)) is None:
            await answers.answer(holder, request)
    except HeadwaterError:
        pass


@pytest.mark.parametrize(
    "bad",
    [
        wire.Used(0, wire.Chain(FAMILIES[0], b"", wire.MAX_POSITION + 1, ROOT), 0.0),
        wire.ListBlocks(0, "host", -2, 1),
        wire.Describe(0, FAMILIES[0], float("nan"), 0.0, 1),
        wire.Used(0, wire.Chain(FAMILIES[0], b"", 0, ROOT), float("inf")),
        wire.Release(0, 1, [], 1, -1.0),
        wire.Limit(0, "a", 0.0),
        wire.Lease(0, wire.Chain(FAMILIES[0], b"", 0, b""), 0.0),
    ],
)
def test_what_makes_no_sense_is_no_request(bad: wire.Request) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_request(wire.encode(bad)[wire.LENGTH_BYTES :])


@given(st.lists(st.binary(max_size=300), max_size=6), st.integers(1, 50))
def test_frames_come_out_as_they_went_in_however_they_are_cut(bodies: list[bytes], step: int) -> None:
    stream = b"".join(len(body).to_bytes(wire.LENGTH_BYTES, "little") + body for body in bodies)
    frames = wire.Frames()
    pieces = [stream[at : at + step] for at in range(0, len(stream), step)]
    assert [frame for piece in pieces for frame in frames.feed(piece)] == bodies
    with pytest.raises(ProtocolError, match="at most"):
        frames.feed((wire.MAX_FRAME_BYTES + 1).to_bytes(wire.LENGTH_BYTES, "little"))
