"""The peer tier between two processes of this host, over TCP and over CMA, beside a plain `headwater.transfer` read.

    python bench/kv_peer.py [--block 64KiB 2MiB] [--mebibytes 128] [--rounds 5]

Both sides are on the same cores, so TCP here pays for both ends of the wire. CPU seconds are the reader's.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time

from headwater.clock import RealClock
from headwater.config.units import parse_bytes
from headwater.kv.block import ROOT, Block, Family
from headwater.kv.checksum import checksum
from headwater.kv.identity import chain_block_ids, split_block_ids
from headwater.kv.stores.host import LOCAL, HostTier
from headwater.kv.stores.ledgered import TierOptions
from headwater.kv.stores.peer import PeerOptions, PeerTier
from headwater.kv.stores.peer_offer import PeerOffer
from headwater.transfer.agent import Agent
from headwater.transfer.options import AgentOptions

KEY = b"not a secret, only for this benchmark"
PAGE_BYTES = 4096


def family_of(block_bytes: int) -> Family:
    return Family("bench", "bench", "", block_bytes)


def ids_of(number: int, count: int) -> list[bytes]:
    return list(split_block_ids(chain_block_ids(bytes([number]) * 32, bytes(4 * count), 1)))


def make_host(num_bytes: int) -> HostTier:
    return HostTier(TierOptions(num_bytes + (128 << 20), min_block_bytes=PAGE_BYTES), RealClock())


def make_agent(name: str, host: HostTier, backend: str) -> tuple[Agent, object]:
    agent = Agent(name, AgentOptions(key=KEY, backends=(backend,)))
    return agent, agent.register(host.pool.data, block_bytes=PAGE_BYTES, access="read")


async def offer(block_bytes: int, count: int, rounds: int, backend: str) -> None:
    """The other process: prints its port, ends with its input."""
    host = make_host(block_bytes * count * rounds)
    agent, pool = make_agent("owner", host, backend)
    for number in range(rounds):
        ids = ids_of(number, count)
        payload = memoryview(os.urandom(block_bytes))
        blocks = [Block(ids[i], ids[i - 1] if i else ROOT, i, checksum(ids[i], payload)) for i in range(count)]
        for start in range(0, count, 16):
            part = blocks[start : start + 16]
            await host.put(family_of(block_bytes), part, [payload] * len(part))
    peers = PeerOffer(host, agent, pool, KEY)  # type: ignore[arg-type]
    print(await peers.listen("127.0.0.1", 0), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await peers.close()
    await asyncio.to_thread(agent.close)


async def read(block_bytes: int, count: int, rounds: int, backend: str, port: int) -> str:
    host = make_host(block_bytes * count * 4)
    agent, pool = make_agent("reader", host, backend)
    tier = PeerTier(PeerOptions((("127.0.0.1", port),), ask_timeout_s=5.0, borrow_timeout_s=5.0), agent, KEY)
    tier.land_in(pool)  # type: ignore[arg-type]
    family = family_of(block_bytes)
    gb_per_s, cpu_s_per_gb, lookup_us = [], [], []
    step = max(1, (8 << 20) // block_bytes)
    for number in range(rounds):
        ids = ids_of(number, count)
        started = time.perf_counter()
        found = await tier.contains(family, b"".join(ids))
        lookup_us.append((time.perf_counter() - started) / count * 1e6)
        assert found == b"\1" * count
        wall, cpu = time.perf_counter(), time.process_time()
        for start in range(0, count, step):  # as the node does: a few MiB at a time, into reserved places
            part = ids[start : start + step]
            blocks = [Block(block_id, ROOT, start + i, 0) for i, block_id in enumerate(part)]
            ticket, slots = host.reserve(LOCAL, family, blocks)
            into = [host.place(ticket, slot, family) for slot in slots if isinstance(slot, int)]
            answers = await tier.get(family, b"".join(part), into)
            assert all(isinstance(answer, Block) for answer in answers)
            sums = {s: a.checksum for s, a in zip(slots, answers, strict=True) if isinstance(a, Block)}
            host.commit(LOCAL, ticket, sums)  # type: ignore[arg-type]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        gb = block_bytes * count / 1e9
        gb_per_s.append(gb / wall)
        cpu_s_per_gb.append(cpu / gb)
        await host.clear()
    await tier.close()
    await asyncio.to_thread(agent.close)
    await host.close()
    middle = statistics.median
    return f"{middle(gb_per_s):8.2f} {middle(cpu_s_per_gb):14.2f} {middle(lookup_us):22.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", nargs="*", default=["64KiB", "2MiB"])
    parser.add_argument("--mebibytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--offer", nargs=2, metavar=("BLOCK_BYTES", "BACKEND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offer:
        block_bytes = int(options.offer[0])
        count = (options.mebibytes << 20) // block_bytes
        asyncio.run(offer(block_bytes, count, options.rounds, options.offer[1]))
        return
    print(f"{'over':6} {'block':>7} {'GB/s':>8} {'CPU s per GB':>14} {'look-up us per block':>22}")
    for backend in ("tcp", "cma"):
        for block in options.block:
            block_bytes = parse_bytes(block)
            command = [sys.executable, __file__, "--offer", str(block_bytes), backend]
            command += ["--mebibytes", str(options.mebibytes), "--rounds", str(options.rounds)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
                assert owner.stdout is not None
                port = int(owner.stdout.readline())
                count = (options.mebibytes << 20) // block_bytes
                row = asyncio.run(read(block_bytes, count, options.rounds, backend, port))
                print(f"{backend:6} {block:>7} {row}", flush=True)
                assert owner.stdin is not None
                owner.stdin.close()


if __name__ == "__main__":
    main()
