"""A whole frontend over real sockets: API, keys, limits, health, metrics, log lines, draining. Workers are scripted."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from api_client import CHAT, Connection, Reply, answer_at_once
from prometheus_client.parser import text_string_to_metric_families
from scripted_worker import ScriptedWorker, artifacts_of, until

from headwater.config.schema import FaultsConfig, FrontendConfig, RouterConfig, RuntimeConfig, ServeConfig
from headwater.errors import ConfigError
from headwater.frontend import loading, process
from headwater.frontend.openai.serving import build_model
from headwater.frontend.process import Frontend, run_frontend
from headwater.protocol.cluster import CatalogueEntry
from headwater.protocol.events import LoadReport
from headwater.protocol.request import SequenceOutput
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.registry.memory import MemoryRegistry, MemoryStore
from headwater.weights import ResolvedModel
from openai_twin import demo_artifacts, demo_card


@dataclass
class Running:
    frontend: Frontend
    port: int
    store: MemoryStore
    registry: MemoryRegistry
    planes: InprocPlanes
    resolved: ResolvedModel
    workers: list[ScriptedWorker] = field(default_factory=list)

    async def worker(self, worker_id: str = "w1", *, answers: bool = True, builds: bool = True) -> ScriptedWorker:
        contents = demo_artifacts(self.resolved)
        card = msgspec.structs.replace(
            demo_card(self.resolved), name="bench", served_names=["bench"], artifacts=artifacts_of(contents)
        )
        worker = ScriptedWorker(worker_id, self.planes, card, contents)
        if answers:
            worker.on_submit = lambda request: answer_at_once(worker, request)
        self.workers.append(worker)
        await worker.start(self.registry)
        loaded = {"bench": "its tokenizer is being loaded"}
        await until(lambda: self.frontend.models.ready if builds else self.frontend.models.missing() == loaded, 30)
        return worker

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        async with self.connection() as connection:
            return await connection.ask(method, path, body, **headers)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def running(
    resolved: ResolvedModel,
    patience_s: float = 30.0,
    beside: Running | None = None,
    meeting_folder: Path | None = None,
    **frontend: Any,
) -> AsyncIterator[Running]:
    """`beside`: one more frontend of that one's cluster."""
    store = MemoryStore() if beside is None else beside.store
    registry, planes = MemoryRegistry(store), InprocPlanes() if beside is None else beside.planes
    config = ServeConfig(
        frontend=FrontendConfig(port=0, **frontend),
        router=RouterConfig(router_policy="least_loaded"),
        faults=FaultsConfig(migration_timeout=patience_s),
    )
    made = Frontend(config, planes, registry, meeting_folder=meeting_folder)
    port = await made.start(share_port=False)
    state = Running(made, port, store, registry, planes, resolved)
    try:
        yield state
    finally:
        await made.stop(0.2)
        for worker in state.workers:
            await worker.close()
        await registry.close()


def test_readiness_tells_what_is_missing_and_serving_begins_with_a_worker(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            await until(lambda: it.frontend.models.synced)
            assert (await it.ask("GET", "/live")).status == 200
            reply = await it.ask("GET", "/ready")
            assert reply.status == 503
            assert reply.json() == {"ready": False, "missing": ["no worker has registered and the catalogue is empty"]}
            assert (await it.ask("GET", "/health")).json()["status"] == "not ready"
            reply = await it.ask("POST", "/v1/chat/completions", CHAT)
            assert reply.status == 503
            assert int(reply.headers["retry-after"]) > 0
            await it.worker()
            assert (await it.ask("GET", "/ready")).status == 200
            reply = await it.ask("GET", "/health")
            assert reply.status == 200
            assert reply.json() == {
                "status": "ready",
                "models": {"bench": "ready"},
                "workers": {"ready": 1, "known": 1},
            }
            reply = await it.ask("POST", "/v1/chat/completions", CHAT)
            assert reply.status == 200
            assert reply.json()["usage"]["completion_tokens"] == 3
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
            assert [entry["id"] for entry in (await it.ask("GET", "/v1/models")).json()["data"]] == ["bench"]
            assert (await it.ask("GET", "/v1/models/bench")).status == 200

    uvloop.run(main())


LONG_CHAT = {**CHAT, "user": "x" * 40_000}
"""Understood in a thread."""


@contextlib.contextmanager
def building_held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until the event is set."""
    may_build = threading.Event()

    def build(*args: Any, **options: Any) -> Any:
        assert may_build.wait(30)
        return build_model(*args, **options)

    monkeypatch.setattr(process, "build_model", build)
    yield may_build
    may_build.set()


def test_requests_wait_for_a_tokenizer_that_is_being_loaded(
    demo_model: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the second of two frontends that share a port, after the first one has said that it is ready."""

    async def main() -> None:
        with building_held_up(monkeypatch) as may_build:
            async with running(demo_model) as it:
                await it.worker(builds=False)
                missing = ["model bench: its tokenizer is being loaded"]
                assert (await it.ask("GET", "/ready")).json() == {"ready": False, "missing": missing}
                listed = (await it.ask("GET", "/v1/models")).json()["data"]
                assert [entry["id"] for entry in listed] == ["bench"]
                asked = [
                    asyncio.ensure_future(it.ask("POST", path, body))
                    for path, body in (
                        ("/v1/chat/completions", CHAT),
                        ("/v1/chat/completions", LONG_CHAT),
                        ("/tokenize", {"model": "bench", "prompt": "hello"}),
                        ("/tokenize", {"model": "bench", "prompt": "hello " * 8_000}),
                    )
                ]
                asked.append(asyncio.ensure_future(it.ask("GET", "/v1/models/bench")))
                gone = asyncio.ensure_future(it.ask("POST", "/v1/chat/completions", CHAT))
                done, _ = await asyncio.wait([*asked, gone], timeout=0.3)
                assert not done
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
                may_build.set()
                replies = await asyncio.wait_for(asyncio.gather(*asked), 30)
                assert [reply.status for reply in replies] == [200] * 5, [reply.body for reply in replies]
                assert len(it.workers[0].requests) == 2, "nobody computes for the client that left"
                other = await it.ask("POST", "/v1/chat/completions", {**CHAT, "model": "nope"})
                assert other.status == 404

    uvloop.run(main())


def test_nobody_waits_for_ever_for_a_tokenizer(demo_model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LONGEST_WAIT_S", 0.05)

    async def main() -> None:
        with building_held_up(monkeypatch) as may_build:
            async with running(demo_model) as it:
                await it.worker(builds=False)
                for body in (CHAT, LONG_CHAT):
                    reply = await it.ask("POST", "/v1/chat/completions", body)
                    assert reply.status == 503
                    assert "its tokenizer is being loaded" in reply.json()["error"]["message"]
                    assert int(reply.headers["retry-after"]) > 0
                may_build.set()

    uvloop.run(main())


def test_streams_arrive_event_by_event(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            worker = await it.worker(answers=False)
            async with it.connection() as connection:
                await connection.send("POST", "/v1/chat/completions", {**CHAT, "stream": True})
                await until(lambda: bool(worker.requests))
                stream = worker.requests[0].stream
                worker.step(SequenceOutput(stream, [504], num_cached_tokens=0))
                head = await asyncio.wait_for(connection.reader.readuntil(b"\r\n\r\n"), 5)
                assert b"text/event-stream" in head
                first = await asyncio.wait_for(connection.reader.readuntil(b"\n\n\r\n"), 5)
                assert first.count(b"data: ") >= 1
                worker.step(SequenceOutput(stream, [505], "length"))
                rest = await asyncio.wait_for(connection.reader.readuntil(b"0\r\n\r\n"), 5)
                assert b"data: [DONE]" in rest

    uvloop.run(main())


def test_a_client_that_leaves_ends_the_work_at_the_worker(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            worker = await it.worker(answers=False)
            for stream in (True, False):
                async with it.connection() as connection:
                    await connection.send("POST", "/v1/chat/completions", {**CHAT, "stream": stream, "n": 2})
                    await until(lambda: len(worker.requests) == 2)
                await until(lambda: len(worker.aborted) == 2)
                assert it.frontend.dispatcher.num_streams == 0
                assert it.frontend.application.num_generating == 0
                worker.requests.clear()
                worker.aborted.clear()

    uvloop.run(main())


def test_the_last_worker_lost_ends_streams_with_an_error_event_and_whole_answers_with_503(
    demo_model: ResolvedModel,
) -> None:
    async def main() -> None:
        async with running(demo_model, patience_s=0.1) as it:
            worker = await it.worker(answers=False)
            async with it.connection() as streamed, it.connection() as whole:
                await streamed.send("POST", "/v1/chat/completions", {**CHAT, "stream": True})
                await whole.send("POST", "/v1/chat/completions", CHAT)
                await until(lambda: len(worker.requests) == 2)
                for request in worker.requests:
                    worker.step(SequenceOutput(request.stream, [504], num_cached_tokens=0))
                await asyncio.sleep(0.05)
                await worker.vanish()
                reply = await streamed.read()
                assert reply.status == 200
                assert b'"code":"no_workers"' in reply.body
                assert reply.body.endswith(b"data: [DONE]\n\n")
                reply = await whole.read()
                assert reply.status == 503
                assert reply.headers["retry-after"] == "5"
                assert reply.json()["error"]["code"] == "no_workers"
                message = reply.json()["error"]["message"]
                lost = "worker w1 was lost while it worked on this request"
                assert message == f"{lost}; no other worker took over within 0.1 s", "and nothing about addresses"

    uvloop.run(main())


def test_keys_guard_everything_but_health_and_documentation(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model, api_key=("secret-1", "secret-2")) as it:
            await it.worker()
            for path in ("/live", "/health", "/ready", "/version", "/openapi.json", "/docs"):
                assert (await it.ask("GET", path)).status == 200, path
            guarded = [("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/debug/cluster"), ("POST", "/tokenize")]
            for method, path in [*guarded, ("POST", "/v1/chat/completions")]:
                for authorization in ("", "Bearer", "Bearer wrong", "Basic secret-1", "secret-1", "Bearer secret-"):
                    reply = await it.ask(method, path, CHAT, authorization=authorization)
                    assert reply.status == 401, (path, authorization)
                    assert reply.json()["error"]["code"] == "invalid_api_key"
                    assert reply.headers["www-authenticate"] == "Bearer"
            for key in ("secret-1", "secret-2"):
                reply = await it.ask("POST", "/v1/chat/completions", CHAT, authorization=f"Bearer {key}")
                assert reply.status == 200
            assert (await it.ask("GET", "/metrics", authorization="bearer secret-2")).status == 200

    uvloop.run(main())


def test_requests_beyond_the_limit_are_turned_away_and_the_place_is_given_back(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model, max_concurrent_requests=2) as it:
            worker = await it.worker(answers=False)
            async with it.connection() as first, it.connection() as second:
                await first.send("POST", "/v1/chat/completions", CHAT)
                await second.send("POST", "/v1/chat/completions", CHAT)
                await until(lambda: len(worker.requests) == 2)
                reply = await it.ask("POST", "/v1/chat/completions", CHAT)
                assert reply.status == 429
                assert int(reply.headers["retry-after"]) >= 1
                assert "limit is 2" in reply.json()["error"]["message"]
                assert (await it.ask("GET", "/v1/models")).status == 200, "only generating requests are limited"
                answer_at_once(worker, worker.requests[0])
                assert (await first.read()).status == 200
                worker.on_submit = lambda request: answer_at_once(worker, request)
                assert (await it.ask("POST", "/v1/chat/completions", CHAT)).status == 200

    uvloop.run(main())


def test_unknown_paths_and_methods_are_told_apart(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            reply = await it.ask("GET", "/v2/nothing")
            assert (reply.status, reply.json()["error"]["code"]) == (404, "not_found")
            reply = await it.ask("GET", "/v1/chat/completions")
            assert (reply.status, reply.headers["allow"]) == (405, "POST")
            reply = await it.ask("DELETE", "/v1/models/bench")
            assert (reply.status, reply.headers["allow"]) == (405, "GET")
            assert (await it.ask("GET", "/version")).json()["protocol"] == "1.1"

    uvloop.run(main())


def test_metrics_count_what_happened(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            worker = await it.worker()
            for _ in range(3):
                await it.ask("POST", "/v1/chat/completions", {**CHAT, "stream": True})
            await it.ask("POST", "/v1/chat/completions", {**CHAT, "temperature": -1})
            await it.ask("GET", "/nothing")
            worker.publish(
                LoadReport(
                    num_running=4,
                    num_waiting=5,
                    waiting_prefill_tokens=6,
                    kv_blocks_total=100,
                    kv_blocks_free=25,
                    preemptions=7,
                    prompt_tokens=10,
                    cached_tokens=5,
                )
            )
            view = it.frontend.view.workers[0]
            await until(lambda: view.load is not None and view.load.num_running == 4)
            text = (await it.ask("GET", "/metrics")).body.decode()
            samples = {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            model, w1 = ("model_name", "bench"), ("worker_id", "w1")
            route = ("route", "/v1/chat/completions")
            assert samples["headwater_http_requests_total", route, ("status", "200")] == 3
            assert samples["headwater_http_requests_total", route, ("status", "400")] == 1
            assert samples["headwater_http_requests_total", ("route", "(none)"), ("status", "404")] == 1
            assert samples["headwater_generation_tokens_total", model] == 9
            assert samples["headwater_prompt_tokens_cached_total", model] == 48
            assert samples["headwater_num_requests_running", model] == 0
            for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
                assert samples[f"headwater_{name}_seconds_count", model] == 3
                assert samples[f"headwater_{name}_seconds_bucket", ("le", "+Inf"), model] == 3
            assert samples["headwater_inter_token_latency_seconds_count", model] == 6
            assert samples["headwater_worker_up", w1] == 1
            assert samples["headwater_worker_num_requests_running", w1] == 4
            assert samples["headwater_worker_num_requests_waiting", w1] == 5
            assert samples["headwater_worker_kv_cache_usage_ratio", w1] == 0.75
            assert samples["headwater_worker_prefix_cache_hit_ratio", w1] == 0.5
            assert samples["headwater_worker_preemptions_total", w1] == 7
            assert samples[("process_resident_memory_bytes",)] > 1e6

    uvloop.run(main())


def test_each_request_leaves_one_log_line_with_its_facts(
    demo_model: ResolvedModel, caplog: pytest.LogCaptureFixture
) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    async def main() -> None:
        async with running(demo_model) as it:
            await it.worker()
            await it.ask(
                "POST",
                "/v1/chat/completions",
                CHAT,
                x_request_id="my-id",
                traceparent=f"00-{trace}-00f067aa0ba902b7-01",
            )
            await it.ask("GET", "/live")

    with caplog.at_level(logging.INFO, logger="headwater.request"):
        uvloop.run(main())
    (record,) = [record for record in caplog.records if record.name == "headwater.request"]
    facts = vars(record)
    assert facts["request_id"] == "my-id"
    assert facts["trace_id"] == trace
    assert (facts["model"], facts["worker"], facts["status"]) == ("bench", "w1", 200)
    assert (facts["cached_tokens"], facts["output_tokens"]) == (16, 3)
    assert facts["prompt_tokens"] > 10
    assert 0 < facts["ttft_ms"] <= facts["e2e_ms"]
    assert record.getMessage() == "answered"


def test_equal_request_ids_of_two_open_requests_are_told_apart(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            worker = await it.worker(answers=False)
            async with it.connection() as first, it.connection() as second:
                for connection in (first, second):
                    await connection.send("POST", "/v1/chat/completions", CHAT, x_request_id="same")
                await until(lambda: len(worker.requests) == 2)
                for request in worker.requests:
                    answer_at_once(worker, request)
                ids = [(await connection.read()).headers["x-request-id"] for connection in (first, second)]
                assert sorted(ids) == ["same", "same~2"]

    uvloop.run(main())


def test_the_cluster_page_shows_models_workers_and_load(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            worker = await it.worker()
            await it.registry.put_model(
                CatalogueEntry("gone", msgspec.structs.replace(worker.card, name="gone", fingerprint="f9"))
            )
            view = it.frontend.view.workers[0]
            await until(lambda: view.load is not None and "gone" in it.frontend.models.names())
            page = (await it.ask("GET", "/debug/cluster")).json()
            assert page["frontend"]["draining"] is False
            models = {model["name"]: model for model in page["models"]}
            assert models["bench"]["ready"]
            assert not models["gone"]["ready"]
            assert models["gone"]["missing"]
            (described,) = page["workers"]
            assert described["worker_id"] == "w1"
            refused = await it.ask("POST", "/admin/sleep/w1")
            assert refused.status == 400, "it is not left to wait for what never comes"
            assert "w1 cannot sleep" in refused.json()["error"]["message"]
            assert described["connected"]
            assert described["load"]["kv_blocks_total"] == 100
            assert (await it.ask("POST", "/v1/chat/completions", {**CHAT, "model": "gone"})).status == 503
            assert (await it.ask("POST", "/v1/chat/completions", {**CHAT, "model": "other"})).status == 404

    uvloop.run(main())


def test_draining_refuses_new_work_and_lets_running_streams_end(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            worker = await it.worker(answers=False)
            async with it.connection() as busy, it.connection() as waiting:
                assert (await waiting.ask("GET", "/ready")).status == 200
                await busy.send("POST", "/v1/chat/completions", {**CHAT, "stream": True})
                await until(lambda: bool(worker.requests))
                stopping = asyncio.ensure_future(it.frontend.stop(10))
                await asyncio.sleep(0.05)
                assert await waiting.reader.read() == b"", "idle connections are closed"
                with pytest.raises(ConnectionRefusedError):
                    await it.ask("GET", "/live")
                answer_at_once(worker, worker.requests[0])
                reply = await busy.read()
                assert reply.body.endswith(b"data: [DONE]\n\n")
                assert await stopping

    uvloop.run(main())


def test_a_port_in_use_is_a_clear_error(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            config = ServeConfig(frontend=FrontendConfig(port=it.port))
            second = Frontend(config, InprocPlanes(), MemoryRegistry(MemoryStore()))
            with pytest.raises(ConfigError, match="is in use"):
                await second.start(share_port=False)
            await second.stop(0)

    uvloop.run(main())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ServeConfig(), "--registry"),
        (
            ServeConfig(
                router=RouterConfig(router_policy="least_loded"), runtime=RuntimeConfig(registry="memory://test")
            ),
            "least_loded",
        ),
    ],
)
def test_a_frontend_that_cannot_work_says_why_before_it_listens(config: ServeConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        uvloop.run(run_frontend(config))
