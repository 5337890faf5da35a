"""Shares of tenants over restarts: in a disk tier and in a bucket, with what older versions have left there."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
from obstore.store import MemoryStore

from headwater.clock import RealClock
from headwater.errors import ProtocolError, TierUnavailable
from headwater.kv.node import wire
from headwater.kv.node.open import NodeOptions, open_store
from headwater.kv.node.store import NodeStore
from headwater.kv.shares import OTHERS, Shares
from headwater.kv.stores.base import TierStore
from headwater.kv.stores.conformance import OTHER, PAYLOAD_BYTES, Run
from headwater.kv.stores.disk import DiskOptions, DiskTier
from headwater.kv.stores.ledgered import TierOptions
from headwater.kv.stores.object import catalogue
from headwater.kv.stores.object.ledger import Ledger, Owned
from headwater.kv.stores.object.options import ObjectOptions
from headwater.kv.stores.object.tier import ObjectTier

CAP = 3 << 20
OURS, FLOOD = (
    msgspec.structs.replace(OTHER, tenant="ours"),
    msgspec.structs.replace(OTHER, tenant="flood"),
)


def on_loop(check: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(check)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(check(*args, **kwargs))

    return run


async def put(tier: TierStore, name: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        await Run(f"{name} {number}", 16, {"ours": OURS, "flood": FLOOD}[name]).put(tier)


def known(tier: TierStore, name: str) -> int:
    runs = [Run(f"{name} {number}", 16) for number in range(60)]
    return sum(sum(tier.known(run.ids)) for run in runs)


def used(tier: TierStore) -> dict[str, int]:
    return {one.tenant: one.used_bytes for one in tier.shares()}


# Disk


def options(folder: Path, shares: dict[str, float] | None = None) -> DiskOptions:
    return DiskOptions(folder, TierOptions(CAP, min_block_bytes=4096, shares=shares or {}))


@asynccontextmanager
async def disk(folder: Path, shares: dict[str, float] | None = None) -> AsyncIterator[DiskTier]:
    tier = DiskTier(options(folder, shares), RealClock())
    try:
        yield tier
        tier.ledger.check()
    finally:
        await tier.close()


async def fill(tier: TierStore) -> None:
    tier.limit("flood", 0.25)
    await put(tier, "ours", 0, 30)
    await put(tier, "flood", 0, 20)


@on_loop
async def test_a_disk_tier_holds_tenants_to_the_same_shares_after_a_restart(tmp_path: Path) -> None:
    """As if it had gone on: nobody has told the new process of any limit."""
    async with disk(tmp_path / "unbroken") as tier:
        await fill(tier)
        await put(tier, "flood", 20, 20)
        expected = used(tier)
        await put(tier, "ours", 30, 5)
        expected_at_last = used(tier)
    async with disk(tmp_path / "restarted") as tier:
        await fill(tier)
        before = tier.shares()
    async with disk(tmp_path / "restarted") as tier:
        assert tier.shares() == before
        await put(tier, "flood", 20, 20)
        assert used(tier) == expected
        assert 0 < used(tier)["flood"] <= 0.25 * sum(used(tier).values())
    async with disk(tmp_path / "restarted") as tier:
        await put(tier, "ours", 30, 5)
        assert used(tier) == expected_at_last


@on_loop
async def test_a_limit_that_was_changed_or_lifted_is_kept_as_it_was_last(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    async with disk(folder) as tier:
        await fill(tier)
        tier.limit("flood", 0.125)
        tier.tick()
        assert json.loads((folder / "manifest").read_bytes())["limits"] == {"flood": 0.125}, "without a put or an end"
    async with disk(folder) as tier:
        assert tier.limits() == {"flood": 0.125}
        tier.limit("flood", 1.0)
    async with disk(folder, {"ours": 0.5}) as tier:
        assert tier.limits() == {}
        assert used(tier).keys() == {"", "ours"}, "and what is guaranteed now counts"
        assert used(tier)["ours"] > used(tier)[""] > 0


@on_loop
async def test_a_disk_tier_of_an_older_version_is_reopened(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    async with disk(folder) as tier:
        await fill(tier)
        blocks, taken = tier.usage().num_blocks, used(tier)
    manifest = json.loads((folder / "manifest").read_bytes())
    del manifest["limits"]
    (folder / "manifest").write_text(json.dumps(manifest))
    async with disk(folder) as tier:
        assert tier.usage().num_blocks == blocks
        assert used(tier) == {"": sum(taken.values())}
        tier.limit("flood", 0.25)
        tier.ledger.regroup()
        assert used(tier) == taken, "once its first request has told the limit"


@on_loop
async def test_a_disk_tier_that_is_begun_anew_because_it_is_smaller_keeps_the_limits(tmp_path: Path) -> None:
    async with disk(tmp_path) as tier:
        await fill(tier)
    smaller = DiskTier(DiskOptions(tmp_path, TierOptions(CAP // 4, min_block_bytes=4096)), RealClock())
    assert smaller.usage().num_blocks == 0, "in chunks of another size"
    assert smaller.limits() == {"flood": 0.25}
    await smaller.close()


@pytest.mark.parametrize("limits", [{"flood": 0}, {"flood": 1.5}, {"flood": -0.1}, {"flood": None}, ["flood"], 1])
@on_loop
async def test_limits_that_make_no_sense_are_damage(tmp_path: Path, limits: object) -> None:
    async with disk(tmp_path) as tier:
        await fill(tier)
    manifest = json.loads((tmp_path / "manifest").read_bytes())
    (tmp_path / "manifest").write_text(json.dumps(manifest | {"limits": limits}))
    async with disk(tmp_path) as tier:
        assert tier.usage().num_blocks == 0
        await fill(tier)


@on_loop
async def test_a_family_that_could_not_be_noted_is_noted_before_its_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    async with disk(folder) as tier:
        (folder / "manifest.new").mkdir()
        for _ in range(2):
            with pytest.raises(TierUnavailable, match="cannot write"):
                await put(tier, "ours", 0, 1)
        tier.limit("flood", 0.5)
        tier.tick()
        (folder / "manifest.new").rmdir()
        await put(tier, "ours", 0, 1)
    async with disk(folder) as tier:
        assert known(tier, "ours") == 16
        assert tier.limits() == {"flood": 0.5}


@on_loop
async def test_what_comes_up_from_disk_counts_as_its_tenants_in_the_host_tier(tmp_path: Path) -> None:
    async with disk(tmp_path) as tier:
        await fill(tier)
    node = NodeOptions(TierOptions(1 << 20), options(tmp_path))
    store: NodeStore = open_store(node, RealClock())
    try:
        assert [(one.tenant, one.limit) for one in store.host.shares()] == [("", 1.0), ("flood", 0.25)]
    finally:
        await store.close()


# Bucket


@asynccontextmanager
async def bucket(store: Any, **changes: Any) -> AsyncIterator[ObjectTier]:
    run_bytes = 4 * PAYLOAD_BYTES
    place = ObjectOptions("s3", "bucket", cap_bytes=CAP, min_object_bytes=run_bytes, target_object_bytes=run_bytes)
    tier = ObjectTier(replace(place, **changes), store=store)
    try:
        yield tier
    finally:
        await tier.close()


async def crash(tier: ObjectTier) -> None:
    """It dies right after its ledger was saved."""
    await tier._upkeep.save()
    tier._catalogue.ledger.num_changes = 0


@pytest.mark.parametrize("end", ["closed", "crashed"])
@on_loop
async def test_a_bucket_holds_tenants_to_the_same_shares_after_a_restart(end: str) -> None:
    unbroken, restarted = MemoryStore(), MemoryStore()
    async with bucket(unbroken) as tier:
        await fill(tier)
        await put(tier, "flood", 20, 20)
        expected = used(tier)
    async with bucket(restarted) as tier:
        await fill(tier)
        before = tier.shares()
        if end == "crashed":
            await crash(tier)
    async with bucket(restarted) as tier:
        await tier._upkeep.loaded()
        assert tier.shares() == before
        await put(tier, "flood", 20, 20)
        assert used(tier) == expected
        assert 0 < used(tier)["flood"] <= 0.25 * sum(used(tier).values())


def older(store: Any, owner: str = "node") -> None:
    """Its ledger as a version wrote it that did not keep whose objects are."""
    saved = msgspec.msgpack.decode(obstore.get(store, f"owners/{owner}").bytes().to_bytes())
    folders = {folder: fields[:2] for folder, fields in saved["folders"].items()}
    body = msgspec.msgpack.encode({"version": saved["version"], "folders": folders})
    obstore.put(store, f"owners/{owner}", body, use_multipart=False)


@on_loop
async def test_a_bucket_written_by_an_older_version_says_whose_all_is() -> None:
    store = MemoryStore()
    async with bucket(store) as tier:
        await fill(tier)
        before = used(tier)
    older(store)
    async with bucket(store) as tier:
        tier.limit("flood", 0.25)  # by the first request, perhaps before the bucket has answered
        await tier._upkeep.loaded()
        tier._catalogue.regroup()
        assert used(tier) == before
        assert tier.requests.lists == 0
    async with bucket(store) as tier:
        await tier._upkeep.loaded()
        assert used(tier) == before
        assert tier.requests.gets == 1, "it has been noted with the rest"
    older(store)
    for found in obstore.list(store, "families").collect():
        obstore.delete(store, found["path"])
    async with bucket(store) as tier:
        await tier._upkeep.loaded()
        assert used(tier) == {"": sum(before.values())}, "nobody knows any more"
        assert tier.usage().used_bytes == sum(before.values()), "but that it is this node's"


@on_loop
async def test_what_requests_have_said_since_the_restart_holds_against_the_ledger() -> None:
    store = MemoryStore()
    async with bucket(store) as tier:
        await fill(tier)
    for fraction, expected in ((0.5, {"flood": 0.5}), (1.0, {}), (1.0, {})):
        async with bucket(store) as tier:
            tier.limit("flood", fraction)
            await tier._upkeep.loaded()
            assert tier._catalogue.shares.limits() == expected
            tier._catalogue.regroup()
            assert used(tier).keys() == {"", *expected}


@on_loop
async def test_of_what_requests_have_said_before_the_ledger_came_the_last_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "MAX_GROUPS", 1)
    async with bucket(MemoryStore()) as tier:
        for fraction in (0.5, 0.25):
            tier.limit("flood", fraction)
        tier.limit("more than are kept", 0.5)
        await tier._upkeep.loaded()
        assert tier._catalogue.shares.limits() == {"flood": 0.25, "more than are kept": 0.5}


@on_loop
async def test_a_limit_alone_is_worth_saving() -> None:
    store = MemoryStore()
    for fraction, expected in ((0.5, {"flood": 0.5}), (0.25, {"flood": 0.25}), (1.0, {})):
        async with bucket(store) as tier:
            await tier._upkeep.loaded()
            tier.limit("flood", fraction)
        async with bucket(store) as tier:
            await tier._upkeep.loaded()
            assert tier._catalogue.shares.limits() == expected


@on_loop
async def test_limits_of_another_process_under_the_same_name_are_its_own() -> None:
    store = MemoryStore()
    async with bucket(store) as one, bucket(store) as other:
        for tier in (one, other):
            await tier._upkeep.loaded()
        one.limit("flood", 0.25)
        await put(one, "flood", 0, 1)
        await one._upkeep.save()
        await put(other, "ours", 0, 1)
        await other._upkeep.save()  # finds what `one` has saved, and takes in its objects
        assert other._catalogue.shares.limits() == {}
        assert used(other) == {"": sum(used(one).values()) * 2}


def test_objects_that_are_moved_are_the_first_to_go_of_their_new_group() -> None:
    shares = Shares()
    ledger = Ledger(shares)
    for number in range(6):
        ledger.add(bytes([number]), Owned(f"runs/{number % 2}", 10, 0), f"tenant {number % 2}")
    ledger.touch(bytes([0]))
    shares.limit("tenant 0", 0.5)
    ledger.regroup()
    shares.limit("tenant 1", 0.5)
    ledger.regroup()
    assert [[name[0] for name, _ in ledger.oldest(group)] for group in (OTHERS, 1, 2)] == [[], [2, 4, 0], [1, 3, 5]]
    shares.limit("tenant 0", 1.0)
    ledger.add(bytes([7]), Owned("runs/2", 10, 0))
    ledger.regroup()
    assert [name[0] for name, _ in ledger.oldest(OTHERS)] == [2, 4, 0, 7]
    assert shares.used_bytes == {OTHERS: 40, 2: 30}


def test_an_older_version_reads_what_this_one_saves() -> None:
    """Fields were added at the end, so that going back loses no object."""

    class Folder(msgspec.Struct, frozen=True, array_like=True):
        object_bytes: int
        entries: bytes

    class Saved(msgspec.Struct, frozen=True):
        version: int
        folders: dict[str, Folder]

    async def check() -> None:
        store = MemoryStore()
        async with bucket(store) as tier:
            await fill(tier)
        body = obstore.get(store, "owners/node").bytes().to_bytes()
        saved = msgspec.msgpack.decode(body, type=Saved)
        assert saved.version == 1
        assert sum(len(folder.entries) for folder in saved.folders.values()) == 24 * Ledger().merge(body)

    asyncio.run(check())


# No share at all


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_a_share_of_nothing_is_refused(fraction: float) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_request(wire.encode(wire.Limit(0, "flood", fraction))[wire.LENGTH_BYTES :])
