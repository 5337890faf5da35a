"""Hand-offs between attached TensorRT-LLM servers: context only here, generation only there, and what fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from handoff_bench import Workers, prompt_of, request, workers

from headwater.config.schema import EngineConfig
from headwater.engines.attached import engine as attached
from headwater.engines.attached.engine import AttachedEngine
from headwater.runtime.conformance import eventually, run_leak_checked
from trtllm_double import Fabric, TrtllmDouble

PROMPT = prompt_of(100)


class Pair:
    """Two servers on one fabric, and a worker attached to each."""

    def __init__(self, prefill: TrtllmDouble, decode: TrtllmDouble, fabric: Fabric, cluster: Workers) -> None:
        self.prefill, self.decode, self.fabric, self.cluster = prefill, decode, fabric, cluster
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
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    vocab = {f"Ġ{chr(97 + n // 26)}{chr(97 + n % 26)}": n for n in range(419)}
    model = {"type": "WordLevel", "vocab": {**vocab, "[UNK]": len(vocab)}, "unk_token": "[UNK]"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    return EngineConfig(tokenizer=str(path), num_kv_blocks=200, max_num_seqs=8)


@asynccontextmanager
async def pair(config: EngineConfig, **slow: float) -> AsyncIterator[Pair]:
    fabric = Fabric()
    prefill = TrtllmDouble(msgspec.structs.replace(config, **slow), fabric)
    decode = TrtllmDouble(config, fabric)
    await prefill.start()
    await decode.start()
    try:
        engines = {
            name: AttachedEngine(msgspec.structs.replace(config, attach=(double.url,)))
            for name, double in (("p", prefill), ("d", decode))
        }
        async with workers(engines) as cluster:
            yield Pair(prefill, decode, fabric, cluster)
    finally:
        await prefill.close()
        await decode.close()


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
            assert both.fabric.taken == 1
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
            assert both.fabric.taken == 1

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
            both.fabric.hold_s = -1.0
            assert await both.answer(1) == await both.answer(2, handed=False)
            assert both.fabric.taken == 0
            asked = [body.get("disaggregated_params", {}).get("request_type") for body in both.decode.bodies]
            assert asked == ["generation_only", None, None]

    run_leak_checked(scenario())


def test_a_server_that_dies_with_the_kv_costs_time_only(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that decodes waits for KV that nobody will send."""
    monkeypatch.setattr(attached, "_TICKET_S", 0.3)

    async def scenario() -> None:
        async with pair(config) as both:
            both.fabric.hold_s, both.fabric.hangs = -1.0, True
            assert await both.answer(1) == await both.answer(2, handed=False)
            await eventually(lambda: both.decode.num_open == 0, "nothing waits there any more")

    run_leak_checked(scenario())


def test_an_answer_that_has_begun_is_not_begun_again(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on the first token alone, and what breaks off later is an error, not a second answer."""
    monkeypatch.setattr(attached, "_TICKET_S", 0.2)

    async def scenario() -> None:
        async with pair(config, mocker_decode_base_ms=5.0) as both:
            both.decode.keeps_the_end = True
            where = both.cluster.prefill_at("p", 0.0)
            asked = request(1, PROMPT, prefill=where)
            both.worker.send(asked)
            await eventually(lambda: 1 in both.worker.errors, "it ends", 10.0)
            kinds = [body.get("disaggregated_params", {}).get("request_type") for body in both.decode.bodies]
            assert kinds == ["generation_only"]

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
