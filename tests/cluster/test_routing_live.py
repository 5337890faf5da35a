"""Routing as clients notice it: a whole frontend before real mocker engines and scripted workers."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import uvloop
from api_client import Connection, Reply, answer_at_once
from prometheus_client.parser import text_string_to_metric_families
from scripted_worker import ScriptedWorker, artifacts_of, until

from headwater.cli.explain import in_words, look
from headwater.cli.http import Server
from headwater.config.schema import EngineConfig, FrontendConfig, RouterConfig, ServeConfig
from headwater.engines.mocker.engine import MockerEngine
from headwater.frontend.process import Frontend
from headwater.protocol.events import BlocksStored
from headwater.protocol.request import SequenceOutput
from headwater.router import approximate
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.registry.memory import MemoryRegistry, MemoryStore
from headwater.weights import ResolvedModel
from headwater.worker.shell import ShellConfig, WorkerShell
from openai_twin import demo_artifacts, demo_card

PATH = "/v1/completions"


def prompt(group: int, tail: int = 0) -> list[int]:
    """480 tokens that all of a group share, and 20 of its own."""
    return [1000 + group] * 480 + [2000 + tail] * 20


def body(ids: list[int], **rest: Any) -> dict[str, Any]:
    return {"model": "mock", "prompt": ids, "max_tokens": 3, "nvext": {"extra_fields": ["plan"]}, **rest}


def plan_of(reply: Reply) -> dict[str, Any]:
    assert reply.status == 200, reply.body
    (plan,) = reply.json()["nvext"]["plan"]
    return dict(plan)


@dataclass
class Site:
    """A registry, planes, and the frontends and workers on them."""

    resolved: ResolvedModel
    store: MemoryStore = field(default_factory=MemoryStore)
    planes: InprocPlanes = field(default_factory=InprocPlanes)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    frontend: Frontend = field(init=False)
    port: int = 0

    async def start_frontend(self, config: FrontendConfig | None = None, **router: Any) -> None:
        config = msgspec.structs.replace(config or FrontendConfig(), port=0)
        registry = MemoryRegistry(self.store)
        self.frontend = frontend = Frontend(
            ServeConfig(frontend=config, router=RouterConfig(**router)), self.planes, registry
        )
        self.port = await frontend.start(share_port=False)
        self.stack.push_async_callback(registry.close)
        self.stack.push_async_callback(frontend.stop, 0.2)

    async def mocker(self, worker_id: str, **engine: Any) -> WorkerShell:
        settings = {"mocker_speedup": 0.0, "num_kv_blocks": 2000, "served_model_name": ("mock",)} | engine
        registry = MemoryRegistry(self.store)
        shell = WorkerShell(
            MockerEngine(EngineConfig(engine="mocker", **settings)),
            registry,
            self.planes,
            ShellConfig(worker_id, "mocker", "mock", drain_timeout_s=1),
        )
        running = asyncio.create_task(shell.run(lambda progress: None))

        async def end() -> None:
            shell.stop()
            shell.stop()
            await running
            await registry.close()

        self.stack.push_async_callback(end)
        await until(lambda: worker_id in self.eligible(), 30)
        return shell

    async def scripted(self, worker_id: str, **instance: Any) -> ScriptedWorker:
        contents = demo_artifacts(self.resolved)
        card = msgspec.structs.replace(
            demo_card(self.resolved), name="mock", served_names=["mock"], artifacts=artifacts_of(contents)
        )
        worker = ScriptedWorker(worker_id, self.planes, card, contents)
        registry = MemoryRegistry(self.store)
        await worker.start(registry)
        self.stack.push_async_callback(registry.close)
        self.stack.push_async_callback(worker.close)
        await until(lambda: worker_id in self.eligible(), 30)
        if instance:
            view = self.frontend.view
            known = view.worker(worker_id)
            assert known is not None
            view.put(msgspec.structs.replace(known.instance, **instance))
        return worker

    def eligible(self) -> set[str]:
        ready = self.frontend.models.ready
        return {worker.worker_id for worker in self.frontend.view.workers if worker.eligible and ready}

    async def times_known(self) -> None:
        """Load reports come twenty times a second."""
        await until(lambda: all(worker.costs is not None for worker in self.frontend.view.workers))

    async def ask(self, method: str, path: str, content: Any = None, **headers: str) -> Reply:
        async with self.connection() as connection:
            return await connection.ask(method, path, content, **headers)

    async def complete(self, ids: list[int], **rest: Any) -> Reply:
        headers = rest.pop("headers", {})
        return await self.ask("POST", PATH, body(ids, **rest), **headers)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def metric(self, name: str) -> float:
        text = (await self.ask("GET", "/metrics")).body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )


@contextlib.asynccontextmanager
async def site(resolved: ResolvedModel) -> AsyncIterator[Site]:
    made = Site(resolved)
    async with made.stack:
        yield made
    await made.planes.close()


def test_equal_prefixes_go_where_they_are_cached_and_different_ones_spread(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend()
            for number in range(3):
                await it.mocker(f"w{number}")
            where: dict[int, set[str]] = {}
            for tail in range(4):
                for group in range(12):
                    plan = plan_of(await it.complete(prompt(group, tail)))
                    where.setdefault(group, set()).add(plan["worker_id"])
                    assert plan["actual"]["cached_tokens"] == plan["predicted"]["cached_tokens"] == (480 if tail else 0)
                    assert plan["knowledge"] == ("events" if tail else plan["knowledge"])
            assert all(len(workers) == 1 for workers in where.values())
            assert len(Counter(next(iter(workers)) for workers in where.values())) == 3
            assert await it.metric("headwater_router_decisions_total") == 48
            taken = await it.metric("headwater_router_overlap_taken_tokens_total")
            assert taken == await it.metric("headwater_router_actual_cached_tokens_total") == 36 * 480
            assert await it.metric("headwater_router_overlap_missed_tokens_total") == 0

    uvloop.run(main())


def test_a_new_frontend_learns_what_workers_hold_and_a_lost_workers_blocks_are_forgotten(
    demo_model: ResolvedModel,
) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend()
            shells = {f"w{number}": await it.mocker(f"w{number}") for number in range(2)}
            first = plan_of(await it.complete(prompt(1)))
            await it.start_frontend()
            await until(lambda: it.eligible() == {"w0", "w1"}, 30)
            index = it.frontend.view.residency.index
            await until(lambda: index.stats().num_blocks["device"] == 31)
            again = plan_of(await it.complete(prompt(1, 1)))
            assert again["worker_id"] == first["worker_id"]
            assert again["actual"]["cached_tokens"] == 480
            shells[first["worker_id"]].stop()
            await until(lambda: first["worker_id"] not in it.eligible(), 10)
            other = plan_of(await it.complete(prompt(1, 2)))
            assert other["worker_id"] != first["worker_id"]
            assert other["predicted"]["best_cached_tokens"] == 0
            await until(lambda: first["worker_id"] not in {worker.worker_id for worker in it.frontend.view.workers})
            index.check()
            assert index.stats().num_residencies["device"] == 31

    uvloop.run(main())


def test_a_killed_workers_blocks_are_forgotten_and_its_successor_begins_with_none(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend()
            worker = await it.scripted("w0")
            worker.on_submit = lambda request: answer_at_once(worker, request)
            await it.complete(prompt(1))
            worker.tell(BlocksStored(worker.requests[0].block_ids))
            index = it.frontend.view.residency.index
            await until(lambda: it.frontend.view.residency.knowledge("w0") == "events")
            assert index.stats().num_blocks["device"] == 31
            await worker.vanish()
            await worker.give_up_lease()
            await until(lambda: not it.frontend.view.workers)
            assert index.stats().num_blocks["device"] == 0
            successor = await it.scripted("w1")
            successor.on_submit = lambda request: answer_at_once(successor, request)
            plan = plan_of(await it.complete(prompt(1)))
            assert (plan["worker_id"], plan["predicted"]["cached_tokens"]) == ("w1", 0)

    uvloop.run(main())


def test_a_decision_can_be_asked_for_in_every_way(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend()
            for number in range(2):
                await it.mocker(f"w{number}")
            for tail in range(3):
                await it.complete(prompt(1, tail), headers={"x_request_id": f"req-{tail}"})
            await it.times_known()
            inside = plan_of(await it.complete(prompt(1, 3), headers={"x_request_id": "req-3"}))
            assert inside["actual"]["outcome"] == "finished"
            assert inside["actual"]["output_tokens"] == 3
            assert inside["predicted"]["ttft_ms"] is not None
            assert {candidate["worker_id"] for candidate in inside["candidates"]} == {"w0", "w1"}
            assert "first_token_ms" in inside["candidates"][0]["parts"]
            reply = await it.ask("GET", "/debug/decisions?request_id=req-3")
            assert reply.json()["decisions"] == [inside]
            reply = await it.ask("GET", "/debug/decisions?limit=2&candidates=1")
            assert [entry["request_id"] for entry in reply.json()["decisions"]] == ["req-3", "req-2"]
            assert all(len(entry["candidates"]) == 1 for entry in reply.json()["decisions"])
            assert (await it.ask("GET", "/debug/decisions?limit=-1")).json()["error"]["param"] == "limit"
            server = Server(f"http://127.0.0.1:{it.port}")
            (asked,) = await asyncio.to_thread(look, server, "req-3", 16)
            assert asked == inside
            assert any(f"went to {inside['worker_id']}, one of 2" in line for line in in_words(asked))
            assert await asyncio.to_thread(look, server, "nobody", 16) == []

    uvloop.run(main())


def test_streams_carry_the_plan_in_their_last_event_and_lists_of_prompts_one_each(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend()
            await it.mocker("w0")
            reply = await it.complete(prompt(1), stream=True)
            events = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: {")]
            assert all(b'"plan"' not in event.encode() for event in events[:-1])
            (plan,) = msgspec.json.decode(events[-1])["nvext"]["plan"]
            assert plan["actual"]["output_tokens"] == 3
            reply = await it.ask("POST", PATH, body([prompt(2), prompt(3)]))  # type: ignore[list-item]
            assert [plan["prompt_tokens"] for plan in reply.json()["nvext"]["plan"]] == [500, 500]

    uvloop.run(main())


def test_requests_wait_in_line_before_busy_workers(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend(router_queue_backlog=0.5)
            worker = await it.scripted("w0", max_num_batched_tokens=400)
            async with it.connection() as first, it.connection() as second, it.connection() as third:
                await first.send("POST", PATH, body(prompt(1)))
                await until(lambda: len(worker.requests) == 1)
                await second.send("POST", PATH, body(prompt(2)), x_request_id="second")
                await third.send("POST", PATH, body(prompt(3)), x_request_priority="5")
                await until(lambda: it.frontend.dispatcher.num_streams == 3)
                (waiting,) = (await it.ask("GET", "/debug/decisions?request_id=second")).json()["decisions"]
                assert waiting["actual"]["outcome"] == "waiting"
                assert waiting["worker_id"] is None
                await asyncio.sleep(0.1)
                assert len(worker.requests) == 1
                assert await it.metric("headwater_router_queue_waiting") == 2
                worker.step(SequenceOutput(worker.requests[0].stream, [504], num_cached_tokens=0))
                await until(lambda: len(worker.requests) == 2)
                assert worker.requests[1].priority == 5, "the more important one overtakes"
                worker.finish(worker.requests[1].stream)
                await until(lambda: len(worker.requests) == 3)
                worker.finish(worker.requests[2].stream)
                worker.finish(worker.requests[0].stream)
                plan = plan_of(await second.read())
                assert plan["queued_ms"] > 50
                assert plan_of(await third.read())["queued_ms"] > 0
                assert plan_of(await first.read())["queued_ms"] == 0
            assert await it.metric("headwater_router_queue_wait_seconds_count") == 2
            assert await it.metric("headwater_router_queue_waiting") == 0

    uvloop.run(main())


def test_a_client_that_leaves_the_line_is_forgotten_and_nobody_else(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend(router_queue_backlog=0.5)
            worker = await it.scripted("w0", max_num_batched_tokens=400)
            async with it.connection() as first, it.connection() as third:
                await first.send("POST", PATH, body(prompt(1)))
                await until(lambda: len(worker.requests) == 1)
                async with it.connection() as second:
                    await second.send("POST", PATH, body(prompt(2), n=3))
                    await until(lambda: it.frontend.dispatcher.num_streams == 4)
                await until(lambda: it.frontend.dispatcher.num_streams == 1)
                await third.send("POST", PATH, body(prompt(3)))
                await until(lambda: it.frontend.dispatcher.num_streams == 2)
                worker.finish(worker.requests[0].stream)
                await until(lambda: len(worker.requests) == 2)
                worker.finish(worker.requests[1].stream)
                assert (await first.read()).status == (await third.read()).status == 200
            assert len(worker.requests) == 2
            assert worker.aborted == []
            it.frontend.view.check()

    uvloop.run(main())


def test_those_in_line_are_told_when_the_frontend_ends(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        async with site(demo_model) as it:
            await it.start_frontend(router_queue_backlog=0.5)
            worker = await it.scripted("w0", max_num_batched_tokens=400)
            async with it.connection() as first, it.connection() as second:
                await first.send("POST", PATH, body(prompt(1)))
                await until(lambda: len(worker.requests) == 1)
                await second.send("POST", PATH, body(prompt(2), n=2))
                await until(lambda: it.frontend.dispatcher.num_streams == 3)
                it.frontend.dispatcher.close()
                for connection in (first, second):
                    reply = await connection.read()
                    assert reply.status == 503
                    assert reply.json()["error"]["code"] == "draining"
            await asyncio.sleep(0.1)
            assert len(worker.requests) == 1
        assert failures == []

    uvloop.run(main())


def test_the_line_has_an_end_in_length_and_time(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend(router_queue_backlog=0.5, router_queue_limit=1, router_queue_timeout=0.5)
            worker = await it.scripted("w0", max_num_batched_tokens=400)
            async with it.connection() as first, it.connection() as second:
                await first.send("POST", PATH, body(prompt(1)))
                await until(lambda: len(worker.requests) == 1)
                await second.send("POST", PATH, body(prompt(2)))
                await until(lambda: it.frontend.dispatcher.num_streams == 2)
                full = await it.complete(prompt(3))
                assert full.status == 503
                assert full.json()["error"]["code"] == "overloaded"
                assert int(full.headers["retry-after"]) >= 1
                other = asyncio.ensure_future(it.complete(prompt(4), cache_salt="another tenant"))
                late = await second.read()
                assert late.status == 503
                assert "in line" in late.json()["error"]["message"]
                assert (await other).status == 503
                worker.finish(worker.requests[0].stream)
                assert (await first.read()).status == 200
            assert await it.metric("headwater_router_refused_total") == 3

    uvloop.run(main())


def test_a_worker_that_joins_takes_what_waits_and_what_one_that_was_lost_had(
    demo_model: ResolvedModel,
) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend(router_queue_backlog=0.5)
            first = await it.scripted("w0", max_num_batched_tokens=400)
            async with it.connection() as running, it.connection() as waiting:
                await running.send("POST", PATH, body(prompt(1)))
                await until(lambda: len(first.requests) == 1)
                await waiting.send("POST", PATH, body(prompt(2)))
                await until(lambda: it.frontend.dispatcher.num_streams == 2)
                await first.vanish()
                second = await it.scripted("w1")
                await until(lambda: len(second.requests) == 2)
                for request in second.requests:
                    second.finish(request.stream)
                assert (await running.read()).status == (await waiting.read()).status == 200

    uvloop.run(main())


def test_what_cannot_be_begun_before_the_deadline_is_refused_at_once(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend(FrontendConfig(request_timeout=0.5))
            await it.mocker("w0", mocker_speedup=20.0, mocker_prefill_ms_per_token=5.0)
            for tail in range(8):
                assert (await it.complete([3000 + tail] * 20)).status in (200, 504)
            await it.times_known()
            reply = await it.complete(list(range(3000)))
            assert reply.status == 504
            assert "no worker can begin" in reply.json()["error"]["message"]
            assert "retry-after" in reply.headers

    uvloop.run(main())


def assert_refused(reply: Reply, param: str) -> None:
    """For a worker that is not there, by the name of what asked for it."""
    assert reply.status == 400
    error = reply.json()["error"]
    assert (error["message"], error["param"]) == ("worker w7 is not known", param)


def test_requests_can_be_sent_to_one_worker_by_name(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend()
            for number in range(3):
                await it.mocker(f"w{number}")
            for name in ("w2", "w0"):
                extra = {"extra_fields": ["plan"], "backend_instance_id": name}
                assert plan_of(await it.complete(prompt(1), nvext=extra))["worker_id"] == name
                reply = await it.complete(prompt(2), headers={"x_dynamo_worker_instance_id": name})
                assert plan_of(reply)["worker_id"] == name
            for header in ("x-worker-instance-id", "x-dynamo-worker-instance-id"):
                assert_refused(await it.complete(prompt(1), headers={header.replace("-", "_"): "w7"}), header)
            for field in ("backend_instance_id", "decode_worker_id"):
                assert_refused(await it.complete(prompt(1), nvext={field: "w7"}), f"nvext.{field}")

    uvloop.run(main())


def test_a_sessions_turns_stay_together(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend(router_session_affinity="hard")
            for number in range(3):
                await it.mocker(f"w{number}")
            for session in ("a", "b"):
                headers = {"x_session_id": session}
                plans = [plan_of(await it.complete(prompt(group), headers=headers)) for group in range(6)]
                assert len({plan["worker_id"] for plan in plans}) == 1
                assert {plan["session_id"] for plan in plans} == {session}

    uvloop.run(main())


def test_frontends_count_with_each_others_requests(demo_model: ResolvedModel) -> None:
    """Two frontends, two workers: what one has sent keeps the other away, until it ends or its frontend dies."""

    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend()
            for number in range(2):
                await it.mocker(f"w{number}", mocker_speedup=1.0, mocker_decode_base_ms=20.0)
            first, port = it.frontend, it.port
            await it.start_frontend()
            second, it.port = it.frontend, port
            await until(lambda: len(it.eligible()) == 2, 30)
            running = [asyncio.ensure_future(it.complete(prompt(n), max_tokens=400)) for n in range(6)]
            await until(lambda: sum(worker.num_decoding for worker in first.view.workers) == 6)

            def foreign(frontend: Frontend) -> int:
                known = [worker.foreign for worker in frontend.view.workers]
                return sum(theirs.num_sequences for theirs in known if theirs is not None)

            await until(lambda: foreign(second) == 6)
            assert foreign(first) == 0
            own = {worker.worker_id: worker.num_decoding for worker in first.view.workers}
            await until(lambda: {w.worker_id: w.occupy().num_decoding for w in second.view.workers} == own)
            for future in running:
                future.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await until(lambda: foreign(second) == 0)

    uvloop.run(main())


def test_tenants_are_told_apart_by_key_and_only_trusted_gateways_name_them(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        for trusted in (False, True):
            async with site(demo_model) as it:
                config = FrontendConfig(api_key=("one", "two"), trust_tenant_header=trusted)
                await it.start_frontend(config)
                await it.mocker("w0")
                headers = {"authorization": "Bearer two", "x_tenant_id": "acme"}
                plan = plan_of(await it.complete(prompt(1), headers=headers))
                assert plan["tenant"] == ("acme" if trusted else "key-2")
                plan = plan_of(await it.complete(prompt(1), headers={"authorization": "Bearer one"}))
                assert plan["tenant"] == "key-1"
                assert plan["actual"]["cached_tokens"] == 0, "what another tenant left in the cache is not ours"

    uvloop.run(main())


def test_a_worker_without_events_is_routed_to_by_guesses_and_that_is_said(
    demo_model: ResolvedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(approximate, "_SILENT_AFTER_S", 0.0)

    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend()
            for name in ("silent-1", "silent-2"):
                worker = await it.scripted(name)
                worker.on_submit = lambda request, worker=worker: answer_at_once(worker, request)  # type: ignore[misc]
            where = [plan_of(await it.complete(prompt(1, tail))) for tail in range(5)]
            assert len({plan["worker_id"] for plan in where}) == 1
            assert [plan["predicted"]["cached_tokens"] for plan in where] == [0, 480, 480, 480, 480]
            assert where[-1]["knowledge"] == "approximate"
            silent = where[0]["worker_id"]
            said = [record for record in caplog.records if "sends no KV events" in record.getMessage()]
            assert len(said) == 1
            assert silent in said[0].getMessage()
            cluster = (await it.ask("GET", "/debug/cluster")).json()
            told = {worker["worker_id"]: worker["kv_events"] for worker in cluster["workers"]}
            assert told == {"silent-1": None, "silent-2": None} | {silent: False}
            text = (await it.ask("GET", "/metrics")).body.decode()
            assert f'headwater_worker_kv_events{{worker_id="{silent}"}} 0.0' in text

    caplog.set_level(logging.WARNING, "headwater.frontend")
    uvloop.run(main())
