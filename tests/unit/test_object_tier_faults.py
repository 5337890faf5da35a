"""The object tier when its server fails, on a real SeaweedFS behind a proxy that misbehaves on command."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import obstore
import pytest

from fault_proxy import FaultProxy, Faults, fault_proxy
from headwater.errors import ConfigError, StoreError, TierUnavailable
from headwater.kv.block import Block
from headwater.kv.stores.base import Absent, Kept
from headwater.kv.stores.conformance import FAMILY, OTHER, PAYLOAD_BYTES, Run, only
from headwater.kv.stores.object.options import ObjectOptions, parse_object_url
from headwater.kv.stores.object.tier import ObjectTier
from headwater.runtime.conformance import eventually
from object_servers import ObjectServer

RUN_BLOCKS = 8
_numbers = itertools.count()


class Site:
    """One place in the bucket, behind one proxy."""

    def __init__(self, server: ObjectServer, proxy: FaultProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.prefix = f"faults/{next(_numbers)}"

    def options(self, owner: str = "node-a", **changes: Any) -> ObjectOptions:
        bucket = changes.pop("bucket", "blocks")
        url = self.server.url(self.prefix, port=self.proxy.port, bucket=bucket)
        run_bytes = RUN_BLOCKS * PAYLOAD_BYTES
        settings: dict[str, Any] = {
            "cap_bytes": 1 << 20,
            "min_object_bytes": run_bytes,
            "target_object_bytes": run_bytes,
            "request_timeout_s": 5.0,
            "stall_timeout_s": 3.0,
            "retries": 2,
        }
        return replace(parse_object_url(url, owner=owner), **settings | changes)

    @contextlib.asynccontextmanager
    async def tier(self, owner: str = "node-a", **changes: Any) -> Any:
        tier = ObjectTier(self.options(owner, **changes))
        try:
            yield tier
        finally:
            await tier.close()


@pytest.fixture
def site(s3_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    with fault_proxy(s3_server.port) as proxy:
        yield Site(s3_server, proxy)


def on_loop(check: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(check)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(check(*args, **kwargs))

    return run


async def fails(call: Coroutine[Any, Any, Any]) -> TierUnavailable:
    with pytest.raises(TierUnavailable) as caught:
        await call
    return caught.value


@on_loop
async def test_a_short_storm_of_503_is_waited_out(site: Site) -> None:
    async with site.tier() as tier:
        run = Run("a", RUN_BLOCKS)
        site.proxy.faults = Faults(answer=(503, "SlowDown"), answer_times=2)
        assert only(Kept.STORED, await run.put(tier))
        site.proxy.faults = Faults(answer=(503, "SlowDown"), answer_times=2)
        assert await run.get(tier) == run.blocks
        assert site.proxy.faults.count("GET") == 3


@on_loop
async def test_a_long_storm_opens_the_breaker_and_the_end_of_it_closes_it(site: Site) -> None:
    async with site.tier() as tier:
        first, second = Run("a", RUN_BLOCKS), Run("b", RUN_BLOCKS)
        await first.put(tier)
        site.proxy.faults = faults = Faults(answer=(503, "SlowDown"))
        started = time.monotonic()
        for _ in range(4):
            await fails(second.put(tier))
        assert time.monotonic() - started < 20, "retries are bounded"
        asked = len(faults.requests)
        assert asked <= 4 * 3 + 3, "and so is their number"
        for _ in range(50):
            error = await fails(first.get(tier))
            assert error.retry_after_s > 0
        assert len(faults.requests) <= asked + 3, "while the breaker is open nobody asks"
        assert tier.known(first.ids) == b"\1" * RUN_BLOCKS, "what is out of reach is not forgotten"
        site.proxy.faults = Faults()
        await eventually_got(tier, first)
        assert only(Kept.STORED, await second.put(tier))


async def eventually_got(tier: ObjectTier, run: Run) -> None:
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(TierUnavailable):
            assert await run.get(tier) == run.blocks
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@on_loop
async def test_expired_credentials_are_named_and_not_retried(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async with site.tier() as tier:
        run = Run("a", RUN_BLOCKS)
        await run.put(tier)
        site.proxy.faults = faults = Faults(answer=(400, "ExpiredToken"))
        with caplog.at_level(logging.ERROR):
            error = await fails(run.get(tier))
        assert "ExpiredToken" in error.message
        assert error.hint is not None
        assert "--object" in error.hint
        assert len(faults.requests) == 1
        assert error.retry_after_s > 5, "the same again would fail the same way"
        messages = [record.getMessage() for record in caplog.records]
        assert len([text for text in messages if "ExpiredToken" in text and "--object" in text]) == 1


@on_loop
async def test_wrong_credentials_are_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something-else")
    async with site.tier() as tier:
        error = await fails(tier.contains(FAMILY, Run("a", RUN_BLOCKS).ids))
        assert "credentials were refused" in error.message
        assert "something-else" not in error.message


@on_loop
async def test_a_wrong_bucket_is_named(site: Site) -> None:
    async with site.tier(bucket="no-such-bucket") as tier:
        error = await fails(Run("a", RUN_BLOCKS).put(tier))
        assert "there is no such bucket" in error.message
        assert "no-such-bucket" in str(error.hint)
        assert "--object" in str(error.hint)


@on_loop
async def test_a_slow_connection_is_given_up_in_time(site: Site) -> None:
    async with site.tier(retries=0, request_timeout_s=1.5) as tier:
        run = Run("a", RUN_BLOCKS)
        await run.put(tier)
        site.proxy.faults = Faults(bytes_per_s=4000)
        started = time.monotonic()
        await fails(run.get(tier))
        assert time.monotonic() - started < 10
        site.proxy.faults = Faults()
        await eventually_got(tier, run)


@on_loop
async def test_a_server_that_never_answers_is_given_up_in_time(site: Site) -> None:
    async with site.tier(lookup_timeout_s=0.3, stall_timeout_s=0.7) as tier:
        run = Run("a", RUN_BLOCKS)
        await run.put(tier)
        site.proxy.faults = Faults(hang=True)
        started = time.monotonic()
        assert await tier.contains(FAMILY, Run("b", RUN_BLOCKS).ids) == bytes(RUN_BLOCKS)
        assert time.monotonic() - started < 3, "a look-up waits no longer than it may"
        await fails(run.get(tier))
        assert time.monotonic() - started < 20


@on_loop
async def test_a_look_up_goes_on_for_the_next_who_asks(site: Site) -> None:
    run = Run("a", RUN_BLOCKS)
    async with site.tier() as tier:
        await run.put(tier)
    async with site.tier("node-b") as tier:
        site.proxy.faults = Faults(bytes_per_s=2000)
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await tier.contains(FAMILY, run.ids)
        await eventually(lambda: tier.known(run.ids) == b"\1" * RUN_BLOCKS, "the answer comes")


@on_loop
async def test_a_connection_cut_while_reading_gives_nothing_wrong(site: Site) -> None:
    async with site.tier(retries=0) as tier:
        run = Run("a", RUN_BLOCKS)
        await run.put(tier)
        for cut_after in (0, 100, 1000, 20_000, 60_000):
            site.proxy.faults = Faults(cut_after=cut_after)
            with contextlib.suppress(StoreError):
                assert not any(isinstance(answer, Block) for answer in await run.get(tier))
        site.proxy.faults = Faults()
        await eventually_got(tier, run)


@on_loop
async def test_a_write_of_unknown_outcome_is_counted_and_cleaned_up(site: Site) -> None:
    async with site.tier(retries=0) as tier:
        run = Run("a", RUN_BLOCKS)
        assert only(Kept.STORED, await Run("b", RUN_BLOCKS).put(tier))
        before = tier.usage().used_bytes
        site.proxy.faults = Faults(cut_after=0, only="PUT")  # written, and the answer lost
        await fails(run.put(tier))
        assert tier.known(run.ids) == bytes(RUN_BLOCKS)
        assert tier.usage().used_bytes > before, "it may be there, so it counts"
        site.proxy.faults = Faults()
        await eventually(lambda: tier.usage().used_bytes == before, "the doubtful object is deleted")
        assert only(Kept.STORED, await run.put(tier))
        assert await run.get(tier) == run.blocks


@on_loop
async def test_one_failed_object_does_not_fail_the_batch(site: Site) -> None:
    async with site.tier(retries=0) as tier:
        run = Run("a", 2 * RUN_BLOCKS)
        await run.put(tier)
        site.proxy.faults = Faults(answer=(500, "InternalError"), answer_times=1, only="GET")
        found = await run.get(tier)
        assert found.count(Absent.FAILED) == RUN_BLOCKS
        assert sum(isinstance(answer, Block) for answer in found) == RUN_BLOCKS


@on_loop
async def test_a_restarted_node_and_another_node_find_everything_without_a_list(site: Site) -> None:
    run = Run("a", 20 * RUN_BLOCKS + 3)
    async with site.tier(cap_bytes=8 << 20) as tier:
        await run.put(tier)
        whole = tier.usage().used_bytes - 3 * PAYLOAD_BYTES
    for owner, owned in (("node-a", whole), ("node-b", 0)):
        site.proxy.faults = faults = Faults()
        async with site.tier(owner, cap_bytes=8 << 20) as tier:
            assert tier.known(run.ids) == bytes(len(run.blocks))
            found = await tier.contains(FAMILY, run.ids)
            assert found == b"\1" * (20 * RUN_BLOCKS) + bytes(3)
            assert faults.count("HEAD") <= 2 * 8, "20 objects in two rounds of questions"
            assert (await run.get(tier))[:-3] == run.blocks[:-3]
            await eventually(lambda tier=tier, owned=owned: tier.usage().used_bytes == owned, "the ledger is read")
        assert not [request for request in faults.requests if "list-type" in request]


@on_loop
async def test_a_suffix_of_a_chain_is_found_by_its_position(site: Site) -> None:
    run = Run("a", 4 * RUN_BLOCKS)
    async with site.tier() as tier:
        await run.put(tier)
    async with site.tier("node-b") as tier:
        first = RUN_BLOCKS + 3
        ids = b"".join(run.split[first:])
        assert await tier.contains(FAMILY, ids, first) == b"\1" * (3 * RUN_BLOCKS - 3)
        into = [memoryview(bytearray(PAYLOAD_BYTES)) for _ in run.split[first:]]
        assert await tier.get(FAMILY, ids, into) == run.blocks[first:]
        assert into == run.payloads[first:]


@on_loop
async def test_nodes_that_write_the_same_at_once_share_it(site: Site) -> None:
    run = Run("a", 6 * RUN_BLOCKS)
    async with site.tier("node-a") as one, site.tier("node-b") as two:
        kept = await asyncio.gather(run.put(one), run.put(two))
        for first, second in zip(*kept, strict=True):
            assert {first, second} == {Kept.STORED, Kept.PRESENT}, "written once"
        assert await run.get(one) == await run.get(two) == run.blocks
        written = one.requests.bytes_written + two.requests.bytes_written
        assert one.usage().used_bytes + two.usage().used_bytes <= written


@on_loop
async def test_what_another_node_deleted_is_a_miss(site: Site) -> None:
    run = Run("a", 2 * RUN_BLOCKS)
    async with site.tier("node-a") as one, site.tier("node-b") as two:
        await run.put(one)
        await two.contains(FAMILY, run.ids)
        assert await one.clear() == 2 * RUN_BLOCKS
        assert only(Absent.MISSING, await run.get(two))
        assert two.known(run.ids) == bytes(2 * RUN_BLOCKS)
        assert only(Kept.STORED, await run.put(two))


@on_loop
async def test_clearing_a_tenant_reaches_what_others_wrote(site: Site) -> None:
    ours, theirs = Run("a", RUN_BLOCKS), Run("b", 3 * RUN_BLOCKS, OTHER)
    async with site.tier("node-a") as one, site.tier("node-b") as two:
        await ours.put(one)
        await theirs.put(one)
        assert await two.clear(tenant="tenant-b") == 3 * RUN_BLOCKS
        assert only(Absent.MISSING, await theirs.get(one))
        assert await ours.get(one) == ours.blocks


@on_loop
async def test_a_restarted_node_keeps_its_cap(site: Site) -> None:
    for start in range(4):
        async with site.tier(cap_bytes=10 * RUN_BLOCKS * PAYLOAD_BYTES) as tier:
            for number in range(5):
                await Run(f"run {start} {number}", RUN_BLOCKS).put(tier)
            assert tier.usage().used_bytes <= tier.usage().cap_bytes
            store = tier._bucket._open.writing
            objects = sum(len(chunk) for chunk in obstore.list(store, "runs"))
            assert objects <= 9, "objects of former lives were deleted for new ones"


@on_loop
async def test_expiry_takes_what_nobody_owns(site: Site) -> None:
    run = Run("a", 2 * RUN_BLOCKS)
    crashed = ObjectTier(site.options("gone"))
    await run.put(crashed)
    crashed._upkeep._catalogue.ledger.num_changes = 0  # it dies before its ledger is saved
    await crashed.close()
    async with site.tier("node-b", ttl_s=3600.0) as tier:
        assert await tier._upkeep.sweep() == 0
        tier._upkeep._clock = _Later(7200.0)
        assert await tier._upkeep.sweep() == 2
        assert await tier.contains(FAMILY, run.ids) == bytes(2 * RUN_BLOCKS)


class _Later:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def now(self) -> float:
        return time.monotonic() + self._seconds

    def epoch(self) -> float:
        return time.time() + self._seconds


@on_loop
async def test_what_others_put_there_is_left_alone(site: Site) -> None:
    run = Run("a", RUN_BLOCKS)
    async with site.tier() as tier:
        await run.put(tier)
        store = tier._bucket._open.writing
        strangers = ["runs/readme.txt", f"runs/{'a' * 32}/8/short", "families/readme", f"families/{'b' * 32}"]
        for key in strangers:
            obstore.put(store, key, b"not ours")
        tier._upkeep._clock = _Later(30 * 86400.0)
        assert await tier._upkeep.sweep() == 1
        await run.put(tier)
        assert await tier.clear() == RUN_BLOCKS
        for key in strangers:
            assert obstore.get(store, key).bytes() == b"not ours"


@on_loop
async def test_a_damaged_ledger_is_begun_anew(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    run = Run("a", RUN_BLOCKS)
    async with site.tier() as tier:
        await run.put(tier)
        store = tier._bucket._open.writing
    obstore.put(store, "owners/node-a", b"garbage")
    async with site.tier() as tier:
        assert only(Kept.STORED, await Run("b", RUN_BLOCKS).put(tier))
        assert await tier.contains(FAMILY, run.ids) == b"\1" * RUN_BLOCKS, "what is there is found all the same"
    assert "damaged" in caplog.text


@on_loop
async def test_two_processes_of_one_owner_are_told_and_keep_both_shares(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async with site.tier() as one, site.tier() as two:
        await Run("a", RUN_BLOCKS).put(one)
        await Run("b", RUN_BLOCKS).put(two)
        for tier in (one, two, two, one, one):
            await tier._upkeep.save()
        assert len(one._catalogue.ledger) == len(two._catalogue.ledger) == 2
    assert "another process keeps the ledger of 'node-a'" in caplog.text


@pytest.mark.parametrize("change", ["header", "first", "last", "short", "empty", "other"])
@on_loop
async def test_a_damaged_object_is_never_served_and_written_anew(site: Site, change: str) -> None:
    run, another = Run("a", RUN_BLOCKS), Run("b", RUN_BLOCKS)
    async with site.tier() as tier:
        await run.put(tier)
        await another.put(tier)
        store, shape = tier._bucket._open.writing, tier._catalogue.shape(FAMILY)
        key = shape.key(run.split[-1])
        body = bytearray(obstore.get(store, key).bytes())
        match change:
            case "header":
                body[40] ^= 8
            case "first":
                body[shape.header_bytes] ^= 1
            case "last":
                body[-1] ^= 128
            case "short":
                del body[-5000:]
            case "empty":
                body.clear()
            case "other":
                body = bytearray(obstore.get(store, shape.key(another.split[-1])).bytes())
        obstore.put(store, key, bytes(body), use_multipart=False)
        found = await run.get(tier)
        assert Absent.DAMAGED in found
        assert tier.usage().num_damaged == found.count(Absent.DAMAGED)
        assert only(Absent.MISSING, await run.get(tier))
        assert only(Kept.STORED, await run.put(tier))
        assert await run.get(tier) == run.blocks


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://bucket/x", "s3://NAME"),
        ("s3://", "s3://NAME"),
        ("s3://key:secret@bucket/x", "environment"),
        ("s3://bucket?cap=lots", "cap=lots"),
        ("s3://bucket?secret_access_key=x", "what can be set is cap, ttl"),
        ("s3://bucket?endpoint=ftp://x", "https://"),
    ],
)
def test_a_bad_url_is_refused_with_what_would_fit(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse_object_url(url, owner="a")
    assert "secret@" not in caught.value.message
