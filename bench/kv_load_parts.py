"""The parts of a load from the host tier, in CPU time: what could layer-wise loading hide?

    python bench/kv_load_parts.py [--tokens 1000] [--json]

A block is checked as a whole before an engine may use any of it, so copying it out of the host tier comes first in any
case. What could run beside the computing of what is left, layer by layer, is the way from there into the layers of
vLLM. The native engine has nothing of that kind: a block of all its layers is one piece of its memory, where the copy
out of the host tier ends.

KV has the shape of SmolLM2-135M in float32, 46,080 bytes per token, in blocks of 32 tokens; one thread. Each figure is
the least of 20 rounds, of CPU time, which other programs distort little.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from headwater.kv.block import ROOT, Family
from headwater.kv.connectors.vllm_worker import BlockCopier
from headwater.kv.node.agent import StoreAgent
from headwater.kv.node.store import Piece
from kv_fixtures import chain
from kv_process import store_process

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 30, 3, 64, 32
ROUNDS = 20


def cpu_ms(work: Callable[[], object]) -> float:
    """Of all threads of this process; the store's own is asked nothing."""
    taken = []
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return 1e3 * min(taken)


def measure(num_blocks: int) -> dict[str, float]:
    shape = (2 * num_blocks, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    copier = BlockCopier({f"layer {number}": torch.zeros(shape) for number in range(LAYERS)}, 2 * num_blocks)
    source, staging = copier.staging(num_blocks).random_(), copier.staging(num_blocks)
    places = list(range(num_blocks, 2 * num_blocks))
    ids = b"".join(chain("prefix", num_blocks))
    run = Piece(Family("model", "layout", "", copier.block_bytes), ids, 0, ROOT)
    with tempfile.TemporaryDirectory(prefix="kv-parts-") as folder:
        path = Path(folder) / "kv.sock"
        size = 3 * num_blocks * copier.block_bytes + (64 << 20)
        with store_process(path, "--host", str(size)), StoreAgent(path, "bench", patience_s=20.0) as agent:
            stored = agent.offer(run, [row.data for row in source.numpy()]).result(30)
            assert stored == num_blocks, f"{stored} of {num_blocks} blocks were stored"
            into = [row.data for row in staging.numpy()]
            copied_ms = cpu_ms(lambda: agent.load(run, into, timeout_s=5.0).result(10))
    assert torch.equal(staging, source), "what was loaded is not what was stored"
    with torch.inference_mode():
        scattered_ms = cpu_ms(lambda: copier.scatter(staging, places))
    return {
        "tokens": num_blocks * BLOCK_TOKENS,
        "megabytes": num_blocks * copier.block_bytes / 1e6,
        "out_of_the_host_tier_ms": copied_ms,
        "into_the_layers_of_vllm_ms": scattered_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="of the prefix; whole blocks of them are loaded")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = measure(max(1, args.tokens // BLOCK_TOKENS))
    if args.json:
        print(json.dumps(parts, indent=2))
        return
    for name, value in parts.items():
        print(f"{name.replace('_', ' '):28} {value:10.1f}")


if __name__ == "__main__":
    main()
