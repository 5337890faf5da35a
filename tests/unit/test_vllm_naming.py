"""The store's connector below a worker of ours: blocks are named as the cluster names them. And which connectors vLLM
is given."""

import importlib
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine_doubles import install
from headwater.kv.connectors.naming import Naming
from headwater.kv.connectors.vllm_naming import naming_in, request_params, store_connector
from headwater.kv.identity import chain_block_ids, namespace
from headwater.kv.node.agent import StoreAgent
from headwater.kv.shards import part_ids
from kv_process import store_socket
from vllm_connector_double import BLOCK, INTERFACE, Request, VllmEngine, names

SALTED = namespace("print", "layout", salt="4:acme:")
PLAIN = namespace("print", "layout")
Make = Callable[..., VllmEngine]


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with store_socket() as path:
        yield path


@pytest.fixture
def store(socket: Path) -> Iterator[StoreAgent]:
    with StoreAgent(socket, "test") as agent:
        yield agent
        agent._call(agent.client.clear()).result(10)


@pytest.fixture
def make(
    monkeypatch: pytest.MonkeyPatch, socket: Path, store: StoreAgent, request: pytest.FixtureRequest
) -> Iterator[Make]:
    """A fresh life of the engine, as a worker attaches the store to it unless `named` says otherwise; ended before the
    store is cleared."""
    install(monkeypatch, INTERFACE, **names())
    connector = importlib.import_module("headwater.kv.connectors.vllm")
    made: list[VllmEngine] = []

    def engine(*, named: bool = True, tp: int = 1, heads: int = 0) -> VllmEngine:
        extra = store_connector(socket)["kv_connector_extra_config"] if named else None
        made.append(VllmEngine(connector, str(socket), request.node.name, tp=tp, heads=heads, extra=extra))
        return made[-1]

    yield engine
    for one in made:
        one.close()
    del sys.modules["headwater.kv.connectors.vllm"]


def prompt(count: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + number * 104729) % 50_000 for number in range(count)]


def asked(name: str, tokens: list[int], key: bytes = SALTED, tenant: str = "acme") -> Request:
    params = request_params(Naming(key.hex(), "print", tenant))
    return Request(name, list(tokens), kv_transfer_params=params)


def of_cluster(key: bytes, tokens: list[int]) -> bytes:
    """The ids that a frontend gives the blocks of a prompt."""
    return chain_block_ids(key, array("I", tokens).tobytes(), BLOCK)


def layout_of(engine: VllmEngine) -> str:
    layout: str = engine.scheduler._of_scheduler()._parts.layout
    return layout


def stored(agent: StoreAgent, ids: bytes, blocks: int) -> bool:
    deadline = time.monotonic() + 5
    while agent.num_in_host(ids) < blocks:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(("tp", "later"), [(1, 1), (2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("tenant", ["acme", ""])
def test_blocks_have_the_ids_and_the_tenant_of_the_request(
    make: Make, store: StoreAgent, tp: int, later: int, tenant: str
) -> None:
    tokens, key = prompt(42), SALTED if tenant else PLAIN
    first = make(tp=tp, heads=2)
    answer = first.run(asked("a", tokens, key, tenant), 4)
    assert all(stored(store, part_ids(of_cluster(key, tokens), layout_of(first), head), 10) for head in range(2))
    families = store._call(store.client.status()).result(5).tiers[0].families
    assert [(one.model, one.tenant, one.parts, one.beside) for one in families] == [
        ("print", tenant, 2, False),
        ("print", tenant, 2, True),
    ]
    again = make(tp=later, heads=2)
    assert again.run(asked("b", tokens, key, tenant), 4) == answer
    assert again.computed == 2 + 3
    other = make(tp=tp, heads=2)
    assert other.run(asked("c", tokens, namespace("print", "layout", salt="5:other:"), "other"), 4) == answer
    assert other.computed == 42 + 3, "tenants share nothing"


def test_nobody_but_a_worker_names_blocks(make: Make, store: StoreAgent) -> None:
    """Clients of a vLLM of their own may send what they like."""
    tokens = prompt(42)
    answer = make().run(asked("a", tokens), 4)
    assert stored(store, of_cluster(SALTED, tokens), 10)
    alone = make(named=False)
    assert alone.run(asked("b", tokens), 4) == answer
    assert alone.computed == 42 + 3, "what is another's is not found by its name"


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"headwater_naming": None},
        {"headwater_naming": {"namespace": "ab", "model": "m", "tenant": ""}},
        {"headwater_naming": {"namespace": "g" * 64, "model": "m", "tenant": ""}},
        {"headwater_naming": {"namespace": "a" * 64, "model": "m", "tenant": "t" * 300}},
    ],
)
def test_a_request_without_a_name_that_makes_sense_is_computed(make: Make, store: StoreAgent, params: Any) -> None:
    engine = make()
    answer = engine.run(Request("a", prompt(42), kv_transfer_params=params), 4)
    assert len(answer) == 4
    assert engine.computed == 42 + 3
    assert store._call(store.client.status()).result(5).tiers[0].num_blocks == 0


def test_a_ticket_does_not_say_how_blocks_are_named() -> None:
    own = Naming(SALTED.hex(), "print", "acme")
    ticket = {"remote_host": "a", **request_params(Naming(PLAIN.hex(), "print", ""))}
    params = request_params(own, ticket)
    assert naming_in(params) == own
    assert params["remote_host"] == "a"


def test_after_a_reset_nothing_of_before_is_found(make: Make, store: StoreAgent) -> None:
    tokens = prompt(42)
    engine = make()
    answer = engine.run(asked("a", tokens), 4)
    assert stored(store, of_cluster(SALTED, tokens), 10)
    assert engine.scheduler.reset_cache()
    computed = engine.computed
    assert engine.run(asked("b", tokens), 4) == answer
    assert engine.computed - computed == 42 + 3


# Which connectors vLLM is given


@dataclass
class KVTransferConfig:
    kv_connector: str | None = None
    engine_id: str | None = None
    kv_role: str | None = None
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, Any] | None = None
    kv_load_failure_policy: str = "fail"

    def parts(self) -> list[str]:
        assert self.kv_connector == "MultiConnector"
        assert self.kv_load_failure_policy == "recompute"
        assert self.kv_connector_extra_config is not None
        return [one["kv_connector"] for one in self.kv_connector_extra_config["connectors"]]


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    install(monkeypatch, "vllm.config", KVTransferConfig=KVTransferConfig)
    name = "headwater.engines.vllm.connectors"
    yield importlib.import_module(name)
    del sys.modules[name]


NIXL = KVTransferConfig("NixlConnector", "made-up", "kv_both")
STORE = KVTransferConfig(
    "HeadwaterConnector", kv_role="kv_both", kv_connector_module_path="headwater.kv.connectors.vllm"
)
HANDOFF = {"kv_connector": "HandoffConnector", "kv_connector_module_path": "headwater.kv.connectors.vllm_handoff"}
SOCKET = Path("/run/kv.sock")


def test_the_store_is_attached_where_this_host_has_one(choosing: Any) -> None:
    assert choosing.connectors(None, None, None) == choosing.NO_CONNECTORS
    one = choosing.connectors(None, None, SOCKET)
    assert (one.config.kv_connector, one.store, one.move) == ("HeadwaterConnector", True, False)
    assert one.config.kv_connector_extra_config["socket"] == str(SOCKET)
    both = choosing.connectors(None, HANDOFF, SOCKET)
    assert both.config.parts() == ["HandoffConnector", "HeadwaterConnector"], "what a hand-off brings is not looked for"
    assert (both.store, both.move) == (True, False)
    assert choosing.connectors(None, HANDOFF, None).config.kv_connector == "HandoffConnector"


def test_the_operators_own_connectors_are_kept(choosing: Any) -> None:
    found = choosing.connectors(NIXL, None, None)
    assert (found.config, found.store, found.move) == (NIXL, False, True), "as they were given"
    found = choosing.connectors(NIXL, None, SOCKET)
    assert found.config.parts() == ["HeadwaterConnector", "NixlConnector"]
    assert (found.store, found.move) == (True, True)
    assert "engine_id" not in found.config.kv_connector_extra_config["connectors"][1], "vLLM gives each its own"
    several = choosing.connectors(found.config, HANDOFF, None)
    assert several.config.parts() == ["HandoffConnector", "HeadwaterConnector", "NixlConnector"], "no nest of them"
    assert several.move


def test_a_store_that_the_operator_attached_is_not_attached_again(choosing: Any) -> None:
    found = choosing.connectors(STORE, None, SOCKET)
    assert (found.config, found.store, found.move) == (STORE, False, False)
    found = choosing.connectors(STORE, HANDOFF, SOCKET)
    assert found.config.parts() == ["HandoffConnector", "HeadwaterConnector"]
    assert not found.store
