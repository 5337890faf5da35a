"""What only a registry in a folder can suffer: half-dead files, foreign files, wiped folders, processes that fork."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headwater.errors import ConfigError, Unavailable
from headwater.protocol.cluster import CatalogueEntry
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.registry.base import (
    InstanceGone,
    InstancePut,
    ModelGone,
    ModelPut,
    Outage,
    RegistryEvent,
    Synced,
)
from headwater.runtime.registry.conformance import example_card, example_instance, next_event, until_synced
from headwater.runtime.registry.file import FileRegistry
from headwater.runtime.registry.folder import MAX_CATALOGUE_BYTES
from headwater.runtime.registry.records import MAX_RECORD_BYTES

ENTRY = CatalogueEntry("org/model", example_card())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "registry"


@contextlib.asynccontextmanager
async def handles(folder: Path, count: int) -> AsyncIterator[list[FileRegistry]]:
    made = [FileRegistry(folder) for _ in range(count)]
    try:
        yield made
    finally:
        for registry in made:
            await registry.close()


async def read_all(watch: AsyncIterator[RegistryEvent], into: list[RegistryEvent]) -> None:
    """One by one, so that others can look on."""
    async for event in watch:
        into += [event]


def test_folder_and_files_are_private(folder: Path) -> None:
    async def check() -> None:
        old = os.umask(0)
        try:
            async with handles(folder, 1) as [registry]:
                await registry.register(example_instance())
                await registry.put_model(ENTRY)
                for path in (folder, folder / "instances"):
                    assert stat.S_IMODE(path.stat().st_mode) == 0o700
                for path in (folder / "instances" / "worker-1", folder / "catalogue.json", folder / "lock"):
                    assert stat.S_IMODE(path.stat().st_mode) == 0o600
        finally:
            os.umask(old)

    run_leak_checked(check())


def test_a_folder_open_to_others_is_refused(folder: Path) -> None:
    async def check() -> None:
        os.mkdir(folder)
        os.chmod(folder, 0o755)
        async with handles(folder, 1) as [registry]:
            with pytest.raises(ConfigError, match="mode 0755") as caught:
                await registry.register(example_instance())
            assert f"chmod 700 {folder}" in (caught.value.hint or "")

    run_leak_checked(check())


@pytest.mark.parametrize("opened", [".", "instances"])
def test_what_others_could_have_put_into_a_folder_is_not_read(folder: Path, opened: str) -> None:
    async def check() -> None:
        async with handles(folder, 2) as [owner, reader]:
            await owner.register(example_instance())
            await owner.put_model(ENTRY)
            os.chmod(folder / opened, 0o777)
            watch = reader.watch()
            event = await next_event(watch, outages=True)
            assert isinstance(event, Outage)
            assert "mode 0777" in event.reason
            with pytest.raises(ConfigError, match="mode 0777"):
                await reader.models()
            os.chmod(folder / opened, 0o700)
            assert await until_synced(watch) == [ModelPut(ENTRY), InstancePut(example_instance())]

    run_leak_checked(check())


def test_a_path_that_cannot_be_a_folder_is_unavailable(tmp_path: Path) -> None:
    async def check() -> None:
        (tmp_path / "file").write_text("x")
        async with handles(tmp_path / "file", 1) as [registry]:
            with pytest.raises(Unavailable, match="cannot be reached"):
                await registry.register(example_instance())
            watch = registry.watch()
            event = await next_event(watch, outages=True)
            assert isinstance(event, Outage)
            assert not event.reachable

    run_leak_checked(check())


def test_records_can_be_read_by_people(folder: Path) -> None:
    async def check() -> None:
        async with handles(folder, 1) as [registry]:
            await registry.register(example_instance())
            text = (folder / "instances" / "worker-1").read_text()
            assert text.startswith('{"worker_id":"worker-1","role":"both","state":"ready"')

    run_leak_checked(check())


def test_foreign_and_damaged_entries_are_ignored_and_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with handles(folder, 2) as [owner, reader]:
            await owner.register(example_instance("good"))
            instances = folder / "instances"
            garbage = {
                "empty": b"",
                "noise": os.urandom(5000),
                "half": (instances / "good").read_bytes()[:100],
                "liar": (instances / "good").read_bytes(),
                "long": b'{"worker_id":"long"' + b" " * MAX_RECORD_BYTES + b"}",
                "deep": b"[" * 100_000,
                "bad name": b"{}",
            }
            locked = []
            for name, content in garbage.items():
                (instances / name).write_bytes(content)
                locked.append(os.open(instances / name, os.O_RDWR))
                fcntl.flock(locked[-1], fcntl.LOCK_EX)
            os.mkfifo(instances / "pipe")
            (instances / "folder").mkdir()
            (instances / "link").symlink_to("/etc/passwd")
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(instances / "socket"))
            watch = reader.watch()
            assert await until_synced(watch) == [InstancePut(example_instance("good"))]
            await asyncio.sleep(0.6)
            for name in garbage:
                reports = [
                    r
                    for r in caplog.records
                    if r.getMessage().startswith(f"ignoring registry record {instances / name}:")
                ]
                assert len(reports) == 1, name
            for fd in locked:
                os.close(fd)
            await owner.register(example_instance("better"))
            assert await next_event(watch) == InstancePut(example_instance("better"))

    run_leak_checked(check())


def test_files_of_dead_owners_and_leftovers_are_removed(folder: Path) -> None:
    async def check() -> None:
        async with handles(folder, 2) as [owner, reader]:
            await owner.register(example_instance("alive"))
            instances = folder / "instances"
            (instances / "dead").write_bytes((instances / "alive").read_bytes().replace(b'"alive"', b'"dead"'))
            (instances / ".new-interrupted").write_bytes(b"half")
            watch = reader.watch()
            assert await until_synced(watch) == [InstancePut(example_instance("alive"))]
            await eventually(lambda: sorted(os.listdir(instances)) == ["alive"], "the cleaning")

    run_leak_checked(check())


def test_readers_never_see_half_a_record(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with handles(folder, 2) as [owner, reader]:
            watch = reader.watch()
            await until_synced(watch)
            seen: list[RegistryEvent] = []
            reading = asyncio.ensure_future(read_all(watch, seen))
            lease = await owner.register(example_instance(host="h" * 100_000))
            for number in range(100):
                await lease.update(example_instance(kv_blocks=number, host="h" * (100_000 - 900 * number)))
            await eventually(
                lambda: bool(seen) and isinstance(seen[-1], InstancePut) and seen[-1].instance.kv_blocks == 99,
                "the last",
            )
            assert all(isinstance(event, InstancePut) for event in seen)
            reading.cancel()
        assert not caplog.records

    run_leak_checked(check())


@pytest.mark.parametrize("recreate", [False, True])
def test_a_wiped_folder_is_restored_and_watchers_keep_their_picture(folder: Path, recreate: bool) -> None:
    async def check() -> None:
        async with handles(folder, 3) as [one, two, reader]:
            await one.register(example_instance("worker-1"))
            await two.register(example_instance("worker-2"))
            await one.put_model(ENTRY)
            idle = CatalogueEntry("scaled/to-zero", example_card("scaled/to-zero"))
            await reader.put_model(idle)
            watch = reader.watch()
            await until_synced(watch)
            seen: list[RegistryEvent] = []
            reading = asyncio.ensure_future(read_all(watch, seen))
            shutil.rmtree(folder)
            if recreate:
                os.mkdir(folder, 0o700)
            names = {"worker-1", "worker-2"}
            await eventually(lambda: names <= _entries(folder / "instances"), "registration")
            await eventually(lambda: (folder / "catalogue.json").exists(), "the catalogue")
            async with handles(folder, 1) as [fresh]:
                for _ in range(100):
                    models = {entry.name for entry in await fresh.models()}
                    if models == {"org/model", "scaled/to-zero"}:
                        break
                    await asyncio.sleep(0.02)
                assert models == {"org/model", "scaled/to-zero"}
                assert {found.worker_id for found in await fresh.instances()} == names
            await asyncio.sleep(0.3)
            assert not [event for event in seen if isinstance(event, InstanceGone | ModelGone)]
            outages = [event.reachable for event in seen if isinstance(event, Outage)]
            assert outages in ([], [False, True])
            reading.cancel()

    run_leak_checked(check())


def _entries(path: Path) -> set[str]:
    try:
        return set(os.listdir(path))
    except FileNotFoundError:
        return set()


def test_removing_one_record_is_not_news_of_a_death_and_is_mended(folder: Path) -> None:
    async def check() -> None:
        async with handles(folder, 2) as [owner, reader]:
            lease = await owner.register(example_instance())
            watch = reader.watch()
            await until_synced(watch)
            (folder / "instances" / "worker-1").unlink()
            await eventually(lambda: "worker-1" in _entries(folder / "instances"), "the record")
            await asyncio.sleep(0.3)
            await lease.update(example_instance(kv_blocks=5))
            assert await next_event(watch) == InstancePut(example_instance(kv_blocks=5))
            await lease.release()
            assert await next_event(watch) == InstanceGone("worker-1")

    run_leak_checked(check())


def test_a_worker_that_dies_while_its_record_is_gone_is_gone(folder: Path) -> None:
    async def check() -> None:
        async with handles(folder, 1) as [reader]:
            await reader.instances()
            path = folder / "instances" / "worker-1"
            data = (await _record_of(folder)).replace(b'"template"', b'"worker-1"')
            path.write_bytes(data)
            fd = os.open(path, os.O_RDWR)
            fcntl.flock(fd, fcntl.LOCK_EX)
            watch = reader.watch()
            assert len(await until_synced(watch)) == 1
            path.unlink()
            event = await next_event(watch, outages=True)
            assert isinstance(event, Outage)
            assert not event.reachable
            assert "worker-1" in event.reason
            os.close(fd)
            assert await next_event(watch) == InstanceGone("worker-1")
            assert await next_event(watch, outages=True) == Outage(reachable=True)

    run_leak_checked(check())


async def _record_of(folder: Path) -> bytes:
    async with handles(folder, 1) as [registry]:
        await registry.register(example_instance("template"))
        return (folder / "instances" / "template").read_bytes()


def test_a_name_taken_while_the_store_was_wiped_is_reported_not_fought_over(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with handles(folder, 1) as [owner]:
            await owner.register(example_instance(kv_blocks=1))
            path = folder / "instances" / "worker-1"
            data = path.read_bytes()
            rival = os.open(folder / "rival", os.O_RDWR | os.O_CREAT, 0o600)
            os.write(rival, data.replace(b'"kv_blocks":1', b'"kv_blocks":2'))
            fcntl.flock(rival, fcntl.LOCK_EX)
            os.replace(folder / "rival", path)
            await eventually(lambda: "lost the registration" in caplog.text, "the report")
            await asyncio.sleep(0.6)
            assert caplog.text.count("lost the registration") == 1
            assert [found.kv_blocks for found in await owner.instances()] == [2]
            os.close(rival)
            await eventually(lambda: b'"kv_blocks":1' in path.read_bytes(), "the owner's return")

    run_leak_checked(check())


def test_an_update_during_an_outage_is_written_afterwards(folder: Path) -> None:
    async def check() -> None:
        async with handles(folder, 2) as [owner, reader]:
            lease = await owner.register(example_instance(state="starting"))
            watch = reader.watch()
            await until_synced(watch)
            aside = folder.with_name("aside")
            os.rename(folder, aside)
            os.mkfifo(folder)
            await lease.update(example_instance(state="ready"))
            event = await next_event(watch, outages=True)
            assert isinstance(event, Outage)
            assert not event.reachable
            with pytest.raises(Unavailable):
                await reader.put_model(ENTRY)
            os.unlink(folder)
            assert await next_event(watch) == InstancePut(example_instance(state="ready"))
            shutil.rmtree(aside)

    run_leak_checked(check())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"generation":1,"models":{}}'])
def test_a_damaged_catalogue_is_ignored_and_replaced_by_the_next_change(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with handles(folder, 2) as [writer, reader]:
            await writer.put_model(ENTRY)
            watch = reader.watch()
            assert ModelPut(ENTRY) in await until_synced(watch)
            (folder / "catalogue.json").write_bytes(content)
            await eventually(lambda: "ignoring the model catalogue" in caplog.text, "the report")
            other = CatalogueEntry("other", example_card("other"))
            await writer.put_model(other)
            assert await next_event(watch) == ModelPut(other)
            assert {entry.name for entry in await reader.models()} == {"org/model", "other"}

    run_leak_checked(check())


def test_a_catalogue_that_would_be_too_large_is_refused(folder: Path) -> None:
    async def check() -> None:
        async with handles(folder, 1) as [registry]:
            card = example_card("x" * 200)
            huge = CatalogueEntry("huge", type(card)(**{**_fields(card), "architecture": "x" * MAX_CATALOGUE_BYTES}))
            with pytest.raises(ConfigError, match="catalogue"):
                await registry.put_model(huge)
            await registry.put_model(ENTRY)
            assert await registry.models() == [ENTRY]

    run_leak_checked(check())


def _fields(card: object) -> dict[str, object]:
    return {name: getattr(card, name) for name in card.__struct_fields__}  # type: ignore[attr-defined]


def test_a_forked_child_does_not_keep_a_dead_worker_alive(folder: Path) -> None:
    script = (
        "import asyncio, os, sys, time\n"
        "from pathlib import Path\n"
        "from headwater.runtime.registry.file import FileRegistry\n"
        "from headwater.runtime.registry.conformance import example_instance\n"
        "async def main():\n"
        "    registry = FileRegistry(Path(sys.argv[1]))\n"
        "    lease = await registry.register(example_instance())\n"
        "    await lease.update(example_instance(kv_blocks=3))\n"
        "asyncio_loop = asyncio.new_event_loop()\n"
        "asyncio_loop.run_until_complete(main())\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(child, flush=True)\n"
        "time.sleep(60)\n"
    )

    async def check() -> None:
        async with handles(folder, 1) as [reader]:
            watch = reader.watch()
            await until_synced(watch)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", script, str(folder), stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            child = int(await process.stdout.readline())
            assert isinstance(await next_event(watch), InstancePut)
            try:
                process.kill()
                while isinstance(event := await next_event(watch), InstancePut):
                    assert event.instance.kv_blocks == 3
                assert event == InstanceGone("worker-1")
            finally:
                os.kill(child, 9)
                await process.wait()
                process._transport.close()  # type: ignore[attr-defined]

    asyncio.run(check())


def test_many_registrations_at_once(folder: Path) -> None:
    async def check() -> None:
        async with handles(folder, 5) as [reader, *owners]:
            watch = reader.watch()
            await until_synced(watch)
            names = [f"worker-{number}" for number in range(200)]
            await asyncio.gather(*(owners[i % 4].register(example_instance(name)) for i, name in enumerate(names)))
            found = set()
            while len(found) < 200:
                event = await next_event(watch)
                assert isinstance(event, InstancePut)
                found.add(event.instance.worker_id)
            await owners[0].close()
            gone = set()
            while len(gone) < 50:
                event = await next_event(watch)
                assert isinstance(event, InstanceGone)
                gone.add(event.worker_id)
            assert gone == set(names[0::4])

    run_leak_checked(check())


def test_polling_alone_is_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.runtime.registry.keeper.Inotify.open", lambda: None)

    async def check() -> None:
        async with handles(folder, 2) as [owner, reader]:
            watch = reader.watch()
            await until_synced(watch)
            await owner.register(example_instance())
            assert await next_event(watch) == InstancePut(example_instance())
            await owner.close()
            assert await next_event(watch) == InstanceGone("worker-1")

    run_leak_checked(check())


def test_a_held_store_lock_delays_but_does_not_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.runtime.registry.folder.LOCK_TIMEOUT_S", 0.1)

    async def check() -> None:
        async with handles(folder, 1) as [registry]:
            await registry.put_model(ENTRY)
            fd = os.open(folder / "lock", os.O_RDWR)
            fcntl.flock(fd, fcntl.LOCK_EX)
            with pytest.raises(Unavailable, match="lock"):
                await registry.register(example_instance())
            assert await registry.models() == [ENTRY]
            os.close(fd)
            await registry.register(example_instance())

    run_leak_checked(check())


def test_a_closed_handle_says_so(folder: Path) -> None:
    async def check() -> None:
        registry = FileRegistry(folder)
        await registry.close()
        with pytest.raises(ConfigError, match="closed"):
            await registry.instances()
        assert [event async for event in registry.watch()] == []

    run_leak_checked(check())


def test_sync_comes_once(folder: Path) -> None:
    async def check() -> None:
        async with handles(folder, 1) as [registry]:
            watch = registry.watch()
            seen: list[RegistryEvent] = []
            reading = asyncio.ensure_future(read_all(watch, seen))
            await asyncio.sleep(0.6)
            assert seen == [Synced()]
            reading.cancel()

    run_leak_checked(check())
