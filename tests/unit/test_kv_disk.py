"""The disk tier beyond the contract: crashes, reopening, damage, caps, other owners."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headwater.errors import ConfigError, TierUnavailable
from headwater.kv.block import Block
from headwater.kv.space import PAGE_BYTES
from headwater.kv.stores.base import Absent, Kept
from headwater.kv.stores.disk import DiskTier
from headwater.kv.stores.disk_files import DiskSizes
from kv_disk_child import LIMIT, open_tier
from kv_fixtures import blocks_of, buffers, chain, family_of, payload_of

CAP = 4 << 20
SIZE = 8192
CHILD = Path(__file__).parent.parent / "kv_disk_child.py"


@asynccontextmanager
async def opened(folder: Path, cap_bytes: int = CAP) -> AsyncIterator[DiskTier]:
    tier = open_tier(folder, cap_bytes)
    try:
        yield tier
    finally:
        await tier.close()


async def put(tier: DiskTier, name: str, count: int = 16, size: int = SIZE) -> list[Kept]:
    return await tier.put(family_of(size), *blocks_of(chain(name, count), size))


async def served(tier: DiskTier, name: str, count: int = 16, size: int = SIZE) -> list[Block | Absent]:
    """What the tier answers, having compared every block that it vouches for."""
    ids, into = chain(name, count), buffers(count, size)
    found = await tier.get(family_of(size), b"".join(ids), into)
    for block_id, answer, view in zip(ids, found, into, strict=True):
        if isinstance(answer, Block):
            assert view == payload_of(block_id, size)
    return found


def test_files_are_closed_to_others(tmp_path: Path) -> None:
    """Whatever the folder was copied from, and when the manifest is written again."""
    folder = tmp_path / "tier"

    async def check() -> None:
        async with opened(folder) as tier:
            await put(tier, "a")
        (folder / "manifest").chmod(0o644)
        (folder / "records").chmod(0o666)
        async with opened(folder) as tier:
            assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
            await put(tier, "b", size=2 * SIZE)
            assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}

    before = os.umask(0)
    try:
        asyncio.run(check())
    finally:
        os.umask(before)


def test_what_another_version_wrote_is_not_served(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path) as tier:
            assert await put(tier, "a") == 16 * [Kept.STORED]
        manifest = json.loads((tmp_path / "manifest").read_bytes())
        (tmp_path / "manifest").write_text(json.dumps(manifest | {"version": manifest["version"] - 1}))
        async with opened(tmp_path) as tier:
            assert tier.usage().num_blocks == 0
            assert await served(tier, "a") == 16 * [Absent.MISSING]
            assert await put(tier, "a") == 16 * [Kept.STORED]

    asyncio.run(check())


def test_a_manifest_cannot_ask_for_more_chunks_than_memory_has_room_for() -> None:
    def chunk_bytes(asked: int) -> int:
        return DiskSizes.of(8 << 30, 64, asked).chunk_bytes

    assert chunk_bytes(16 << 10) == 16 << 10
    assert chunk_bytes(PAGE_BYTES) == chunk_bytes(0) > 16 << 10


def test_a_closed_tier_reopens_warm(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path / "tier") as tier:
            await put(tier, "a")
            await tier.remove(chain("a", 16)[15])
            before = tier.usage().used_bytes
        async with opened(tmp_path / "tier") as tier:
            assert tier.num_useless == 0
            assert tier.usage().used_bytes == before
            found = await served(tier, "a")
            assert found[:15] == blocks_of(chain("a", 15), SIZE)[0]
            assert found[15] is Absent.MISSING
            tier.ledger.check()

    asyncio.run(check())


def test_killed_while_writing_it_reopens_whole(tmp_path: Path) -> None:
    """What the large run in bench/kv_crash.py does 200 times."""
    folder = tmp_path / "tier"
    moment = random.Random(7)
    for life in range(10):
        command = [sys.executable, str(CHILD), str(folder), str(CAP), str(SIZE), str(life)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"writing\n"
            time.sleep(moment.uniform(0.0, 0.05))
            child.send_signal(signal.SIGKILL)
        asyncio.run(check_whole(folder))


async def check_whole(folder: Path) -> None:
    async with opened(folder) as tier:
        tier.ledger.check()
        records = list(tier.ledger.records())
        assert tier.ledger.space.used_bytes == len(records) * SIZE, "capacity is leaked"
        limited = [record for _, record in records if tier.ledger.families[record.family].tenant == "tenant 1"]
        shares = [(one.tenant, one.used_bytes, one.limit) for one in tier.shares()]
        if records:
            others = (len(records) - len(limited)) * SIZE
            assert shares == [("", others, 1.0), ("tenant 1", len(limited) * SIZE, LIMIT)]
        for _, record in records:
            family = tier.ledger.families[record.family]
            into = buffers(1, SIZE)
            assert await tier.get(family, record.block.id, into) == [record.block]
            assert into[0] == payload_of(record.block.id, SIZE)
        assert tier.usage().num_damaged == 0


@pytest.mark.parametrize("name", ["manifest", "records", "blocks"])
def test_garbage_in_any_file_is_never_served(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "tier"

    async def check() -> None:
        async with opened(folder) as tier:
            for number in range(8):
                await put(tier, f"run {number}")
        noise = random.Random(3)
        with (folder / name).open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for _ in range(200):
                file.seek(noise.randrange(min(size, 200 * SIZE)))
                file.write(noise.randbytes(8))
        async with opened(folder) as tier:
            answers = [await served(tier, f"run {number}") for number in range(8)]
            lost = sum(isinstance(answer, Absent) for found in answers for answer in found)
            assert lost > 0
            for number in range(8):
                await put(tier, f"run {number}")
                await served(tier, f"run {number}")
            tier.ledger.check()

    asyncio.run(check())


def test_a_smaller_cap_drops_what_no_longer_fits(tmp_path: Path) -> None:
    folder = tmp_path / "tier"

    async def check() -> None:
        async with opened(folder, 8 << 20) as tier:
            for number in range(40):
                await put(tier, f"run {number}")
            many = tier.usage().num_blocks
        async with opened(folder, 4 << 20) as tier:
            assert 0 < tier.usage().num_blocks < many
            assert on_disk(folder) <= 4 << 20
            tier.ledger.check()
        async with opened(folder, 8 << 20) as tier:
            tier.ledger.check()
            assert tier.usage().num_blocks > 0

    asyncio.run(check())


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_the_cap_counts_every_byte_on_the_disk(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path / "tier") as tier:
            for number in range(300):
                await put(tier, f"run {number}")
            assert on_disk(tmp_path / "tier") <= CAP
            assert tier.usage().num_evicted > 0

    asyncio.run(check())


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path / "tier"):
            with pytest.raises(ConfigError, match="in use by another process"):
                open_tier(tmp_path / "tier", CAP)
        async with opened(tmp_path / "tier"):
            pass

    asyncio.run(check())


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        open_tier(tmp_path, CAP)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_more_than_the_disk_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are free"):
        open_tier(tmp_path / "tier", 1 << 50)


def test_a_medium_that_fails_is_paused(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path / "tier") as tier:
            await put(tier, "a")
            os.ftruncate(tier._files.fd, 0)
            for _ in range(8):
                found = await served(tier, "a")
                assert all(answer is Absent.FAILED for answer in found)
            with pytest.raises(TierUnavailable, match="fails again and again"):
                await served(tier, "a")

    asyncio.run(check())
