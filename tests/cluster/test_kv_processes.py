"""A node's store and its workers as processes: workers killed in the middle of writes, the command line, the agent."""

import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headwater.kv.block import ROOT, Family
from headwater.kv.node import wire
from headwater.kv.node.agent import StoreAgent
from headwater.kv.node.store import Piece
from kv_fixtures import buffers, chain, family_of, payload_of
from kv_process import store_process

SIZE = 64 << 10
CHILD = Path(__file__).parent.parent / "kv_worker_child.py"


@contextmanager
def store(folder: Path, *flags: str) -> Iterator[Path]:
    path = folder / "kv.sock"
    command = [sys.executable, "-m", "headwater", "kv", "serve", "--socket", str(path), "--min-block", "4KiB", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "KV store at" in process.stdout.readline()
        try:
            yield path
        finally:
            process.terminate()
            assert process.wait(20) == 0
            assert not path.exists()


def ask(path: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "headwater", "kv", words[0], "--socket", str(path), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def until_written_down(agent: StoreAgent) -> None:
    """Until the disk tier has what the host tier has."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        host, disk = agent._call(agent.client.status()).result(5).tiers
        if disk.num_blocks == host.num_blocks:
            return
        time.sleep(0.02)
    raise AssertionError("not within 10 s")


def worker(path: Path, number: int, seconds: float) -> "subprocess.Popen[bytes]":
    command = [sys.executable, str(CHILD), str(path), str(SIZE), str(number), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_workers_killed_in_the_middle_harm_nobody(tmp_path: Path) -> None:
    moment = random.Random(5)
    with store(tmp_path, "--host", "8MiB") as path:
        steady = worker(path, 100, 3.0)
        for number in range(4):
            with worker(path, number, 60.0) as victim:
                assert victim.stdout is not None
                assert victim.stdout.readline() == b"working\n"
                time.sleep(moment.uniform(0.0, 0.1))
                victim.send_signal(signal.SIGKILL)
        with steady:
            assert steady.wait(60) == 0
        deadline = time.monotonic() + 5.0
        while True:
            status = json.loads(ask(path, "stat", "--json")[1])
            host = status["tiers"][0]
            if host["used_bytes"] == host["num_blocks"] * SIZE or time.monotonic() > deadline:
                break
        assert host["used_bytes"] == host["num_blocks"] * SIZE, "what the dead had reserved is free again"
        assert host["num_damaged"] == 0
        code, text = ask(path, "verify")
        assert (code, " 0 damaged" in text) == (0, True), text


def test_the_operators_verbs(tmp_path: Path) -> None:
    with store(tmp_path, "--host", "16MiB", "--disk", f"{tmp_path}/tier:32MiB", "--admission", "all") as path:
        ids = chain("a", 10)
        run = Piece(family_of(SIZE, "acme"), b"".join(ids), 0, ROOT)
        with StoreAgent(path, "test") as agent:
            assert agent.offer(run, [memoryview(payload_of(one, SIZE)) for one in ids]).result(10) == 10
            until_written_down(agent)
        rows = {row["tier"]: row for row in json.loads(ask(path, "ls", "--json")[1])}
        assert {tier: (row["tenant"], row["num_blocks"]) for tier, row in rows.items()} == {
            "host": ("acme", 10),
            "disk": ("acme", 10),
        }
        blocks = json.loads(ask(path, "ls", "--tier", "disk", "--limit", "7", "--json")[1])
        assert [block["id"] for block in blocks] == [one.hex() for one in ids[:7]]
        assert json.loads(ask(path, "verify", "--json")[1])["disk"] == {"checked": 10, "damaged": 0}
        assert ask(path, "clear", "--tenant", "nobody") == (0, "0 blocks forgotten\n")
        code, text = ask(path, "clear", "--model", "n")
        assert (code, "--model n: nothing is stored of such a fingerprint" in text) == (2, True), text
        assert "there is model (not served here)" in text
        assert ask(path, "clear", "--tenant", "acme") == (0, "20 blocks forgotten\n")
        assert ask(path, "clear", "--model", "model")[0] == 2, "nothing of it is stored any more"
        assert "acme" not in ask(path, "ls")[1]
        code, text = ask(path, "serve", "--host", "1MiB")
        assert code == 2
        assert "another store serves" in text
    code, text = ask(path, "stat")
    assert code == 1
    assert "no KV store answers" in text


def test_a_restart_is_warm_from_disk(tmp_path: Path) -> None:
    flags = ("--host", "16MiB", "--disk", f"{tmp_path}/tier:32MiB", "--admission", "all")
    ids = chain("a", 20)
    run = Piece(family_of(SIZE), b"".join(ids), 0, ROOT)
    with store(tmp_path, *flags) as path, StoreAgent(path, "test") as agent:
        assert agent.offer(run, [memoryview(payload_of(one, SIZE)) for one in ids]).result(10) == 20
        until_written_down(agent)
    with store(tmp_path, *flags) as path, StoreAgent(path, "test") as agent:
        assert [(found.tier, found.num_blocks) for found in agent.match(run, timeout_s=5.0)] == [("disk", 20)]
        assert ask(path, "warm") == (0, "20 blocks brought from disk to the host tier\n")
        assert agent.num_in_host(run.ids) == 20
        into = buffers(20, SIZE)
        assert agent.load(run, into, timeout_s=5.0).result(10) == 20
        assert into == [payload_of(one, SIZE) for one in ids]


def test_shares_of_tenants_outlive_a_killed_store(tmp_path: Path) -> None:
    flags = ("--host", "4MiB", "--disk", f"{tmp_path}/tier:6MiB", "--admission", "all", "--share", "vip=0.25")

    def fill(agent: StoreAgent, tenant: str, first: int, count: int) -> None:
        for number in range(first, first + count):
            ids = chain(f"{tenant} {number}", 8)
            run = Piece(family_of(SIZE, tenant), b"".join(ids), 0, ROOT)
            before = disk(agent).num_stored
            assert agent.offer(run, [memoryview(payload_of(one, SIZE)) for one in ids]).result(10) == 8
            wait_for(lambda before=before: disk(agent).num_stored == before + 8)

    def tenants(path: Path) -> dict[str, tuple[int, float, float]]:
        status = json.loads(ask(path, "stat", "--json")[1])
        assert status["tiers"][1]["tier"] == "disk"
        rows = status["tiers"][1]["tenants"]
        return {one["tenant"]: (one["used_bytes"] // SIZE, one["guaranteed"], one["limit"]) for one in rows}

    with killed_store(tmp_path, *flags) as path, StoreAgent(path, "test") as agent:
        agent._loop.call_soon_threadsafe(agent.client.limit, "flood", 0.2)
        fill(agent, "vip", 0, 2)
        fill(agent, "ours", 0, 10)
        fill(agent, "flood", 0, 8)
        wait_for(lambda: disk(agent).num_blocks <= 78)  # the tier keeps a little room free
        before = tenants(path)
        assert before["vip"] == (16, 0.25, 1.0)
        assert before["flood"][0] > 0
        assert before["flood"][1:] == (0.0, 0.2)
        assert sum(blocks for blocks, _, _ in before.values()) > 72, "the disk is full"
    with store(tmp_path, *flags) as path, StoreAgent(path, "test") as agent:
        assert tenants(path) == before, "as it was, and before anybody has said a word"
        text = ask(path, "stat")[1]
        assert re.search(r"flood +disk .* 0\.2$", text, re.MULTILINE), text
        assert re.search(r"vip +disk .* 0\.25 +-$", text, re.MULTILINE), text
        fill(agent, "flood", 8, 8)
        after = tenants(path)
        assert after["vip"] == before["vip"]
        assert before["flood"][0] - 8 <= after["flood"][0] <= before["flood"][0] + 8
        assert after[""][0] >= before[""][0] - 8


def disk(agent: StoreAgent) -> wire.TierStatus:
    return agent._call(agent.client.status()).result(5).tiers[1]


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def killed_store(folder: Path, *flags: str) -> Iterator[Path]:
    """One that is killed at the end."""
    path = folder / "kv.sock"
    with store_process(path, "--min-block", "4KiB", *flags) as process:
        yield path
        process.kill()


def test_lower_tiers_may_keep_less_than_all_of_it(tmp_path: Path) -> None:
    flags = ("--host", "16MiB", "--disk", f"{tmp_path}/tier:32MiB", "--admission", "all", "--cold-format", "int8")
    ids = chain("a", 4)
    run = Piece(Family("m", "f32.test", "", 65536), b"".join(ids), 0, ROOT)
    payload = struct.pack("<16384f", *(number / 100 - 80 for number in range(16384)))
    with store(tmp_path, *flags) as path, StoreAgent(path, "test") as agent:
        assert agent.offer(run, [memoryview(payload)] * 4).result(10) == 4
        until_written_down(agent)
        assert {row["tier"]: row["payload_bytes"] for row in json.loads(ask(path, "ls", "--json")[1])} == {
            "host": 65536,
            "disk": 16384 + 16384 // 64 * 4,
        }
    with store(tmp_path, *flags) as path, StoreAgent(path, "test") as agent:
        into = buffers(4, 65536)
        assert agent.load(run, into, timeout_s=5.0).result(10) == 4
        pairs = zip(struct.unpack("<16384f", payload), struct.unpack("<16384f", into[3]), strict=True)
        assert 0 < max(abs(exact - kept) for exact, kept in pairs) <= 84 / 254
        assert ask(path, "verify")[0] == 0


def test_an_agent_without_a_store_finds_nothing_and_fails_nobody(tmp_path: Path) -> None:
    run = Piece(family_of(SIZE), b"".join(chain("a", 2)), 0, ROOT)
    with StoreAgent(tmp_path / "kv.sock", "test", patience_s=0.0) as agent:
        assert agent.match(run) == []
        assert agent.load(run, buffers(2, SIZE), timeout_s=0.1).result(5) == 0
        assert agent.offer(run, buffers(2, SIZE)).result(5) == 0
    agent.close()


@pytest.mark.parametrize("flag", ["--host=lots", "--disk=/only/a/path", "--share=acme", "--share=a=2"])
def test_bad_settings_are_refused_by_name(tmp_path: Path, flag: str) -> None:
    code, text = ask(tmp_path / "kv.sock", "serve", flag)
    assert code == 2
    assert "error" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--disk", "{folder}/new/tier:999TiB"], "may take 999.0 TiB"),
        (["--disk", "{folder}/new/tier:64KiB"], "has no room for blocks"),
        (["--disk", "{folder}/new/tier:8MiB", "--object", "http://bucket"], "--object http://...: expected"),
        (["--disk", "{folder}/new/tier:8MiB", "--listen", "{taken}"], "{taken}"),
        (["--disk", "{folder}/new/tier:8MiB", "--host", "999TiB"], "does not fit"),
    ],
)
@pytest.mark.parametrize("was_there", [False, True])
def test_a_store_that_is_refused_leaves_nothing_behind(
    tmp_path: Path, flags: list[str], says: str, was_there: bool
) -> None:
    if was_there:
        (tmp_path / "new" / "tier").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = {"folder": tmp_path, "taken": f"127.0.0.1:{other.getsockname()[1]}"}
        code, text = ask(tmp_path / "sockets" / "kv.sock", "serve", *(flag.format_map(words) for flag in flags))
    assert (code, says.format_map(words) in text) == (2, True), text
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_that_is_refused_leaves_a_former_life_alone(tmp_path: Path) -> None:
    flags = ("--disk", f"{tmp_path}/tier:8MiB", "--host", "8MiB")
    with store(tmp_path, *flags) as path:
        code, text = ask(tmp_path / "other" / "kv.sock", "serve", *flags)
        assert (code, "is in use by another process" in text) == (2, True), text
        assert ask(path, "verify")[0] == 0
    before = {file: file.stat().st_ino for file in (tmp_path / "tier").iterdir()}
    assert len(before) == 4
    assert ask(tmp_path / "kv.sock", "serve", *flags, "--object", "http://bucket")[0] == 2
    assert {file: file.stat().st_ino for file in (tmp_path / "tier").iterdir()} == before


def test_of_two_shares_of_a_tenant_none_wins(tmp_path: Path) -> None:
    code, text = ask(tmp_path / "kv.sock", "serve", "--share", "acme=0.5", "--share", "acme=0.25")
    assert (code, "--share acme=0.25: acme has 0.5 already" in text) == (2, True), text


def test_a_table_that_is_too_small_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    command = [sys.executable, "-m", "headwater", "kv", "serve", "--socket", str(path), "--host", "16MiB"]
    with subprocess.Popen([*command, "--min-block", "256KiB"], stderr=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(30.0, process.kill)  # then there is nothing more to read
        limit.start()
        try:
            with StoreAgent(path, "test", patience_s=20.0) as agent:
                family = family_of(4096)
                for number in range(4):
                    ids = chain(f"run {number}", 40)
                    agent.offer(Piece(family, b"".join(ids), 0, ROOT), buffers(40, 4096)).result(10)
                assert process.stderr is not None
                lines = iter(process.stderr.readline, "")
                assert any("--min-block makes room" in line for line in lines)
        finally:
            limit.cancel()
            process.terminate()
