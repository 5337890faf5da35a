"""How long a request waits for blocks of the store once it was decided to load them."""

import asyncio
from typing import Any

import pytest
from test_handoff_parts import card

from headwater.kv.pricing import LoadPlan, TierRun, plan_load
from headwater.protocol.request import EngineRequest, SamplingParams
from headwater.tiers import onload
from headwater.tiers.chains import Chains

BLOCKS, BLOCK_TOKENS = 100, 16


class Store:
    """Has all blocks, in a tier of that speed."""

    def __init__(self, load_ms: float) -> None:
        self.load_ms = load_ms

    async def match(self, chain: Any, timeout_s: float) -> list[TierRun]:
        return [TierRun("disk", chain.num_blocks, self.load_ms)]

    def plan(self, chain: Any, *args: Any, **sizes: int) -> LoadPlan:
        return plan_load(*args, **sizes)


class Port:
    """Keeps for how long the engine is to wait."""

    def __init__(self) -> None:
        self.timeout_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def submit_loading(self, request: EngineRequest, loader: object, timeout_s: float) -> None:
        self.timeout_s.set_result(timeout_s)


@pytest.mark.parametrize(
    ("load_ms", "token_ms", "patience_s"),
    [
        (200.0, 1.0, 0.8),
        (1000.0, 1.0, 1.6),
        (1500.0, 1.0, 1.6),
        (10.0, 1.0, onload._MIN_PATIENCE_S),
        (50.0, 0.05, onload._MIN_PATIENCE_S),
    ],
    ids=["four times the load", "as long as computing", "though it was to take longer", "a moment", "at least"],
)
def test_a_load_is_waited_for_no_longer_than_computing_takes(
    load_ms: float, token_ms: float, patience_s: float
) -> None:
    async def check() -> float:
        port = Port()
        loader = onload.Onloader(lambda _: None, port, Store(load_ms), lambda new, _: token_ms * new)  # type: ignore[arg-type]
        request = EngineRequest(1, "r", "m", bytes(4 * (BLOCKS * BLOCK_TOKENS + 1)), SamplingParams())
        assert loader.take(request, Chains(card(), 4096).of(request), 0)
        return await asyncio.wait_for(port.timeout_s, 10)

    assert asyncio.run(check()) == pytest.approx(patience_s + onload._ENGINE_SLACK_S)
