"""Two servers that hand KV over to each other by themselves, and a worker attached to each."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import msgspec
from handoff_bench import Workers, prompt_of, request, workers

from attached_stage import ServerDouble
from headwater.config.schema import EngineConfig
from headwater.engines.attached.engine import AttachedEngine
from headwater.runtime.conformance import eventually

PROMPT = prompt_of(100)

Double = TypeVar("Double", bound=ServerDouble)


class ServerPair(Generic[Double]):
    def __init__(self, prefill: Double, decode: Double, cluster: Workers) -> None:
        self.prefill, self.decode, self.cluster = prefill, decode, cluster
        self.worker = cluster["d"]

    async def answer(self, stream: int, *, expected_ms: float = 0.0, handed: bool = True) -> list[int]:
        where = self.cluster.prefill_at("p", expected_ms) if handed else None
        (tokens,) = await self.worker.run(request(stream, PROMPT, prefill=where))
        return tokens

    async def counted(self, done: int, fell_back: int) -> None:
        def reached() -> bool:
            counts = self.worker.counts
            return (counts.done, counts.fell_back) == (done, fell_back)

        await eventually(reached, f"{done} done, {fell_back} fell back")


@asynccontextmanager
async def server_pair(config: EngineConfig, prefill: Double, decode: Double) -> AsyncIterator[ServerPair[Double]]:
    """Starts and closes both. `config`: of the workers."""
    await prefill.start()
    await decode.start()
    try:
        engines = {
            name: AttachedEngine(msgspec.structs.replace(config, attach=(double.url,)))
            for name, double in (("p", prefill), ("d", decode))
        }
        async with workers(engines) as cluster:
            yield ServerPair(prefill, decode, cluster)
    finally:
        await prefill.close()
        await decode.close()
