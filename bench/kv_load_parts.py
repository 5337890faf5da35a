"""The parts of a load from the host tier, in CPU time: what could layer-wise loading hide, what do blocks by head cost?

    python bench/kv_load_parts.py [--tokens 1000] [--json]

A block is checked as a whole before an engine may use any of it, so copying it out of the host tier comes first in any
case. What could run beside the computing of what is left, layer by layer, is the way from there into the layers of
vLLM. The native engine has nothing of that kind: a block of all its layers is one piece of its memory, where the copy
out of the host tier ends.

Each shape of KV is measured twice: blocks in one piece, and a piece for each KV head, as they are stored. One thread.
Each figure is the least of 20 rounds, of CPU time of this process, which other programs distort little.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from headwater.kv.block import ROOT, Family
from headwater.kv.connectors.vllm_worker import BlockCopier
from headwater.kv.node.agent import StoreAgent
from headwater.kv.node.client import Part
from headwater.kv.node.store import Piece
from headwater.kv.shards import part_ids
from kv_fixtures import chain
from kv_process import store_process

ROUNDS = 20


class Shape(NamedTuple):
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype


SHAPES = {
    "30 layers, 3 heads of 64, float32": Shape(30, 3, 64, 32, torch.float32),
    "36 layers, 8 heads of 128, bfloat16": Shape(36, 8, 128, 16, torch.bfloat16),
}


def cpu_ms(work: Callable[[], object]) -> float:
    """Of all threads of this process; the store's own is asked nothing."""
    taken = []
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return 1e3 * min(taken)


def measure(shape: Shape, num_tokens: int, num_parts: int) -> dict[str, float]:
    num_blocks = max(1, num_tokens // shape.block_tokens)
    layer = (2 * num_blocks, shape.kv_heads, shape.block_tokens, 2 * shape.head_dim)
    caches = {f"layer {number}": torch.zeros(layer, dtype=shape.dtype) for number in range(shape.layers)}
    copier = BlockCopier(caches, 2 * num_blocks, num_parts)
    source, staging = copier.staging(num_blocks).random_(), copier.staging(num_blocks)
    places = list(range(num_blocks, 2 * num_blocks))
    names = (f"prefix {number}" for number in count())
    with tempfile.TemporaryDirectory(prefix="kv-parts-") as folder:
        path = Path(folder) / "kv.sock"
        size = 4 * num_blocks * copier.block_bytes + (64 << 20)
        with store_process(path, "--host", str(size)), StoreAgent(path, "bench", patience_s=20.0) as agent:
            offered = parts_of(source, num_parts, "kept")
            assert stored(agent, offered) == num_blocks * num_parts
            into = parts_of(staging, num_parts, "kept")
            out_ms = cpu_ms(lambda: agent.load_parts(into, timeout_s=5.0).result(10))
            in_ms = cpu_ms(lambda: stored(agent, parts_of(source, num_parts, next(names))))
    assert torch.equal(staging, source), "what was loaded is not what was stored"
    with torch.inference_mode():
        scattered_ms = cpu_ms(lambda: copier.scatter(staging, places))
        gathered_ms = cpu_ms(lambda: copier.gather(places))
    return {
        "pieces": num_blocks * num_parts,
        "megabytes": num_blocks * copier.block_bytes / 1e6,
        "out_of_the_host_tier_ms": out_ms,
        "into_the_layers_of_vllm_ms": scattered_ms,
        "out_of_the_layers_of_vllm_ms": gathered_ms,
        "into_the_host_tier_ms": in_ms,
    }


def parts_of(blocks: torch.Tensor, num_parts: int, name: str) -> list[Part]:
    rows = blocks.numpy().reshape(len(blocks), num_parts, -1)
    family = Family("model", "layout", "", rows.shape[2], num_parts)
    ids = b"".join(chain(name, len(blocks)))
    return [
        (Piece(family, part_ids(ids, "layout", part), 0, ROOT), [row.data for row in rows[:, part]])
        for part in range(num_parts)
    ]


def stored(agent: StoreAgent, parts: list[Part]) -> int:
    return sum(future.result(30) for future in [agent.offer(run, rows) for run, rows in parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="of the prefix; whole blocks of them are loaded")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        name: [measure(shape, args.tokens, num_parts) for num_parts in (1, shape.kv_heads)]
        for name, shape in SHAPES.items()
    }
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for name, (whole, by_head) in found.items():
        print(f"{name:38} {'whole':>10} {'by head':>10}")
        for what, value in whole.items():
            print(f"  {what.replace('_', ' '):36} {value:10.1f} {by_head[what]:10.1f}")


if __name__ == "__main__":
    main()
