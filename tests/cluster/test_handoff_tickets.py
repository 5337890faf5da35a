"""Hand-offs between attached servers that move KV themselves: what a prefill ends with reaches the decode unchanged."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from handoff_bench import Workers, prompt_of, request, workers

from headwater.config.schema import EngineConfig
from headwater.engines.attached.engine import AttachedEngine
from headwater.runtime.conformance import eventually, run_leak_checked
from vllm_double import VllmDouble

PROMPT = prompt_of(100)


class Pair:
    """Two servers, and a worker attached to each."""

    def __init__(self, prefill: VllmDouble, decode: VllmDouble, cluster: Workers) -> None:
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


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    vocab = {f"Ġ{chr(97 + n // 26)}{chr(97 + n % 26)}": n for n in range(419)}
    model = {"type": "WordLevel", "vocab": {**vocab, "[UNK]": len(vocab)}, "unk_token": "[UNK]"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    return EngineConfig(tokenizer=str(path), num_kv_blocks=200, max_num_seqs=8)


@asynccontextmanager
async def pair(config: EngineConfig, folder: Path, *, tickets: bool = True, **slow: float) -> AsyncIterator[Pair]:
    prefill = VllmDouble(msgspec.structs.replace(config, **slow), folder / "prefill")
    decode = VllmDouble(config, folder / "decode")
    prefill.gives_tickets = tickets
    await prefill.start()
    await decode.start()
    try:
        engines = {
            name: AttachedEngine(msgspec.structs.replace(config, attach=(double.url,)))
            for name, double in (("p", prefill), ("d", decode))
        }
        async with workers(engines) as cluster:
            yield Pair(prefill, decode, cluster)
    finally:
        await prefill.close()
        await decode.close()


def test_the_ticket_reaches_the_decode_as_it_is(config: EngineConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pair(config, tmp_path) as both:
            tokens = await both.answer(1)
            asked = both.prefill.bodies[-1]
            assert (asked["max_tokens"], asked.get("stream", False)) == (1, False)
            assert asked["kv_transfer_params"] == {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            }
            assert both.decode.bodies[-1]["kv_transfer_params"] == both.prefill.tickets[-1]
            assert both.decode.bodies[-1]["prompt"] == asked["prompt"] == PROMPT
            assert tokens == await both.answer(2, handed=False)
            assert "kv_transfer_params" not in both.decode.bodies[-1]
            await both.counted(1, 0)

    run_leak_checked(scenario())


def test_a_server_without_such_a_connector_costs_time_only(config: EngineConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pair(config, tmp_path, tickets=False) as both:
            assert await both.answer(1) == await both.answer(2, handed=False)
            assert "kv_transfer_params" not in both.decode.bodies[-2]
            await both.counted(0, 1)

    run_leak_checked(scenario())


def test_a_server_that_is_gone_costs_time_only(config: EngineConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pair(config, tmp_path) as both:
            await both.prefill.stop()
            assert await both.answer(1) == await both.answer(2, handed=False)
            await both.counted(0, 1)
            await both.prefill.start()

    run_leak_checked(scenario())


def test_a_server_that_takes_too_long_is_left(config: EngineConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pair(config, tmp_path, mocker_prefill_ms_per_token=100.0) as both:
            assert await both.answer(1, expected_ms=1.0) == await both.answer(2, handed=False)
            await both.counted(0, 1)
            await eventually(lambda: both.prefill.num_open == 0, "it is told to stop")

    run_leak_checked(scenario())


def test_an_abort_meanwhile_reaches_the_prefill(config: EngineConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pair(config, tmp_path, mocker_prefill_ms_per_token=100.0) as both:
            both.worker.send(request(1, PROMPT, prefill=both.cluster.prefill_at("p")))
            await eventually(lambda: both.prefill.num_open == 1, "the prefill has begun")
            both.worker.abort(1)
            await eventually(lambda: both.prefill.num_open == 0, "it is told to stop")
            assert not both.decode.bodies

    run_leak_checked(scenario())
