"""Hand-offs between attached TensorRT-LLM servers: context only here, generation only there, and what fails."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest
from handoff_bench import request
from server_pair import PROMPT, ServerPair, server_pair

from headwater.config.schema import EngineConfig
from headwater.engines.attached import exchanges
from headwater.runtime.conformance import eventually, run_leak_checked
from trtllm_double import Fabric, TrtllmDouble
from word_tokenizer import write_word_tokenizer


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return EngineConfig(tokenizer=str(write_word_tokenizer(tmp_path, 419)), num_kv_blocks=200, max_num_seqs=8)


def pair(config: EngineConfig, **slow: float) -> AbstractAsyncContextManager[ServerPair[TrtllmDouble]]:
    """On one fabric."""
    fabric = Fabric()
    prefill = TrtllmDouble(msgspec.structs.replace(config, **slow), fabric)
    return server_pair(config, prefill, TrtllmDouble(config, fabric))


def test_context_there_generation_here_and_the_opaque_state_as_it_is(config: EngineConfig) -> None:
    async def scenario() -> None:
        async with pair(config) as both:
            tokens = await both.answer(1)
            asked, continued = both.prefill.bodies[-1], both.decode.bodies[-1]
            assert asked["disaggregated_params"] == {"request_type": "context_only"}
            assert (asked["max_tokens"], asked.get("stream", False)) == (1, False)
            passed = continued["disaggregated_params"]
            assert passed["request_type"] == "generation_only"
            assert passed["first_gen_tokens"] == tokens[:1]
            assert passed["encoded_opaque_state"]
            assert (continued["stream"], continued["prompt"]) == (True, PROMPT)
            assert both.prefill.fabric.taken == 1
            assert tokens == await both.answer(2, handed=False)
            assert "disaggregated_params" not in both.decode.bodies[-1]
            await both.counted(1, 0)

    run_leak_checked(scenario())


def test_log_probabilities_of_the_first_token_go_along(config: EngineConfig) -> None:
    async def scenario() -> None:
        async with pair(config) as both:
            where = both.cluster.prefill_at("p", 0.0)
            await both.worker.run(request(1, PROMPT, prefill=where, logprobs=1))
            assert both.prefill.bodies[-1]["logprobs"] == both.decode.bodies[-1]["logprobs"] == 1
            passed = both.decode.bodies[-1]["disaggregated_params"]
            assert passed["first_gen_log_probs"] == [[{"1": {"logprob": -0.5, "rank": 1}}]]
            assert both.prefill.fabric.taken == 1

    run_leak_checked(scenario())


def test_a_prefill_server_that_is_dead_costs_time_only(config: EngineConfig) -> None:
    async def scenario() -> None:
        async with pair(config) as both:
            await both.prefill.close()
            assert await both.answer(1) == await both.answer(2, handed=False)
            await both.counted(0, 1)
            await both.prefill.start()

    run_leak_checked(scenario())


def test_a_prefill_server_that_refuses_costs_time_only(config: EngineConfig) -> None:
    async def scenario() -> None:
        async with pair(config) as both:
            both.prefill.status, both.prefill.status_of = 400, "context_only"
            assert await both.answer(1) == await both.answer(2, handed=False)
            await both.counted(0, 1)

    run_leak_checked(scenario())


def test_kv_whose_time_is_over_is_computed_here(config: EngineConfig) -> None:
    async def scenario() -> None:
        async with pair(config) as both:
            both.prefill.fabric.hold_s = -1.0
            assert await both.answer(1) == await both.answer(2, handed=False)
            assert both.prefill.fabric.taken == 0
            asked = [body.get("disaggregated_params", {}).get("request_type") for body in both.decode.bodies]
            assert asked == ["generation_only", None, None]

    run_leak_checked(scenario())


def test_a_server_that_dies_with_the_kv_costs_time_only(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that decodes waits for KV that nobody will send."""
    monkeypatch.setattr(exchanges, "_TICKET_S", 0.3)

    async def scenario() -> None:
        async with pair(config) as both:
            both.prefill.fabric.hold_s, both.prefill.fabric.hangs = -1.0, True
            assert await both.answer(1) == await both.answer(2, handed=False)
            await eventually(lambda: both.decode.num_open == 0, "nothing waits there any more")

    run_leak_checked(scenario())


def test_an_answer_that_has_begun_is_not_begun_again(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on the first token alone, and what breaks off later is an error, not a second answer."""
    monkeypatch.setattr(exchanges, "_TICKET_S", 0.6)

    async def scenario() -> None:
        async with pair(msgspec.structs.replace(config, mocker_decode_base_ms=20.0)) as both:
            both.decode.keeps_the_end = True
            where = both.cluster.prefill_at("p", 0.0)
            asked = request(1, PROMPT, 60, prefill=where)
            both.worker.send(asked)
            await eventually(lambda: 1 in both.worker.errors, "it ends", 10.0)
            kinds = [body.get("disaggregated_params", {}).get("request_type") for body in both.decode.bodies]
            assert kinds == ["generation_only"]
            assert len(both.worker.tokens[1]) > 50, "more than the limit has time for"

    run_leak_checked(scenario())


def test_a_client_that_leaves_while_the_prompt_is_computed(config: EngineConfig) -> None:
    async def scenario() -> None:
        async with pair(config, mocker_prefill_ms_per_token=20.0) as both:
            both.worker.send(request(1, PROMPT, prefill=both.cluster.prefill_at("p", 0.0)))
            await eventually(lambda: both.prefill.num_open == 1, "it is computed there")
            both.worker.abort(1)
            await eventually(lambda: both.prefill.num_open == 0, "the server is left")
            await asyncio.sleep(0.05)
            assert both.decode.bodies == []

    run_leak_checked(scenario())
