"""What every registry must do. Subclass, provide `open_handle` and `crash`, and let pytest collect the class."""

import asyncio
from collections.abc import AsyncIterator, Awaitable

import msgspec

from headwater.errors import ConfigError
from headwater.protocol import PROTOCOL_VERSION
from headwater.protocol.cluster import CatalogueEntry, Instance, ModelCard
from headwater.runtime.conformance import on_loop
from headwater.runtime.registry.base import (
    InstanceGone,
    InstancePut,
    ModelGone,
    ModelPut,
    Outage,
    Registry,
    RegistryEvent,
    Synced,
)

EVENT_TIMEOUT_S = 5.0


def example_card(name: str = "org/model") -> ModelCard:
    return ModelCard(
        name=name,
        served_names=[name],
        fingerprint="f" * 64,
        architecture="LlamaForCausalLM",
        dtype="float32",
        kv_layout="hw1.f32.l2.h2.d16.b16",
        max_model_len=4096,
        block_size=16,
        vocab_size=1000,
    )


def example_instance(worker_id: str = "worker-1", **changes: object) -> Instance:
    instance = Instance(
        worker_id=worker_id,
        role="both",
        state="ready",
        card=example_card(),
        request_address="inproc://requests",
        event_address="inproc://events",
        engine="mocker",
        version=PROTOCOL_VERSION,
    )
    return msgspec.structs.replace(instance, **changes)


async def next_event(watch: AsyncIterator[RegistryEvent], *, outages: bool = False) -> RegistryEvent:
    """The next event, within a deadline; news of outages is left out unless asked for."""
    while True:
        event = await asyncio.wait_for(anext(watch), EVENT_TIMEOUT_S)
        if outages or not isinstance(event, Outage):
            return event


async def until_synced(watch: AsyncIterator[RegistryEvent]) -> list[RegistryEvent]:
    events: list[RegistryEvent] = []
    while not isinstance(event := await next_event(watch), Synced):
        events.append(event)
    return events


class RegistryConformance:
    """The suite."""

    def open_handle(self) -> Registry:
        """Another handle on the store of this test."""
        raise NotImplementedError

    def crash(self, registry: Registry) -> None:
        """End the handle's leases as the death of its process would; nothing is tidied up."""
        raise NotImplementedError

    @on_loop
    async def test_empty_store_syncs_at_once(self) -> None:
        registry = self.open_handle()
        assert await until_synced(registry.watch()) == []
        assert await registry.instances() == []
        assert await registry.models() == []
        await registry.close()

    @on_loop
    async def test_watch_tells_what_exists_then_changes_in_order(self) -> None:
        owner, reader = self.open_handle(), self.open_handle()
        starting = example_instance(state="starting")
        lease = await owner.register(starting)
        await owner.put_model(CatalogueEntry("org/model", example_card()))
        watch = reader.watch()
        existing = await until_synced(watch)
        assert InstancePut(starting) in existing
        assert ModelPut(CatalogueEntry("org/model", example_card())) in existing
        assert len(existing) == 2
        ready = example_instance(state="ready", kv_blocks=7)
        await lease.update(ready)
        assert await next_event(watch) == InstancePut(ready)
        await lease.release()
        assert await next_event(watch) == InstanceGone("worker-1")
        await owner.close()
        await reader.close()

    @on_loop
    async def test_several_watches_each_get_everything(self) -> None:
        registry = self.open_handle()
        watches = [registry.watch() for _ in range(3)]
        for watch in watches:
            assert await until_synced(watch) == []
        await registry.register(example_instance())
        for watch in watches:
            assert await next_event(watch) == InstancePut(example_instance())
        await registry.close()

    @on_loop
    async def test_crash_of_an_owner_is_noticed(self) -> None:
        owner, other, reader = self.open_handle(), self.open_handle(), self.open_handle()
        await owner.register(example_instance("worker-1"))
        await other.register(example_instance("worker-2"))
        watch = reader.watch()
        assert len(await until_synced(watch)) == 2
        self.crash(owner)
        assert await next_event(watch) == InstanceGone("worker-1")
        assert [found.worker_id for found in await reader.instances()] == ["worker-2"]
        for registry in (owner, other, reader):
            await registry.close()

    @on_loop
    async def test_worker_id_of_a_live_owner_is_refused(self) -> None:
        first, second = self.open_handle(), self.open_handle()
        lease = await first.register(example_instance())
        for registry in (first, second):
            await _expect_config_error(registry.register(example_instance()), "worker-1")
        await lease.release()
        again = await second.register(example_instance(kv_blocks=1))
        assert [found.kv_blocks for found in await first.instances()] == [1]
        await again.release()
        await first.close()
        await second.close()

    @on_loop
    async def test_worker_id_of_a_dead_owner_is_free(self) -> None:
        first, second = self.open_handle(), self.open_handle()
        await first.register(example_instance())
        self.crash(first)
        await second.register(example_instance(kv_blocks=1))
        assert [found.kv_blocks for found in await second.instances()] == [1]
        await first.close()
        await second.close()

    @on_loop
    async def test_release_is_idempotent_and_ends_the_lease(self) -> None:
        registry = self.open_handle()
        lease = await registry.register(example_instance())
        await lease.release()
        await lease.release()
        await _expect_config_error(lease.update(example_instance()), "released")
        assert await registry.instances() == []
        await registry.close()
        await lease.release()

    @on_loop
    async def test_a_lease_carries_one_worker_only(self) -> None:
        registry = self.open_handle()
        lease = await registry.register(example_instance())
        await _expect_config_error(lease.update(example_instance("worker-2")), "worker-2")
        await registry.close()

    @on_loop
    async def test_names_are_checked(self) -> None:
        registry = self.open_handle()
        for bad in ("", ".", "..", "../x", "a/b", "a b", "-x", "x" * 129, "né", "a\n"):
            await _expect_config_error(registry.register(example_instance(bad)), "worker id")
        for bad in ("", "x" * 257, "a\nb"):
            await _expect_config_error(registry.put_model(CatalogueEntry(bad, example_card())), "model name")
        assert await registry.instances() == []
        await registry.close()

    @on_loop
    async def test_records_are_bounded(self) -> None:
        registry = self.open_handle()
        await _expect_config_error(registry.register(example_instance(host="x" * (1 << 20))), "bytes")
        await registry.close()

    @on_loop
    async def test_models_outlive_their_workers(self) -> None:
        owner, reader = self.open_handle(), self.open_handle()
        entry = CatalogueEntry("org/model", example_card())
        await owner.put_model(entry)
        await owner.register(example_instance())
        await owner.close()
        assert await reader.models() == [entry]
        assert await reader.instances() == []
        await reader.close()

    @on_loop
    async def test_models_are_replaced_and_removed(self) -> None:
        one, two = self.open_handle(), self.open_handle()
        watch = two.watch()
        await until_synced(watch)
        first = CatalogueEntry("m", example_card("m"))
        second = CatalogueEntry("m", msgspec.structs.replace(example_card("m"), max_model_len=8))
        await one.put_model(first)
        assert await next_event(watch) == ModelPut(first)
        await one.put_model(second)
        assert await next_event(watch) == ModelPut(second)
        await two.remove_model("m")
        assert await next_event(watch) == ModelGone("m")
        await two.remove_model("m")
        assert await one.models() == []
        await one.close()
        await two.close()

    @on_loop
    async def test_concurrent_model_changes_are_all_kept(self) -> None:
        handles = [self.open_handle() for _ in range(4)]
        names = [f"model-{number}" for number in range(20)]
        entries = [CatalogueEntry(name, example_card(name)) for name in names]
        await asyncio.gather(*(handles[i % 4].put_model(entry) for i, entry in enumerate(entries)))
        assert sorted(entry.name for entry in await handles[0].models()) == sorted(names)
        for handle in handles:
            await handle.close()

    @on_loop
    async def test_slow_watch_sees_the_newest_state(self) -> None:
        owner, reader = self.open_handle(), self.open_handle()
        watch = reader.watch()
        await until_synced(watch)
        lease = await owner.register(example_instance())
        short_lived = await owner.register(example_instance("short-lived"))
        await short_lived.release()
        for number in range(50):
            await lease.update(example_instance(kv_blocks=number))
        latest = -1
        while latest != 49:
            event = await next_event(watch)
            if isinstance(event, InstancePut) and event.instance.worker_id == "worker-1":
                assert event.instance.kv_blocks > latest or latest == -1
                latest = event.instance.kv_blocks
        await owner.close()
        await reader.close()

    @on_loop
    async def test_watch_ends_when_the_registry_is_closed(self) -> None:
        registry = self.open_handle()
        watch = registry.watch()
        await until_synced(watch)
        reading = asyncio.ensure_future(_collect(watch))
        await asyncio.sleep(0)
        await registry.close()
        assert await asyncio.wait_for(reading, EVENT_TIMEOUT_S) == []
        await registry.close()


async def _collect(watch: AsyncIterator[RegistryEvent]) -> list[RegistryEvent]:
    return [event async for event in watch]


async def _expect_config_error(call: Awaitable[object], words: str) -> None:
    refusal: ConfigError | None = None
    try:
        await call
    except ConfigError as error:
        refusal = error
    assert refusal is not None, f"accepted, but should have been refused: {words}"
    assert words in str(refusal), str(refusal)
