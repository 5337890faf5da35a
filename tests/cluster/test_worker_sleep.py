"""A worker that sleeps and wakes, over an attached server that can: nothing reaches it meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from handoff_bench import Member, Workers, prompt_of, request, workers

from headwater.config.schema import EngineConfig
from headwater.engines.attached.engine import AttachedEngine
from headwater.engines.base import Engine
from headwater.engines.mocker.engine import MockerEngine
from headwater.protocol.cluster import Instance
from headwater.protocol.frames import Sleep, Wake
from headwater.runtime.conformance import eventually, run_leak_checked
from vllm_double import VllmDouble
from word_tokenizer import write_word_tokenizer

PROMPT = prompt_of(40)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    path = write_word_tokenizer(tmp_path, 419)
    return EngineConfig(tokenizer=str(path), num_kv_blocks=200, max_num_seqs=8, mocker_decode_base_ms=2.0)


class Bed:
    """A worker and its state in the registry."""

    def __init__(self, cluster: Workers) -> None:
        self.member: Member = cluster["w"]
        self._cluster = cluster

    @property
    def instance(self) -> Instance:
        return self._cluster.store.feed.instances["w"]

    @property
    def state(self) -> str:
        return self.instance.state

    def tell(self, frame: Sleep | Wake) -> None:
        assert self.member.link is not None
        self.member.link.send(frame)

    async def is_now(self, state: str) -> None:
        await eventually(lambda: self.state == state, f"it is {state}")

    async def refused(self, stream: int) -> bool:
        """Whether a request is, so that another worker may take it."""
        self.member.send(request(stream, PROMPT))
        await eventually(lambda: stream in self.member.reasons, "it ends")
        error = self.member.errors.pop(stream, None)
        assert error is None or (error.code, error.retryable) == ("unavailable", True)
        return error is not None


@asynccontextmanager
async def bed(engine: Engine) -> AsyncIterator[Bed]:
    async with workers({"w": engine}) as cluster:
        yield Bed(cluster)


@asynccontextmanager
async def attached(config: EngineConfig, folder: Path) -> AsyncIterator[tuple[Bed, VllmDouble]]:
    double = VllmDouble(config, folder / "events")
    await double.start()
    try:
        async with bed(AttachedEngine(EngineConfig(tokenizer=config.tokenizer, attach=(double.url,)))) as found:
            yield found, double
    finally:
        await double.close()


def test_it_finishes_what_runs_sleeps_and_is_the_same_when_it_wakes(config: EngineConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(config, tmp_path) as (sleeper, double):
            sleeper.member.send(request(1, PROMPT, max_tokens=60))
            await eventually(lambda: sleeper.member.tokens.get(1), "it streams")
            sleeper.tell(Sleep())
            await sleeper.is_now("draining")
            assert double.asleep == 0, "it does not claim to sleep while it streams"
            await sleeper.is_now("asleep")
            assert double.asleep == 1, "nor before the memory is given back"
            assert sleeper.member.reasons[1] == "length"
            assert len(sleeper.member.tokens[1]) == 60
            asked = len(double.bodies)
            assert await sleeper.refused(2)
            assert len(double.bodies) == asked
            sleeper.tell(Sleep())
            sleeper.tell(Wake())
            await sleeper.is_now("ready")
            assert (double.asleep, double.sleeps_asked) == (0, 1), "it slept already"
            assert not await sleeper.refused(3)
            sleeper.tell(Sleep())
            sleeper.tell(Wake())
            await eventually(lambda: double.sleeps_asked == 2, "it sleeps again")
            await sleeper.is_now("ready")
            assert double.asleep == 0

    run_leak_checked(scenario())


def test_who_cannot_sleep_goes_on(config: EngineConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(config, tmp_path) as (sleeper, double):
            double.sleep_mode = False
            sleeper.tell(Sleep())
            await eventually(lambda: double.sleeps_asked == 1, "the server is asked")
            await sleeper.is_now("ready")
            assert sleeper.instance.num_failed_sleeps == 1
            assert not await sleeper.refused(1)
        async with bed(MockerEngine(config)) as sleeper:
            sleeper.tell(Sleep())
            await asyncio.sleep(0.05)
            assert sleeper.state == "ready"
            assert not await sleeper.refused(1)

    run_leak_checked(scenario())
