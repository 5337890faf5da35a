"""Tenants as clients and operators notice them: rights, quotas, separate caches, accounts, audit."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import uvloop
from api_client import CHAT
from prometheus_client.parser import text_string_to_metric_families
from scripted_worker import until
from test_frontend_http import Running, running
from test_routing_live import body, plan_of, site

from headwater.cli.main import main as cli
from headwater.config.schema import FrontendConfig
from headwater.errors import ConfigError
from headwater.frontend.tenants.keyring import Keyring, KeySpec, Scope, TenantSpec, encode_keyring, key_digest, new_key
from headwater.protocol.request import SequenceOutput
from headwater.weights import ResolvedModel

CHAT_PATH = "/v1/chat/completions"


class Ring:
    """A keyring in a file, changed as its owner would."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.json"
        self.keyring = Keyring.empty()
        self.write()

    def add(self, tenant: str, *scopes: Scope, **limits: Any) -> str:
        key_id, key = new_key(self.keyring.keys)
        spec = KeySpec(tenant, key_digest(key.encode()).hex(), scopes or ("inference",))
        tenants = {**self.keyring.tenants, tenant: TenantSpec(**limits)}
        self.keyring = Keyring("headwater-keyring", 1, tenants, {**self.keyring.keys, key_id: spec})
        self.write()
        return key

    def write(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_bytes(encode_keyring(self.keyring))
        fresh.chmod(0o600)
        os.replace(fresh, self.path)


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def chat(it: Running, key: str, **more: Any) -> Any:
    return await it.ask("POST", CHAT_PATH, {**CHAT, **more}, **bearer(key))


def test_scopes_open_their_routes_and_a_wrong_key_never_reaches_a_worker(demo_model: ResolvedModel, ring: Ring) -> None:
    keys = {scope: ring.add("acme", scope) for scope in ("inference", "metrics", "admin")}
    routes = {
        "inference": [("POST", CHAT_PATH), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")],
        "metrics": [("GET", "/metrics")],
        "admin": [("GET", "/debug/cluster"), ("GET", "/debug/decisions")],
    }

    async def main() -> None:
        async with running(demo_model, keys=str(ring.path)) as it:
            worker = await it.worker()
            for needed, paths in routes.items():
                for method, path in paths:
                    for scope, key in keys.items():
                        status = (await it.ask(method, path, {}, **bearer(key))).status
                        assert (status == 403) == (scope != needed), (path, scope, status)
                    for wrong in ("", keys["admin"][:-1], keys["admin"] + "x", "hw-00000000-" + "A" * 43):
                        reply = await it.ask(method, path, CHAT, **bearer(wrong))
                        assert (reply.status, reply.json()["error"]["code"]) == (401, "invalid_api_key")
            assert worker.requests == [], "nothing of all this was for a worker"
            assert (await chat(it, keys["inference"])).status == 200
            assert len(worker.requests) == 1

    uvloop.run(main())


def test_every_route_wants_a_scope_but_those_that_say_nothing(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            table = it.frontend.application._routes
            routes = [route for methods in table._exact.values() for route in methods.values()]
            routes += [route for _, _, methods in table._prefixes for route in methods.values()]
            open_paths = {route.path for route in routes if route.scope is None}
            harmless = {"/live", "/health", "/ready", "/version", "/docs", "/openapi.json"}
            assert open_paths <= harmless | {"/console", "/console/{path}"}
            assert all(route.scope in ("inference", "metrics", "admin") for route in routes if route.scope is not None)
            for route in routes:
                if route.path.startswith(("/debug", "/admin")):
                    assert route.scope == "admin", route.path

    uvloop.run(main())


def test_quotas_are_429_with_their_name_and_a_time(demo_model: ResolvedModel, ring: Ring) -> None:
    concurrent = ring.add("concurrent", max_concurrent=1)
    rated = ring.add("rated", tokens_per_minute=60)
    budgeted = ring.add("budgeted", monthly_tokens=30)
    free = ring.add("free")

    async def main() -> None:
        async with running(demo_model, keys=str(ring.path)) as it:
            worker = await it.worker()
            answer = worker.on_submit
            worker.on_submit = None
            async with it.connection() as first:
                await first.send("POST", CHAT_PATH, CHAT, **bearer(concurrent))
                await until(lambda: len(worker.requests) == 1)
                reply = await chat(it, concurrent)
                assert (reply.status, reply.headers["retry-after"]) == (429, "1")
                assert "quota max_concurrent" in reply.json()["error"]["message"]
                worker.on_submit = answer
                assert (await chat(it, free)).status == 200, "others go on"
                assert answer is not None
                answer(worker.requests[0])
                assert (await first.read()).status == 200
            assert (await chat(it, concurrent)).status == 200
            replies = [await chat(it, rated) for _ in range(8)]
            refused = next(reply for reply in replies if reply.status == 429)
            assert "quota tokens_per_minute" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 120
            replies = [await chat(it, budgeted) for _ in range(4)]
            refused = replies[-1]
            assert refused.status == 429
            assert "quota monthly_tokens" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
            assert (await chat(it, free)).status == 200
            served = len(worker.requests)
            assert (await chat(it, budgeted)).status == 429
            assert len(worker.requests) == served

    uvloop.run(main())


def test_a_request_counts_once_a_worker_has_it_and_a_refusal_never(
    demo_model: ResolvedModel, ring: Ring, capsys: pytest.CaptureFixture[str]
) -> None:
    """In `/metrics` and in `headwater keys usage`, whether it is refused when it comes or when its tokens are known."""
    in_debt = ring.add("in-debt", "inference", "metrics", tokens_per_minute=20)
    too_long = ring.add("too-long", monthly_tokens=10)

    async def main() -> None:
        async with running(demo_model, keys=str(ring.path)) as it:
            await it.worker()
            assert [(await chat(it, in_debt)).status for _ in range(3)] == [200, 429, 429]
            assert [(await chat(it, too_long)).status for _ in range(2)] == [429, 429]
            text = (await it.ask("GET", "/metrics", **bearer(in_debt))).body.decode()
            samples = {
                (sample.name, sample.labels["tenant"]): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name in ("headwater_tenant_requests_total", "headwater_tenant_refused_total")
            }
            assert samples == {
                ("headwater_tenant_requests_total", "in-debt"): 1,
                ("headwater_tenant_requests_total", "too-long"): 0,
                ("headwater_tenant_refused_total", "in-debt"): 2,
                ("headwater_tenant_refused_total", "too-long"): 2,
            }

    uvloop.run(main())
    assert cli(["keys", "usage", "--keys", str(ring.path), "--json"]) == 0
    assert {row["tenant"]: row["requests"] for row in json.loads(capsys.readouterr().out)} == {"in-debt": 1}


def test_a_budget_that_is_used_up_stays_so_after_a_restart(demo_model: ResolvedModel, ring: Ring) -> None:
    key = ring.add("acme", monthly_tokens=40)

    async def main() -> None:
        for status in (200, 429):
            async with running(demo_model, keys=str(ring.path)) as it:
                await it.worker()
                assert (await chat(it, key)).status == status

    uvloop.run(main())


def test_keys_come_and_go_while_it_runs(demo_model: ResolvedModel, ring: Ring) -> None:
    first = ring.add("acme")

    async def main() -> None:
        async with running(demo_model, keys=str(ring.path)) as it:
            await it.worker()
            second = ring.add("acme")
            assert it.frontend.tenancy._watch is not None
            await it.frontend.tenancy._watch.look()
            assert (await chat(it, second)).status == 200
            assert (await chat(it, first)).status == 200
            kept = {key_id: spec for key_id, spec in ring.keyring.keys.items() if key_id in second}
            ring.keyring = Keyring("headwater-keyring", 1, ring.keyring.tenants, kept)
            ring.write()
            await it.frontend.tenancy._watch.look()
            assert (await chat(it, first)).status == 401
            assert (await chat(it, second)).status == 200

    uvloop.run(main())


def test_usage_is_counted_per_tenant_and_no_text_or_secret_is_written(
    demo_model: ResolvedModel, ring: Ring, tmp_path: Path
) -> None:
    keys = {name: ring.add(name, "inference", "metrics") for name in ("acme", "other")}
    usage_path, audit_path = tmp_path / "usage.jsonl", tmp_path / "audit.jsonl"

    async def main() -> None:
        logs = {"usage_log": str(usage_path), "audit_log": str(audit_path)}
        async with running(demo_model, keys=str(ring.path), **logs) as it:
            worker = await it.worker()
            for _ in range(3):
                assert (await chat(it, keys["acme"])).status == 200
            await it.ask("POST", CHAT_PATH, {**CHAT, "stream": True}, **bearer(keys["other"]))
            await it.ask("POST", CHAT_PATH, {**CHAT, "temperature": -1}, **bearer(keys["other"]))
            await it.ask("GET", "/debug/cluster", **bearer(keys["acme"]))
            await it.ask("GET", "/v1/models", **bearer("hw-wrong-secret"))
            tenants = {request.tenant for request in worker.requests}
            assert tenants == {"acme", "other"}
            text = (await it.ask("GET", "/metrics", **bearer(keys["acme"]))).body.decode()
            samples = {
                (sample.name, sample.labels["tenant"]): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if "tenant" in sample.labels and "quota" not in sample.labels
            }
            assert samples["headwater_tenant_requests_total", "acme"] == 3
            assert samples["headwater_tenant_generation_tokens_total", "acme"] == 9
            assert samples["headwater_tenant_cached_tokens_total", "acme"] == 48
            assert samples["headwater_tenant_generation_tokens_total", "other"] == 3
            assert samples["headwater_tenant_requests_total", "other"] == 1, "no worker was given the second one"

    uvloop.run(main())
    lines = [json.loads(line) for line in usage_path.read_text().splitlines()]
    assert [line["tenant"] for line in lines] == ["acme"] * 3 + ["other"]
    assert {line["output_tokens"] for line in lines} == {3}
    assert all(line["key_id"] and line["prompt_tokens"] > 0 and line["cached_tokens"] == 16 for line in lines)
    events = [json.loads(line) for line in audit_path.read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "refused", "refused", "stopped"]
    assert [event.get("code") for event in events[1:3]] == ["forbidden", "invalid_api_key"]
    written = usage_path.read_text() + audit_path.read_text()
    for secret in (*keys.values(), "hw-wrong-secret", "hi", *(spec.sha256 for spec in ring.keyring.keys.values())):
        assert f'"{secret}"' not in written
        assert secret not in written or secret == "hi"
    for path in (usage_path, audit_path):
        assert path.stat().st_mode & 0o077 == 0


def test_no_probe_tells_what_another_tenant_has_cached(demo_model: ResolvedModel, ring: Ring) -> None:
    """The same prompt, which the other tenant has sent before: neither the answer nor the plan nor the block ids show
    it, on an engine that does have it in its cache; and within a tenant, or a group that shares, it does show."""
    victim, probe = ring.add("victim"), ring.add("probe")
    family = [ring.add(name, kv_group="family") for name in ("son", "daughter")]
    ids = [1234] * 500

    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend(FrontendConfig(keys=str(ring.path)))
            await it.mocker("w0")

            async def cached(key: str, **more: Any) -> tuple[int, int]:
                reply = await it.ask("POST", "/v1/completions", body(ids, **more), **bearer(key))
                plan = plan_of(reply)
                assert plan["predicted"]["cached_tokens"] == plan["actual"]["cached_tokens"]
                told = reply.json()["usage"]["prompt_tokens_details"]
                return plan["actual"]["cached_tokens"], told["cached_tokens"] if told else 0

            assert await cached(victim) == (0, 0)
            assert await cached(victim) == (496, 496)
            assert await cached(probe) == (0, 0)
            for guess in ("victim", "6:victim:", "0::", "6:victim"):
                assert await cached(probe, cache_salt=guess) == (0, 0)
            assert await cached(probe) == (496, 496)
            reply = await it.ask("POST", "/v1/completions", body(ids), **bearer(probe), x_tenant_id="victim")
            assert plan_of(reply)["tenant"] == "probe"
            assert await cached(family[0]) == (0, 0)
            assert await cached(family[1]) == (496, 496)

    uvloop.run(main())


def test_a_session_of_another_tenant_is_not_ours(demo_model: ResolvedModel, ring: Ring) -> None:
    """The session's worker is remembered per tenant, so its name tells nothing to others."""
    first, second = ring.add("first"), ring.add("second")

    async def main() -> None:
        async with site(demo_model) as it:
            await it.start_frontend(FrontendConfig(keys=str(ring.path)), router_session_affinity="hard")
            for name in ("w0", "w1"):
                await it.mocker(name)
            affinity, now = it.frontend.dispatcher._router.affinity, it.frontend._clock.now()
            affinity.bind("first/s1", "w1", now)
            affinity.bind("second/s1", "w0", now)
            for number in range(4):
                for key, worker in ((first, "w1"), (second, "w0")):
                    ids = body([number] * 64)
                    reply = await it.ask("POST", "/v1/completions", ids, **bearer(key), x_session_id="s1")
                    assert plan_of(reply)["worker_id"] == worker

    uvloop.run(main())


def test_a_broken_keyring_keeps_the_frontend_from_starting(demo_model: ResolvedModel, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("{}")
    path.chmod(0o600)

    async def main(**config: Any) -> None:
        with pytest.raises(ConfigError):
            async with running(demo_model, **config):
                pass

    asyncio.run(main(keys=str(path)))
    asyncio.run(main(keys=str(tmp_path / "none")))


def test_aborted_requests_are_paid_for_and_give_their_place_back(demo_model: ResolvedModel, ring: Ring) -> None:
    key = ring.add("acme", max_concurrent=1, tokens_per_minute=1000)

    async def main() -> None:
        async with running(demo_model, keys=str(ring.path)) as it:
            worker = await it.worker(answers=False)
            async with it.connection() as gone:
                await gone.send("POST", CHAT_PATH, {**CHAT, "stream": True, "max_tokens": 50}, **bearer(key))
                await until(lambda: len(worker.requests) == 1)
                worker.step(SequenceOutput(worker.requests[0].stream, [504, 505], num_cached_tokens=0))
                await asyncio.sleep(0.05)
            account = it.frontend.tenancy.meter.accounts["acme"]
            await until(lambda: account.own_in_progress == 0)
            assert account.reserved_tokens == 0
            assert account.since_start.output_tokens == 2
            assert account.since_start.prompt_tokens > 0

    uvloop.run(main())


def test_what_never_reached_a_worker_is_not_charged(demo_model: ResolvedModel, ring: Ring) -> None:
    key = ring.add("acme", monthly_tokens=5000)

    async def main() -> None:
        async with site(demo_model) as it:
            config = FrontendConfig(keys=str(ring.path))
            await it.start_frontend(config, router_queue_backlog=0.5, router_queue_timeout=0.3)
            worker = await it.scripted("w0", max_num_batched_tokens=400)
            async with it.connection() as first:
                await first.send("POST", "/v1/completions", body([5] * 500), **bearer(key))
                await until(lambda: len(worker.requests) == 1)
                late = await it.ask("POST", "/v1/completions", body([6] * 500), **bearer(key))
                assert late.status == 503
                account = it.frontend.tenancy.meter.accounts["acme"]
                await until(lambda: account.own_in_progress == 1)
                assert (account.since_start.requests, account.since_start.tokens) == (0, 0)

    uvloop.run(main())


def test_what_goes_on_for_a_client_that_left_is_charged_and_belongs_to_its_key(
    demo_model: ResolvedModel, ring: Ring
) -> None:
    key, other = ring.add("acme", max_concurrent=1), ring.add("other")
    stream = {**CHAT, "stream": True, "max_tokens": 50}
    resumable = {"x_request_id": "mine", "last_event_id": "0"}

    async def main() -> None:
        async with running(demo_model, keys=str(ring.path)) as it:
            worker = await it.worker(answers=False)
            async with it.connection() as gone:
                await gone.send("POST", CHAT_PATH, stream, **bearer(key), **resumable)
                await until(lambda: len(worker.requests) == 1)
                worker.step(SequenceOutput(worker.requests[0].stream, [504, 505], num_cached_tokens=0))
                await asyncio.sleep(0.05)
            account = it.frontend.tenancy.meter.accounts["acme"]
            await asyncio.sleep(0.1)
            assert account.own_in_progress == 1, "it still computes"
            assert (await chat(it, key)).status == 429
            async with it.connection() as thief:
                await thief.send("POST", CHAT_PATH, stream, **bearer(other), **resumable)
                await until(lambda: len(worker.requests) == 2)
            async with it.connection() as again:
                resumable["last_event_id"] = "1"
                await again.send("POST", CHAT_PATH, stream, **bearer(key), **resumable)
                await until(lambda: it.frontend.dispatcher.faults.resumed == 1)
            assert account.own_in_progress == 1, "coming back for an answer is not one more request"
            worker.step(SequenceOutput(worker.requests[0].stream, [506] * 20, "length"))
            await until(lambda: account.own_in_progress == 0)
            assert account.since_start.output_tokens == 22

    uvloop.run(main())
