"""What suites for engines share: what an engine is asked to be like, its sizes, prompts, and a bench to run it on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from headwater.config.schema import EngineConfig
from headwater.engines.base import Engine
from headwater.engines.engine import CoreEngine
from headwater.engines.watched import Bench, watch

VOCABULARY = 256
BLOCK_SIZE = 16
SIZES = EngineConfig(
    block_size=BLOCK_SIZE, num_kv_blocks=48, max_num_seqs=4, max_num_batched_tokens=64, max_waiting=8, max_model_len=512
)


SETTLE_S = 0.15
VARIANT = "its batches are not invariant"
NO_EXECUTOR = "breaks an executor of ours"
_COMPARING = (
    "test_preemption_does_not_show",
    "test_a_moved_sequence_goes_on_where_it_was",
    "test_a_seed_draws_the_same_again",
)
"""Checks that ask for equal outputs among other things."""


def prompt_of(length: int, letter: int = 1) -> list[int]:
    """Token ids of a prompt; different letters share no prefix."""
    return [20 + letter] + [20 + (letter * 31 + position * 7) % 200 for position in range(length - 1)]


class EngineSuite:
    """Inherit, and say how to make an engine."""

    block_size = BLOCK_SIZE
    plans_itself = False
    """Whether the engine plans its own steps, out of our sight: its steps are then not accounted for to the token, a
    prefix is shared once it has been computed, and blocks are told of a moment later."""

    keeps_salts = True
    """Whether requests of other namespaces than the model's own are served."""

    counts_preemptions = True
    """Whether it says how often it took a sequence's blocks away."""

    batch_invariant = True
    """What it says of itself: whether outputs may be compared."""

    @classmethod
    def remarks(cls) -> dict[str, str]:
        """By check, what is true of this engine beyond a plain yes: the same words above decide what is asked."""
        found: dict[str, str] = {}
        if not cls.batch_invariant:
            found = dict.fromkeys(_COMPARING, "yes; outputs are not compared")
            found["test_neighbours_chunks_and_cache_do_not_change_the_output"] = f"not asked: {VARIANT}"
        if cls.plans_itself:
            found["test_a_failing_executor_ends_everything_with_an_error"] = f"not asked: {NO_EXECUTOR}"
        if not cls.keeps_salts:
            found["test_stored_blocks_have_the_ids_of_the_contract"] = "yes; other salts are refused by name"
            found["test_tenants_share_no_block"] = "refused by name"
        if not cls.counts_preemptions:
            found["test_preemption_does_not_show"] = "yes; outputs are not compared, preemptions not counted"
        return found

    async def settle(self) -> None:
        """Until what was computed has been told of."""
        if self.plans_itself:
            await asyncio.sleep(SETTLE_S)

    def create(self, sizes: EngineConfig) -> Engine:
        """A new engine, not started, with these sizes and a model of the test's choice."""
        raise NotImplementedError

    @asynccontextmanager
    async def bench(self, **changes: object) -> AsyncIterator[Bench]:
        sizes = msgspec.structs.replace(SIZES, **changes)
        capacity = (sizes.num_kv_blocks or 0) * sizes.block_size
        engine = self.create(msgspec.structs.replace(sizes, max_model_len=min(sizes.max_model_len or 0, capacity)))
        cores, executors = watch(engine) if isinstance(engine, CoreEngine) else ([], [])
        async with Bench.running(engine) as bench:
            bench.core = cores[0] if cores else None
            bench.executor = executors[0] if executors else None
            yield bench
