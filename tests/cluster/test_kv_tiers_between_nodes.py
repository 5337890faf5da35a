"""Nodes that share KV: real store processes, blocks read from another node's host tier and from an object store."""

import asyncio
import socket
import subprocess
from pathlib import Path

import msgspec
import pytest

from headwater.kv.block import ROOT
from headwater.kv.node.client import StoreClient
from headwater.kv.node.store import Piece
from headwater.kv.stores.conformance import OTHER, PAYLOAD_BYTES, Run
from kv_process import client_of, store_process
from object_servers import ObjectServer


def chain_of(run: Run) -> Piece:
    return Piece(run.family, run.ids, 0, ROOT)


async def load(client: StoreClient, run: Run) -> tuple[str, int]:
    """From which tier first, and how many blocks; compared with what was stored."""
    found = await client.match(chain_of(run), timeout_s=5.0)
    into = [memoryview(bytearray(len(payload))) for payload in run.payloads]
    loaded = await client.load(chain_of(run), into, timeout_s=10.0)
    assert into[:loaded] == run.payloads[:loaded]
    return (found[0].tier if found else ""), loaded


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_prefix_of_one_node_is_used_by_another(run_folder: Path) -> None:
    run, address = Run("a", 64), f"127.0.0.1:{free_port()}"

    async def check() -> None:
        async with client_of(run_folder / "one") as one, client_of(run_folder / "two") as two:
            assert await one.offer(chain_of(run), run.payloads) == 64
            assert await load(two, run) == ("peer", 64)
            assert await load(two, run) == ("host", 64)
            report = await two.status()
            peer = next(tier for tier in report.tiers if tier.tier == "peer")
            assert (peer.num_hits, peer.num_damaged) == (64, 0)
            first.kill()
            assert await load(two, Run("b", 8)) == ("", 0), "a peer that died is a miss"
            assert await load(two, run) == ("host", 64)

    with (
        store_process(run_folder / "one", "--listen", address) as first,
        store_process(run_folder / "two", "--peer", address),
    ):
        asyncio.run(check())


def test_a_tenant_that_comes_through_peers_alone_keeps_to_its_share(run_folder: Path) -> None:
    """Nothing of it is ever written on the second node: all is read from the first, where it has no limit."""
    ours = [Run(f"ours {number}", 16, msgspec.structs.replace(OTHER, tenant="ours")) for number in range(8)]
    flood = [Run(f"flood {number}", 16, msgspec.structs.replace(OTHER, tenant="flood")) for number in range(16)]
    address = f"127.0.0.1:{free_port()}"

    async def held(client: StoreClient) -> dict[str, int]:
        return {one.tenant: one.used_bytes // PAYLOAD_BYTES for one in (await client.status()).tiers[0].tenants}

    async def check() -> None:
        async with client_of(run_folder / "one") as one, client_of(run_folder / "two") as two:
            for run in flood:
                assert await one.offer(chain_of(run), run.payloads) == 16
            assert await held(one) == {"": 256}
            for run in ours:
                assert await two.offer(chain_of(run), run.payloads) == 16
            full = (await held(two))[""]
            two.limit("flood", 0.2)
            for run in flood:
                assert await load(two, run) == ("peer", 16)
            assert 16 <= (await held(two))["flood"] <= 0.2 * full + 16
            assert (await held(two))[""] >= 0.8 * full - 16
            two.limit("flood", 1.0)
            for run in flood:
                await load(two, run)
            assert sum([two.num_in_host(run.ids) for run in ours]) < 0.25 * full, "as much as anybody"

    with (
        store_process(run_folder / "one", "--listen", address),
        store_process(run_folder / "two", "--peer", address, "--host", "1MiB", "--min-block", "4KiB"),
    ):
        asyncio.run(check())


def test_a_new_node_finds_what_a_killed_one_left_in_the_bucket(
    run_folder: Path, s3_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    run = Run("a", 300)
    flags = ("--object", s3_server.url("nodes"), "--admission", "all")

    async def write(process: subprocess.Popen[bytes]) -> None:
        async with client_of(run_folder / "one") as client:
            await client.offer(chain_of(run), run.payloads)
            stored = 0
            while stored < 300:
                report = await client.status()
                stored = next(tier for tier in report.tiers if tier.tier == "object").num_stored
                await asyncio.sleep(0.02)
        process.kill()

    async def read() -> None:
        async with client_of(run_folder / "two") as client:
            tier, loaded = await load(client, run)
            assert (tier, loaded) == ("object", 256), "four whole objects of 64 blocks"

    with store_process(run_folder / "one", *flags, "--owner", "one") as process:
        asyncio.run(write(process))
    with store_process(run_folder / "two", *flags, "--owner", "two"):
        asyncio.run(read())


def test_a_wrong_bucket_keeps_nobody_from_serving(
    run_folder: Path, s3_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    run = Run("a", 200)

    async def check() -> None:
        async with client_of(run_folder / "one") as client:
            assert await client.offer(chain_of(run), run.payloads) == 200
            assert await load(client, run) == ("host", 200)
            assert await load(client, Run("b", 200)) == ("", 0)
            problem = ""
            while not problem:
                report = await client.status()
                problem = next(tier for tier in report.tiers if tier.tier == "object").problem
                await asyncio.sleep(0.02)
            assert "no such bucket" in problem

    with store_process(
        run_folder / "one", "--object", s3_server.url("x", bucket="no-such-bucket"), "--admission", "all"
    ):
        asyncio.run(check())
