"""Who computes which prefix right now, so that siblings wait for it instead of computing it again.

A prefilling or loading sequence leads under the id of the block it gets next. Ids are chained: whoever lacks just this
block shares everything before it, so one lookup finds the leader. A follower waits until the shared blocks are there,
and only in steps in which its leader advances: waiting never costs more steps than the leader needs. (One that loads
counts as advancing: a deadline bounds it.)
"""

from headwater.kv.identity import num_shared_blocks
from headwater.scheduler.entry import Entry, State
from headwater.types import BLOCK_ID_BYTES


class Leaders:
    """Leaders by the id of the block they compute next."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_next_block: dict[bytes, Entry] = {}

    def lead(self, entry: Entry) -> None:
        """Register a sequence that stands at a block border; the first of several leads."""
        block_id = self._block_id(entry, entry.num_computed_tokens // self._block_size)
        if block_id and self._by_next_block.setdefault(block_id, entry) is entry:
            entry.leads = block_id

    def stop(self, entry: Entry) -> None:
        if entry.leads is not None:
            del self._by_next_block[entry.leads]
            entry.leads = None

    def follows(self, entry: Entry, step: int) -> bool:
        """Whether the leader found earlier still computes the shared prefix, in this very step."""
        leader = entry.leader
        if leader is None:
            return False
        shared_tokens = entry.shared_blocks * self._block_size
        if _advances(leader, step) and leader.num_computed_tokens < shared_tokens:
            return True
        entry.leader = None
        return False

    def find(self, entry: Entry, num_matched: int, step: int) -> bool:
        """Whether a leader computes the block after the `num_matched` that were found."""
        block_id = self._block_id(entry, num_matched)
        leader = self._by_next_block.get(block_id)
        if leader is None or not _advances(leader, step):
            return False
        entry.leader = leader
        entry.shared_blocks = num_shared_blocks(entry.block_ids, leader.block_ids)
        return True

    def check(self, entries: list[Entry]) -> bool:
        """Whether exactly the entries that think they lead are registered."""
        leading = [entry for entry in entries if entry.leads is not None]
        return len(leading) == len(self._by_next_block) and all(
            self._by_next_block.get(entry.leads or b"") is entry and entry.state in (State.PREFILLING, State.LOADING)
            for entry in leading
        )

    def _block_id(self, entry: Entry, number: int) -> bytes:
        return bytes(entry.block_ids[number * BLOCK_ID_BYTES : (number + 1) * BLOCK_ID_BYTES])


def _advances(leader: Entry, step: int) -> bool:
    return leader.state is State.LOADING or (leader.state is State.PREFILLING and leader.planned_in_step == step)
