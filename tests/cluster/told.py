"""What a router knows of a worker's blocks, from all that the worker has told it."""

from handoff_bench import Member

from headwater.kv.index import block_keys
from headwater.protocol.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.router.residency import Residency
from headwater.types import Tier, WorkerId

BLOCK_TOKENS = 16


def residency(worker: Member) -> Residency:
    known = Residency(10_000)
    known.add_worker("w")
    if worker.snapshots:
        known.rebuild("w", worker.snapshots[-1].stored)
    for batch in worker.batches:
        for event in batch.events:
            if isinstance(event, BlocksStored | BlocksRemoved | BlocksCleared):
                known.apply("w", event)
    return known


def told(worker: Member, ids: bytes, tier: Tier) -> int:
    """Blocks of the chain in one tier."""
    return residency(worker).index.match(block_keys(ids), tier).get(WorkerId("w"), 0)


def counted_on(worker: Member, ids: bytes, num_tokens: int) -> int:
    """Tokens of a prompt of so many that begins with the chain."""
    return residency(worker).cached_tokens(block_keys(ids), BLOCK_TOKENS, num_tokens).get("w", 0)
