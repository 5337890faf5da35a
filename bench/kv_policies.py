"""Which blocks to keep: eviction policies and the admission filter on a trace, with the production ledger.

    python bench/kv_policies.py TRACE.jsonl.gz [--host 0.02 0.1 0.3] [--below 4]

TRACE is Mooncake JSONL (one of `hash_ids` per block of 512 tokens). Sizes are fractions of its different blocks.
Every request takes the longest prefix that host or disk tier have and then stores all its blocks; what is taken from
disk comes up into the host tier. Figures are blocks found of all blocks asked for, and blocks written to disk.
"""

import argparse
from hashlib import blake2b
from pathlib import Path

from headwater.bench.traces import read_trace
from headwater.kv.admission import AdmissionName, make_admission
from headwater.kv.block import ROOT, Block, Family
from headwater.kv.lifecycle import Ledger
from headwater.kv.policies import PolicyName, make_policy
from headwater.kv.pricing import ComputeRate
from headwater.kv.rules import Rules
from headwater.kv.shares import Shares
from headwater.kv.space import PAGE_BYTES, Space
from headwater.kv.table import RECORD_BYTES, BlockTable, index_bytes

FAMILY = Family("model", "layout", "", PAGE_BYTES)
RATE = ComputeRate(0.02, 2e-6, 512)
POLICIES: tuple[PolicyName, ...] = ("lru", "s3fifo", "cost")


class Tier:
    def __init__(self, name: str, policy: PolicyName, num_blocks: int) -> None:
        records = num_blocks + 1
        self.table = BlockTable(
            memoryview(bytearray(records * RECORD_BYTES)), memoryview(bytearray(index_bytes(records)))
        )

        def worth(slot: int) -> float:
            record = self.table.read(slot)
            return RATE.block_ms(record.block.position) if record else 0.0

        space = Space(num_blocks * PAGE_BYTES, num_blocks * PAGE_BYTES)
        chosen = make_policy(policy, records, 1, worth)
        self.ledger = Ledger("host", self.table, space, chosen, Shares(), Rules(max_reserved=1.0))
        self.num_written = 0

    def take(self, ids: bytes) -> int:
        """Leading blocks that are here; they count as used."""
        leading = self.table.num_leading(ids)
        ticket, _ = self.ledger.lease(0, FAMILY, ids[: 16 * leading], 0.0, 0)
        self.ledger.release(0, ticket)
        return leading

    def put(self, blocks: list[Block]) -> None:
        ticket, answers = self.ledger.reserve(0, FAMILY, blocks, 0.0)
        written = self.ledger.commit(0, ticket, {slot: 0 for slot in answers if isinstance(slot, int)}, 0)
        self.num_written += len(written)
        self.ledger.drain_events()


def chains(path: Path) -> list[list[Block]]:
    found: list[list[Block]] = []
    for row in read_trace(path):
        parent, chain = ROOT, []
        for position, hash_id in enumerate(row.hash_ids):
            block = Block(blake2b(f"{hash_id}".encode(), digest_size=16).digest(), parent, position, 0)
            chain.append(block)
            parent = block.id
        found.append(chain)
    return found


def replay(
    requests: list[list[Block]], policy: PolicyName, host_blocks: int, disk_blocks: int, admission: AdmissionName
) -> tuple[float, float, int]:
    """Fractions found in the host tier and in either, and blocks written to disk."""
    host = Tier("host", policy, host_blocks)
    disk = Tier("disk", policy, disk_blocks) if disk_blocks else None
    filtered = make_admission(admission)
    asked = in_host = in_disk = 0
    for chain in requests:
        ids = b"".join(block.id for block in chain)
        asked += len(chain)
        found = host.take(ids)
        in_host += found
        if disk is not None:
            below = disk.take(ids[16 * found :])
            in_disk += below
            absent = [block for block in chain if disk.table.find(block.id) < 0]
            disk.put([block for block in absent if filtered.admit(int.from_bytes(block.id[:8], "little"))])
        host.put(chain)
    return in_host / asked, (in_host + in_disk) / asked, disk.num_written if disk else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--host", type=float, nargs="+", default=[0.02, 0.1, 0.3])
    parser.add_argument("--below", type=float, default=4.0, help="disk blocks per host block")
    args = parser.parse_args()
    requests = chains(args.trace)
    different = len({block.id for chain in requests for block in chain})
    asked = sum(map(len, requests))
    most = 1 - different / asked
    print(f"{len(requests)} requests, {asked} blocks asked for, {different} different: {most:.1%} can be found")
    policies = "".join(f"{policy:>9}" for policy in POLICIES)
    print(f"{'host':>6}{policies}{'disk':>8}{'second use: found, written':>28}{'all: found, written':>24}")
    for fraction in args.host:
        host_blocks = max(64, int(fraction * different))
        disk_blocks = int(args.below * host_blocks)
        alone = [replay(requests, policy, host_blocks, 0, "all")[0] for policy in POLICIES]
        both = [replay(requests, "lru", host_blocks, disk_blocks, admission) for admission in ("second-use", "all")]
        print(
            f"{fraction:>6.0%}"
            + "".join(f"{rate:>9.1%}" for rate in alone)
            + f"{disk_blocks:>8}"
            + "".join(f"{found:>16.1%}, {written:>7}" for _, found, written in both)
        )


if __name__ == "__main__":
    main()
