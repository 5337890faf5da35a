"""Attached servers that misbehave, go away, come back, or are of another kind; over our double of vLLM's server."""

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attached_stage import AttachedStage
from headwater.engines.attached import engine as attached
from headwater.engines.attached.dialects.trtllm import TrtllmDialect
from headwater.engines.attached.dialects.vllm import VllmDialect, VllmReader
from headwater.engines.attached.engine import AttachedEngine
from headwater.engines.attached.http import ServerAddress, Unreachable, error_for
from headwater.engines.attached.prometheus import sums
from headwater.engines.attached.sse import EventSplitter
from headwater.engines.base import Progress
from headwater.engines.suite import SIZES, prompt_of
from headwater.engines.watched import Recorder
from headwater.errors import (
    ConfigError,
    ContextTooLong,
    HeadwaterError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PayloadTooLarge,
    WorkerLost,
)
from headwater.kv.identity import namespace
from headwater.protocol.request import EngineRequest, RelayedRequest, SamplingParams, StructuredSpec
from headwater.runtime.conformance import eventually
from vllm_double import MODEL, VllmDouble

Stage = AttachedStage[VllmDouble]
Scenario = Callable[[Stage], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scenario], None]:
    stage = AttachedStage(tmp_path, lambda config: VllmDouble(config, tmp_path / "events"))
    return lambda scenario: stage.play(scenario(stage))


def test_an_abort_closes_the_connection(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            bench.engine.submit([bench.request(prompt_of(20, letter), 400) for letter in range(3)])
            await eventually(lambda: len(bench.recorder.outputs) == 3, "all run")
            bench.engine.abort([1, 3])
            await eventually(lambda: stage.double.num_open == 1, "the server knows")
            bench.engine.abort([2])
            await eventually(lambda: stage.double.num_open == 0, "of all")
            assert all(count < 20 + 400 for count in stage.double.lengths), "none has come to its own end"

    play(scenario)


def as_sent(**members: object) -> RelayedRequest:
    """What a client of a relayed server sends."""
    return RelayedRequest("/v1/chat/completions", msgspec.json.encode({"model": MODEL, "messages": [], **members}))


@pytest.mark.parametrize("attach_as", ["auto", "openai"])
def test_a_server_that_no_longer_takes_our_key_is_no_dead_worker(
    play: Callable[[Scenario], None], attach_as: str
) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached(attach_as=attach_as) as bench:
            stage.double.status = 401
            request = bench.request(prompt_of(8))
            if attach_as == "openai":
                request.relay = as_sent()
            bench.engine.submit([request])
            await eventually(lambda: bench.recorder.ended(1), "it is answered")
            error = bench.recorder.error(1)
            assert (error.code, error.retryable) == ("unavailable", True)
            assert "refuses us: no room" in error.message

    play(scenario)


@pytest.mark.parametrize("attach_as", ["auto", "openai"])
def test_prompts_do_not_follow_a_redirect(play: Callable[[Scenario], None], attach_as: str) -> None:
    async def scenario(stage: Stage) -> None:
        elsewhere: list[bytes] = []

        async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            elsewhere.append(await reader.readuntil(b"\r\n\r\n"))
            writer.close()

        other = await asyncio.start_server(collect, "127.0.0.1", 0)
        place = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}/"
        async with other, stage.attached(attach_as=attach_as) as bench:
            stage.double.location = place
            request = bench.request(prompt_of(8))
            if attach_as == "openai":
                request.relay = as_sent()
            bench.engine.submit([request])
            await eventually(lambda: bench.recorder.ended(1), "it is answered")
            error = bench.recorder.error(1)
            assert (error.code, error.retryable) == ("unavailable", True)
            assert error.message == f"the attached server sends us to {place}"
        assert elsewhere == []

    play(scenario)


def test_a_full_server_is_overloaded_and_another_may_be_asked(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            stage.double.status = 503
            bench.engine.submit([bench.request(prompt_of(20))])
            await eventually(lambda: bench.recorder.ended(1), "it is answered")
            assert (bench.recorder.error(1).code, bench.recorder.error(1).retryable) == ("overloaded", True)
            stage.double.status = None
            await bench.run(bench.request(prompt_of(20)))

    play(scenario)


def test_a_server_that_goes_away_and_comes_back(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            await bench.run(bench.request(prompt_of(40)))
            await eventually(lambda: len(bench.engine.resident_blocks()) > 0, "blocks are told of")
            bench.engine.submit([bench.request(prompt_of(20), 400)])
            await eventually(lambda: bool(bench.recorder.tokens(2)), "it runs")
            await stage.double.stop()
            await eventually(lambda: bench.recorder.ended(2), "what ran is lost")
            assert bench.recorder.error(2).retryable
            await eventually(lambda: bench.engine.paused, "the engine knows")
            assert bench.recorder.loads[-1].away == f"the server at {stage.double.url} does not answer"
            bench.engine.submit([bench.request(prompt_of(20))])
            await eventually(lambda: bench.recorder.ended(3), "nothing new is taken")
            assert (bench.recorder.error(3).http_status, bench.recorder.error(3).retryable) == (503, True)
            assert bench.engine.resident_blocks() == []
            await stage.double.start()
            await eventually(lambda: not bench.engine.paused, "it is back")
            await eventually(lambda: bench.recorder.loads[-1].away == "", "everybody knows")
            assert len((await bench.run(bench.request(prompt_of(40))))[0]) == 8
            assert bench.recorder.outputs[4][0].num_cached_tokens == 0
            await eventually(lambda: len(bench.engine.resident_blocks()) > 0, "blocks are told of again")
            assert bench.engine.resident_blocks() == bench.recorder.resident.snapshot()
            assert bench.recorder.failures == []

    play(scenario)


def test_a_server_that_says_nothing_is_away_before_what_it_does_is_given_up(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "_PROBE_S", 0.02)

    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            stage.double.goes_on = asyncio.Event()
            bench.engine.submit([bench.request(prompt_of(20), 4000)])
            await eventually(lambda: bool(bench.recorder.tokens(1)), "it runs")
            await asyncio.sleep(5.5)
            assert bench.recorder.loads[-1].away == "", "its tokens are a sign of life"
            bench.engine.abort([1])
            await eventually(lambda: "does not answer in time" in bench.recorder.loads[-1].away, "it is told", 12.0)
            assert not bench.engine.paused, "what it does may yet come to an end"
            stage.double.goes_on.set()
            await eventually(lambda: bench.recorder.loads[-1].away == "", "it is back", 12.0)

    play(scenario)


def test_a_look_that_a_dying_server_still_answers_does_not_bring_it_back(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "_PROBE_S", 0.02)

    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            engine = bench.engine
            assert isinstance(engine, AttachedEngine)
            stage.double.goes_on = asyncio.Event()
            asked = stage.double.metrics_asked
            await eventually(lambda: stage.double.metrics_asked > asked, "it is looked at")
            monkeypatch.setattr(attached, "_PROBE_S", 60.0)
            engine._lose(Unreachable("nobody listens"))
            stage.double.goes_on.set()
            looked = len(bench.recorder.loads)
            await eventually(lambda: len(bench.recorder.loads) > looked + 1, "the look has ended")
            assert bench.recorder.loads[-1].away, "as long as requests are refused"

    play(scenario)


def test_a_server_that_comes_back_as_another_ends_the_worker(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            await stage.double.stop()
            await eventually(lambda: bench.engine.paused, "the engine knows")
            stage.double._config = msgspec.structs.replace(stage.double._config, max_model_len=256)
            await stage.double.start()
            await eventually(lambda: bench.recorder.failures != [], "the engine fails")
            assert "came back as double, 256 tokens" in str(bench.recorder.failures[0])

    play(scenario)


def test_a_server_that_is_not_there_yet_is_waited_for(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.double.stop()
        config = msgspec.structs.replace(SIZES, attach=(stage.double.url,), tokenizer=str(stage.tokenizer))
        engine, said = AttachedEngine(config), []
        starting = asyncio.create_task(engine.start(Recorder(), said.append))
        await eventually(lambda: any("cannot be reached" in report.detail for report in said), "it waits")
        await stage.double.start()
        assert (await starting).engine == "attached-vllm"
        await engine.close()

    play(scenario)


def test_a_server_that_does_not_answer_is_lost_once_patience_is_over(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "_PROBE_S", 0.02)
    monkeypatch.setattr(attached, "_PATIENCE_S", 0.2)

    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            asked, stage.double.metrics_status = stage.double.metrics_asked, 500
            await eventually(lambda: stage.double.metrics_asked > asked + 1, "it is asked again")
            assert not bench.engine.paused, "once is not for ever"
            await eventually(lambda: bench.engine.paused, "patience is over")
            stage.double.metrics_status = None
            await eventually(lambda: not bench.engine.paused, "it answers again")
            await bench.run(bench.request(prompt_of(20)))

    play(scenario)


def test_an_answer_that_breaks_off_is_a_lost_worker(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            stage.double.keeps_the_end = True
            bench.engine.submit([bench.request(prompt_of(20))])
            await eventually(lambda: bench.recorder.ended(1), "it is answered")
            assert (bench.recorder.error(1).code, bench.recorder.error(1).retryable) == ("worker_lost", True)
            assert len(bench.recorder.tokens(1)) == 7, "what had come was told"

    play(scenario)


def test_of_a_prompt_that_is_all_there_the_last_block_is_computed(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            length = 2 * bench.info.card.block_size
            await bench.run(bench.request(prompt_of(length)))
            await eventually(lambda: len(bench.engine.resident) >= 2, "both blocks are told of")
            await bench.run(bench.request(prompt_of(length)))
            assert bench.recorder.outputs[2][0].num_cached_tokens == length // 2

    play(scenario)


def test_without_events_nothing_is_claimed(play: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.double.close()
        stage.double = VllmDouble(stage.config, stage.tokenizer.parent / "events", events=False)
        await stage.double.start()
        async with stage.attached() as bench:
            await bench.run(bench.request(prompt_of(40)), bench.request(prompt_of(40)))
            assert bench.engine.resident_blocks() == []
            assert bench.recorder.outputs[1][0].num_cached_tokens is None

    play(scenario)
    assert "sends no KV events" in caplog.text
    assert "--kv-events-config" in caplog.text


def test_a_wrong_tokenizer_is_found_and_requests_are_relayed(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.tokenize_offset = 1
        async with stage.attached() as bench:
            assert bench.info.card.relayed
            body = b'{"messages":[{"role":"user","content":"hi"}],"model":"mine","stream":true,"nvext":{}}'
            request = bench.request(prompt_of(8))
            request.relay = RelayedRequest("/v1/chat/completions", body)
            bench.engine.submit([request, bench.request(prompt_of(8))])
            await eventually(lambda: bench.recorder.ended(1, 2), "both are answered")
            said = b"".join(output.relayed for output in bench.recorder.outputs[1])
            assert said.count(b"data: ") == 4
            assert said.endswith(b"data: [DONE]\n\n")
            assert len(bench.recorder.tokens(1)) == 4
            assert bench.recorder.error(2).code == "invalid_value"
            sent = stage.double.bodies[0]
            assert (sent["model"], "nvext" in sent, sent["stream"]) == (MODEL, False, True)

    play(scenario)


@pytest.mark.parametrize("streamed", [True, False])
def test_frontends_know_of_answers_that_come_whole(play: Callable[[Scenario], None], streamed: bool) -> None:
    """Nothing is heard of them until they are there, and that is no hang."""

    async def scenario(stage: Stage) -> None:
        async with stage.attached(attach_as="openai") as bench:
            request = bench.request(prompt_of(8))
            request.relay = as_sent(stream=streamed)
            bench.engine.submit([request])
            load = bench.engine.load()
            assert (load.num_whole, load.quiet_prefill, load.relays) == (0 if streamed else 1, True, True)
            await eventually(lambda: bench.recorder.ended(1), "it is answered")
            await eventually(lambda: bench.engine.load().num_whole == 0, "none is under way")

    play(scenario)


def test_a_relayed_answer_is_not_taken_up_in_its_middle(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached(attach_as="openai") as bench:
            request = bench.request(prompt_of(8), resumed_tokens=bytes(4))
            request.relay = RelayedRequest("/v1/chat/completions", b"{}")
            bench.engine.submit([request])
            await eventually(lambda: bench.recorder.ended(1), "it is answered")
            error = bench.recorder.error(1)
            assert (error.code, error.retryable) == ("stream_lost", False), "the client has done nothing wrong"

    play(scenario)


def test_a_server_that_offers_no_model_yet_is_waited_for(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.has_models = False
        config = msgspec.structs.replace(SIZES, attach=(stage.double.url,), attach_as="openai")
        engine, waits = AttachedEngine(config), asyncio.Event()
        said: list[str] = []

        def progress(news: Progress) -> None:
            said.append(news.detail)
            if news.phase == "wait":
                waits.set()

        starting = asyncio.ensure_future(engine.start(Recorder(), progress))
        try:
            await asyncio.wait({starting, asyncio.ensure_future(waits.wait())}, return_when=asyncio.FIRST_COMPLETED)
            assert "offers no model yet" in said[-1]
            stage.double.has_models = True
            assert (await starting).card.name == MODEL
        finally:
            await engine.close()

    play(scenario)


@pytest.mark.parametrize(("said", "taken"), [(1_700_000_000, 1_700_000_000), (1_700_000_000_000, 0), ("x", 0), (-1, 0)])
def test_a_relayed_model_is_as_old_as_its_server_says(
    play: Callable[[Scenario], None], said: object, taken: int
) -> None:
    async def scenario(stage: Stage) -> None:
        stage.double.created = said
        async with stage.attached(attach_as="openai") as bench:
            assert bench.info.card.created == taken

    play(scenario)


def test_every_sampling_field_reaches_the_server(play: Callable[[Scenario], None]) -> None:
    async def scenario(stage: Stage) -> None:
        async with stage.attached() as bench:
            key = namespace(bench.info.card.fingerprint, bench.info.card.kv_layout, salt="tenant")
            request = bench.request(
                prompt_of(5),
                9,
                temperature=0.5,
                top_p=0.9,
                top_k=7,
                min_p=0.1,
                seed=3,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                repetition_penalty=1.1,
                min_tokens=2,
                logit_bias={5: -1.0},
                stop_token_ids=[299],
                priority=4,
                namespace=key,
                resumed_tokens=array("I", [7, 8]).tobytes(),
            )
            await bench.run(request, bench.request(prompt_of(5), 2, seed_drawn=True, seed=9, temperature=1.0))
            first, second = sorted(stage.double.bodies, key=lambda body: -len(body))
            assert first["prompt"] == [*prompt_of(5), 7, 8]
            assert (first["max_tokens"], first["min_tokens"], first["seed"]) == (7, 0, 5)
            assert (first["temperature"], first["top_p"], first["top_k"], first["min_p"]) == (0.5, 0.9, 7, 0.1)
            assert (first["presence_penalty"], first["frequency_penalty"]) == (0.2, 0.3)
            assert (first["repetition_penalty"], first["logit_bias"]) == (1.1, {"5": -1.0})
            assert (first["stop_token_ids"], first["priority"]) == ([299], -4)
            assert first["cache_salt"] == "hw:" + key.hex()
            assert "seed" not in second
            assert "cache_salt" not in second

    play(scenario)


def vllm_body(**fields: Any) -> dict[str, Any]:
    own = {name: fields.pop(name) for name in list(fields) if name in EngineRequest.__struct_fields__}
    request = EngineRequest(1, "r", "m", b"", SamplingParams(**({"max_tokens": 9} | fields)), **own)
    _, body = VllmDialect().request("m", request, [1, 2, 3], None)
    return dict(msgspec.json.decode(body))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (StructuredSpec("json_object"), {"json_object": True}),
        (StructuredSpec("json_schema", '{"type": "null"}'), {"json": {"type": "null"}}),
        (StructuredSpec("choice", '["a", "b"]'), {"choice": ["a", "b"]}),
        (StructuredSpec("regex", "a+", "guided_regex"), {"regex": "a+"}),
        (StructuredSpec("grammar", "start: A"), {"grammar": "start: A"}),
    ],
)
def test_structured_output_in_vllms_words(spec: StructuredSpec, expected: dict[str, Any]) -> None:
    body = vllm_body(structured=spec, ignore_eos=True)
    assert body["structured_outputs"] == expected
    assert body["ignore_eos"] is False, "a complete document ends the output"
    assert vllm_body(ignore_eos=True)["ignore_eos"] is True
    with pytest.raises(InvalidRequest) as refused:
        vllm_body(structured=spec, resumed_tokens=b"\1\0\0\0")
    assert refused.value.param == spec.param, "it is not taken up in its middle"


def test_addresses() -> None:
    assert ServerAddress.parse("host:8000/v1/").url == "http://host:8000"
    assert ServerAddress.parse("https://host/base/v1").url == "https://host/base"
    for wrong in ("ftp://x", "http://", "http://u:p@x", "http://x?y"):
        with pytest.raises(ConfigError, match=r"--attach .*: expected something like http://"):
            ServerAddress.parse(wrong)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, b'{"error":{"message":"This model\'s maximum context length is 5","code":400}}', ContextTooLong),
        (400, b'{"error":{"message":"no","param":"top_p","code":400}}', InvalidRequest),
        (422, b'{"detail":"no"}', InvalidRequest),
        (429, b"", Overloaded),
        (503, b"<html>", Overloaded),
        (413, b"", PayloadTooLarge),
        (404, b"", ModelNotFound),
        (500, b'{"message":"flat"}', WorkerLost),
    ],
)
def test_refusals_of_servers(status: int, body: bytes, kind: type[HeadwaterError]) -> None:
    error = error_for(status, body, {"retry-after": "7"})
    assert type(error) is kind
    if isinstance(error, Overloaded):
        assert error.retry_after_s == 7.0


def test_events_in_any_pieces() -> None:
    stream = b'data: {"a":1}\n\n: comment\n\ndata: x\r\n\r\nevent: e\ndata: y\ndata: z\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream)):
        splitter = EventSplitter()
        found = [event for at in range(0, len(stream), size) for event in splitter.feed(stream[at : at + size])]
        assert found == [b'{"a":1}', b"x", b"y\nz", b"[DONE]"], size


def test_an_event_that_does_not_end_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.engines.attached.sse.MAX_EVENT_BYTES", 100)
    splitter = EventSplitter()
    assert splitter.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(WorkerLost, match="more than 100 bytes"):
        splitter.feed(b"x" * 10)


@pytest.mark.parametrize("event", [b"{", b"[]", b'{"choices":[{"token_ids":"x"}]}', b'{"error":{"message":"m"}}'])
def test_garbage_in_a_stream_is_a_lost_worker(event: bytes) -> None:
    with pytest.raises(WorkerLost):
        VllmReader(1, None).read(event)


@pytest.mark.parametrize("document", [3, {"choices": 3}, {"choices": [{"token_ids": "x"}]}, {"choices": []}, {}])
def test_garbage_instead_of_a_completion_is_a_lost_worker(document: object) -> None:
    request = EngineRequest(1, "r", "m", bytes(4), SamplingParams())
    for dialect in (VllmDialect(), TrtllmDialect({})):
        with pytest.raises(WorkerLost):
            dialect.prefilled(request, document)


def test_metrics_are_summed_over_labels() -> None:
    text = 'a{x="1"} 2\na{x="2"} 3.5\n# HELP a\nab 7\na nonsense\nb{y="q\\"uo"} NaN\n'
    assert sums(text, ("a",)) == {"a": 5.5, "ab": 7.0}
