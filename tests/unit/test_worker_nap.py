"""Sleep and wake of a worker, where something does not go as it should."""

import asyncio

from headwater.engines.base import Engine
from headwater.errors import EngineFailed, HeadwaterError
from headwater.runtime.conformance import eventually
from headwater.runtime.registry.memory import MemoryRegistry, MemoryStore
from headwater.worker.nap import Nap
from headwater.worker.record import WorkerRecord


class Owner:
    """What a worker is told, with a stream that does not end by itself."""

    def __init__(self) -> None:
        self.num_streams = 1
        self.refusing: HeadwaterError | None = None
        self.ended: HeadwaterError | None = None
        self.failed: HeadwaterError | None = None

    def refuse(self, error: HeadwaterError | None) -> None:
        self.refusing = error

    def end_open(self, error: HeadwaterError) -> None:
        self.ended, self.num_streams = error, 0

    def on_failed(self, error: HeadwaterError) -> None:
        self.failed = error


class BadSleeper(Engine):
    """Falls asleep when nothing is open, and does not wake."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.asleep = False

    async def sleep(self) -> None:
        assert not self.owner.num_streams
        self.asleep = True

    async def wake(self) -> None:
        raise EngineFailed("no memory is left")


def test_streams_that_do_not_end_in_time_are_to_go_on_elsewhere_and_who_does_not_wake_has_failed() -> None:
    async def check() -> None:
        owner = Owner()
        engine = BadSleeper(owner)
        nap = Nap(engine, WorkerRecord(MemoryRegistry(MemoryStore())), owner, lambda: 0.1)
        nap.sleep()
        await asyncio.sleep(0)
        assert owner.refusing is not None
        assert owner.ended is None, "they have a moment"
        await eventually(lambda: engine.asleep, "it sleeps")
        assert owner.ended is not None
        assert owner.ended.retryable
        nap.wake()
        await eventually(lambda: owner.failed is not None, "it says so")
        assert "no memory is left" in str(owner.failed)
        assert owner.refusing is not None, "nothing new comes to it"
        nap.close()

    asyncio.run(check())
