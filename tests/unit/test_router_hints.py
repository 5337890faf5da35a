"""Routing hints: what headers, `nvext` and fields of the body turn into."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.clock import RealClock
from headwater.errors import InvalidRequest
from headwater.frontend.hints import NO_HINTS, RoutingHints
from headwater.frontend.openai.preparation import Asker
from headwater.frontend.openai.schema import AgentHints, CompletionRequest, NvExt
from headwater.frontend.openai.serving import ServedModel
from headwater.frontend.tenants.principal import NOBODY, Principal
from headwater.weights import ResolvedModel
from openai_twin import Api, served_demo

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def model(demo_model: ResolvedModel) -> ServedModel:
    return served_demo(demo_model)


def asked(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="p", **fields)


def hints_of(fields: CompletionRequest, tenant: str = "", **headers: str) -> RoutingHints:
    return asker(tenant, **headers).hints(fields)


def asker(tenant: str = "", **headers: str) -> Asker:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    principal = Principal(frozenset(), tenant=tenant, kv_group=tenant)
    return Asker("r", RealClock(), named, principal)


def test_a_plain_request_has_none() -> None:
    assert hints_of(asked()) == NO_HINTS
    assert asker().priority(asked()) == 0
    assert asker().salt(asked()) == ""


def test_what_agents_send_is_used() -> None:
    agent = AgentHints(prefix_id="langchain-dynamo-0123", osl=512, iat=250, latency_sensitivity=3.0, priority=1)
    hints = hints_of(asked(nvext=NvExt(agent_hints=agent)))
    assert hints.prefix_group == "langchain-dynamo-0123"
    assert hints.expected_output_tokens == 512
    assert hints.session_keep_s == pytest.approx(0.5), "twice the time until the next turn"
    assert hints.latency_sensitivity == 3.0
    assert asker().priority(asked(nvext=NvExt(agent_hints=agent))) == 1
    strict = AgentHints(priority=1, strict_priority=7)
    assert asker().priority(asked(nvext=NvExt(agent_hints=strict))) == 7


@pytest.mark.parametrize(("given_value", "used"), [(None, 1.0), (0.0, 1.0), (1.0, 1.0), (-4.0, 1.0), (1e9, 10.0)])
def test_sensitivity_is_bounded(given_value: float | None, used: float) -> None:
    agent = AgentHints(latency_sensitivity=given_value)
    assert hints_of(asked(nvext=NvExt(agent_hints=agent))).latency_sensitivity == used


def test_sessions_by_name_the_nearest_first() -> None:
    both = asked(user="somebody", prompt_cache_key="chat-7")
    assert hints_of(asked(user="somebody")).session_id == "somebody"
    assert hints_of(both).session_id == "chat-7"
    assert hints_of(both, x_session_id="s1").session_id == "s1"
    assert hints_of(both, x_dynamo_session_id="s2").session_id == "s2"
    assert hints_of(both, x_session_id=" ").session_id == "chat-7"
    assert len(hints_of(asked(user="x" * 100_000)).session_id or "") == 32


def test_workers_by_name() -> None:
    assert hints_of(asked(nvext=NvExt(backend_instance_id=17))).worker_id == "17"
    assert hints_of(asked(nvext=NvExt(decode_worker_id="w-1", backend_instance_id="w-1"))).worker_id == "w-1"
    assert hints_of(asked(nvext=NvExt(decode_worker_id="w-1")), x_worker_instance_id="w-2").worker_id == "w-2"
    with pytest.raises(InvalidRequest, match="two workers to decode, w-1 and w-2"):
        hints_of(asked(nvext=NvExt(decode_worker_id="w-1", backend_instance_id="w-2")))


@given(st.integers(-(2**31) + 1, 2**31 - 1))
def test_priority_of_the_header_wins(value: int) -> None:
    assert asker(x_request_priority=str(value)).priority(asked(priority=5)) == value


@pytest.mark.parametrize("text", ["1.5", "--1", "", "-", "²", "9" * 11, "2147483648", "0x1", "1 2"])
def test_a_priority_that_is_none_is_refused(text: str) -> None:
    if not text:
        assert asker(x_request_priority=text).priority(asked(priority=5)) == -5
        return
    with pytest.raises(InvalidRequest, match="x-request-priority"):
        asker(x_request_priority=text).priority(asked())


def test_a_priority_is_refused_by_the_header_that_was_sent() -> None:
    with pytest.raises(
        InvalidRequest, match='x-dynamo-request-priority is "high", expected an integer from'
    ) as refused:
        asker(x_dynamo_request_priority="high").priority(asked())
    assert refused.value.param == "x-dynamo-request-priority"


def test_a_salt_names_a_tenant_without_giving_itself_away() -> None:
    first, second = (hints_of(asked(cache_salt=salt)).salt_tenant for salt in ("secret", "other"))
    assert first != second
    assert "secret" not in first
    assert hints_of(asked(nvext=NvExt(cache_salt="secret"))).salt_tenant == first
    trusted = hints_of(asked(cache_salt="secret"), tenant="acme")
    assert (trusted.tenant, trusted.salt_tenant) == ("acme", "")
    salts = [asker(tenant=name).salt(asked(cache_salt=salt)) for name in ("acme", "") for salt in ("secret", "other")]
    assert len({*salts, asker(tenant="acme").salt(asked()), asker().salt(asked())}) == 6, "tenant and salt both count"
    assert asker().salt(asked(cache_salt="4:acme:")) != asker(tenant="acme").salt(asked()), "a salt is no tenant"


def test_hints_reach_the_dispatcher_and_an_untrusted_tenant_does_not(model: ServedModel) -> None:
    async def post(trusting: bool) -> tuple[RoutingHints, bytes]:
        api = Api(model)
        headers = {b"x-session-id": b"s1", b"x-tenant-id": b"acme", b"x-request-priority": b"4"}
        principal = Principal(frozenset(), tenant="acme", kv_group="acme") if trusting else NOBODY
        await api.post(PATH, CHAT, headers=headers, principal=principal)
        (request,) = api.dispatcher.requests
        assert request.priority == 4
        return api.dispatcher.hints[0], request.block_ids or request.namespace

    hints, plain = asyncio.run(post(False))
    assert (hints.session_id, hints.tenant) == ("s1", "")
    hints, separate = asyncio.run(post(True))
    assert hints.tenant == "acme"
    assert plain != separate, "a trusted tenant's cache is its own"


def test_bad_hints_are_400_with_the_field(model: ServedModel) -> None:
    async def post() -> dict[str, Any]:
        api = Api(model)
        responder = await api.post(PATH, {**CHAT, "nvext": {"agent_hints": {"iat": -1}}})
        assert responder.status == 400
        return responder.error

    assert asyncio.run(post())["param"] == "nvext.agent_hints.iat"
