"""The etcd registry against the contract, and through the outages that etcd has. With a real etcd."""

import asyncio
import json
import time
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from etcd_fixture import EtcdServer, need_etcd
from headwater.errors import ConfigError, Unavailable
from headwater.protocol.cluster import CatalogueEntry
from headwater.runtime.registry.base import InstanceGone, InstancePut, Outage, Registry
from headwater.runtime.registry.conformance import (
    RegistryConformance,
    example_card,
    example_instance,
    next_event,
    until_synced,
)
from headwater.runtime.registry.etcd import EtcdRegistry, open_etcd
from headwater.runtime.registry.etcd_gateway import Gateway


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    need_etcd()
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


class TestEtcdRegistry(RegistryConformance):
    @pytest.fixture(autouse=True)
    def _server(self, etcd: EtcdServer) -> None:
        self.etcd = etcd
        self.prefix = uuid.uuid4().hex

    def open_handle(self) -> Registry:
        return EtcdRegistry(Gateway([self.etcd.url], f"{self.prefix}/"), ttl_s=2.0)

    def crash(self, registry: Registry) -> None:
        """Its leases run out, only sooner."""
        assert isinstance(registry, EtcdRegistry)
        for lease in registry._leases:
            lease.abandon()
            body = json.dumps({"ID": str(lease.lease)}).encode()
            urllib.request.urlopen(f"{self.etcd.url}/v3/lease/revoke", body, timeout=5).close()


Scenario = Callable[[EtcdServer, Callable[[], EtcdRegistry]], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[Scenario], None]]:
    """A scenario with an etcd of its own, to be broken."""
    need_etcd()
    server = EtcdServer(tmp_path)

    def run(scenario: Scenario) -> None:
        server.start()

        async def main() -> None:
            handles: list[EtcdRegistry] = []

            def open_handle() -> EtcdRegistry:
                handles.append(EtcdRegistry(Gateway([server.url], "test/"), ttl_s=1.0))
                return handles[-1]

            await scenario(server, open_handle)
            for handle in handles:
                await handle.close()

        asyncio.run(main())

    yield run
    server.stop()


async def outage(watch) -> Outage:
    while True:
        event = await next_event(watch, outages=True)
        if isinstance(event, Outage):
            return event
        assert not isinstance(event, InstanceGone), "an outage is no news about workers"


def test_an_outage_longer_than_the_leases_changes_nothing_and_all_come_back(play) -> None:
    async def scenario(etcd: EtcdServer, open_handle: Callable[[], EtcdRegistry]) -> None:
        owner, other, reader = open_handle(), open_handle(), open_handle()
        lease = await owner.register(example_instance("w1"))
        await other.register(example_instance("w2"))
        watch = reader.watch()
        assert len(await until_synced(watch)) == 2
        etcd.stop()
        assert not (await outage(watch)).reachable
        await lease.update(example_instance("w1", kv_blocks=7))
        other._leases[0].abandon()  # the other worker dies while nobody can say so
        await asyncio.sleep(1.5)
        etcd.start()
        began = time.monotonic()
        assert (await outage(watch)).reachable
        assert await next_event(watch) == InstancePut(example_instance("w1", kv_blocks=7))
        assert time.monotonic() - began < 5.0
        assert await next_event(watch) == InstanceGone("w2")
        assert [found.worker_id for found in await reader.instances()] == ["w1"]

    play(scenario)


def test_a_frozen_etcd_is_noticed(play) -> None:
    async def scenario(etcd: EtcdServer, open_handle: Callable[[], EtcdRegistry]) -> None:
        owner = open_handle()
        await owner.register(example_instance())
        watch = owner.watch()
        await until_synced(watch)
        etcd.freeze()
        try:
            assert not (await outage(watch)).reachable
            with pytest.raises(Unavailable, match="cannot be reached"):
                await owner.put_model(CatalogueEntry("m", example_card("m")))
        finally:
            etcd.thaw()
        assert (await outage(watch)).reachable

    play(scenario)


def test_a_wiped_etcd_gets_everything_back(play) -> None:
    async def scenario(etcd: EtcdServer, open_handle: Callable[[], EtcdRegistry]) -> None:
        owner, reader = open_handle(), open_handle()
        entry = CatalogueEntry("org/m", example_card("org/m"))
        old = CatalogueEntry("old", example_card("old"))
        await owner.put_model(entry)
        await reader.put_model(old)
        await owner.register(example_instance())
        watch = reader.watch()
        assert len(await until_synced(watch)) == 3
        etcd.stop()
        etcd.wipe()
        etcd.start()
        for _ in range(500):
            instances, models = await reader.instances(), await reader.models()
            if len(instances) == 1 and len(models) == 2:
                break
            await asyncio.sleep(0.02)
        assert instances == [example_instance()]
        assert {model.name for model in models} == {"org/m", "old"}

    play(scenario)


def test_an_etcd_that_asks_who_is_there_is_told_and_told_again_when_it_forgot(play, tmp_path: Path) -> None:
    async def scenario(etcd: EtcdServer, _: Callable[[], EtcdRegistry]) -> None:
        secret = tmp_path / "password"
        secret.write_text("sesame\n")
        url = f"etcd://127.0.0.1:{etcd.port}/test?user=headwater&password-file={secret}"
        early = open_etcd(urlsplit(url))
        await early.put_model(CatalogueEntry("m", example_card("m")))  # nobody is asked yet
        etcd.let_in_only("headwater", "sesame", "test/")
        registry = open_etcd(urlsplit(url))
        assert [model.name for model in await registry.models()] == ["m"]
        await early.put_model(CatalogueEntry("n", example_card("n")))
        await registry.register(example_instance("w1"))
        watch = early.watch()
        assert len(await until_synced(watch)) == 3
        etcd.stop()
        assert not (await outage(watch)).reachable
        etcd.start()  # which has forgotten all tokens
        assert (await outage(watch)).reachable
        await registry.register(example_instance("w2"))
        assert await next_event(watch) == InstancePut(example_instance("w2"))
        secret.write_text("wrong")
        stranger = open_etcd(urlsplit(url))
        with pytest.raises(Unavailable, match="authentication failed") as caught:
            await stranger.models()
        assert "wrong" not in str(caught.value)
        secret.unlink()
        with pytest.raises(Unavailable, match="the password of etcd's user headwater cannot be read"):
            await stranger.models()
        for handle in (early, registry, stranger):
            await handle.close()

    play(scenario)


def test_the_next_endpoint_is_asked_when_one_does_not_answer(play) -> None:
    async def scenario(etcd: EtcdServer, open_handle: Callable[[], EtcdRegistry]) -> None:
        gateway = Gateway(["http://127.0.0.1:9", etcd.url], "test/")
        registry = EtcdRegistry(gateway)
        await registry.put_model(CatalogueEntry("m", example_card("m")))
        assert [model.name for model in await registry.models()] == ["m"]
        assert gateway.address == etcd.url
        await registry.close()

    play(scenario)


@pytest.mark.parametrize("url", ["etcd:///x", "etcd://user:secret@host/x"])
def test_urls_that_name_no_etcd(url: str) -> None:
    with pytest.raises(ConfigError):
        open_etcd(urlsplit(url))


def test_certificates_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        open_etcd(urlsplit("etcds://host/x?ca=/nowhere"))
    with pytest.raises(ConfigError, match="'password' is unknown"):
        open_etcd(urlsplit("etcds://host/x?password=1"))
    with pytest.raises(ConfigError, match="'ca' is unknown"):
        open_etcd(urlsplit("etcd://host/x?ca=file"))
    with pytest.raises(ConfigError, match="go together"):
        open_etcd(urlsplit("etcd://host/x?user=me"))
