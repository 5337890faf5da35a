"""Hand-offs between attached servers that move KV themselves: what a prefill ends with reaches the decode unchanged."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest
from handoff_bench import request
from server_pair import PROMPT, ServerPair, server_pair

from headwater.config.schema import EngineConfig
from headwater.runtime.conformance import eventually, run_leak_checked
from vllm_double import VllmDouble
from word_tokenizer import write_word_tokenizer


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(tokenizer=str(write_word_tokenizer(tmp_path, 419)), num_kv_blocks=200, max_num_seqs=8)


def pair(
    config: EngineConfig, folder: Path, *, tickets: bool = True, **slow: float
) -> AbstractAsyncContextManager[ServerPair[VllmDouble]]:
    prefill = VllmDouble(msgspec.structs.replace(config, **slow), folder / "prefill")
    prefill.gives_tickets = tickets
    return server_pair(config, prefill, VllmDouble(config, folder / "decode"))


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
