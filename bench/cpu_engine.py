"""CPU milliseconds of the CPU backend per decode step and per prefill, beside peers in the same run.

    python bench/cpu_engine.py [BATCH:CONTEXT ...] [--isa avx2] [--threads 1] [--model NAME]
    python bench/cpu_engine.py --peer transformers --peer "COMMAND"

The forward pass with logits of every sequence's last row; process CPU time, medians, random tokens and block places.
A peer is a command that takes pairs BATCH:CONTEXT and prints one JSON line per pair; bench/peers/cpu_engines.py has
all of them in one table. `transformers` is bench/peers/transformers_cpu.py over the same file. Rounds alternate between
engines, so that a busy host harms all alike; the table shows each one's best round. `floor`: the larger of
bytes over the bandwidth of a long sum and operations over the rate of a large float32 product, both as torch reaches
them here (its products may use narrower vectors than the kernels).
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from headwater.engines.native.base import FlatBatch
from headwater.engines.native.checkpoints import open_checkpoint
from headwater.engines.native.cpu.backend import CpuBackend, CpuOptions
from headwater.weights import resolve

PAIRS = ["1:64", "8:64", "32:64", "8:512", "1:512"]
BLOCK_SIZE = 16
PEERS = Path(__file__).parent / "peers"
Row = dict[str, Any]


def batch(backend: CpuBackend, sequences: int, context: int, new: int) -> FlatBatch:
    """`sequences` of equal length whose last `new` tokens are computed."""
    rng = np.random.default_rng(0)
    width = -(-context // BLOCK_SIZE)
    places = rng.permutation(backend.num_blocks)[: sequences * width]
    return FlatBatch(
        token_ids=rng.integers(0, backend.config.vocab_size, sequences * new).astype(np.int32),
        positions=np.tile(np.arange(context - new, context, dtype=np.int32), sequences),
        query_starts=np.arange(0, sequences * new + 1, new, dtype=np.int32),
        context_lens=np.full(sequences, context, np.int32),
        block_tables=places.reshape(sequences, width).astype(np.int32),
        logit_rows=np.arange(new - 1, sequences * new, new, dtype=np.int32),
        num_decode=sequences if new == 1 else 0,
    )


def cpu_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        times.append((time.process_time() - started) * 1e3)
    return median(times)


def measure(backend: CpuBackend, pair: str) -> Row:
    sequences, context = (int(part) for part in pair.split(":"))
    prefill, decode = batch(backend, sequences, context, context), batch(backend, sequences, context, 1)
    prefill_ms = cpu_ms(lambda: backend.forward(prefill), 1 if sequences > 1 else 3)
    backend.forward(decode)
    return {
        "engine": f"headwater {backend.isa}",
        "batch": sequences,
        "context": context,
        "prefill_ms": prefill_ms,
        "decode_ms": cpu_ms(lambda: backend.forward(decode), 15),
    }


def floors(backend: CpuBackend, pairs: list[str]) -> list[Row]:
    memory, square = torch.ones(1 << 26), torch.ones(2048, 2048)
    read_bytes_s = memory.numel() * 4e3 / cpu_ms(memory.sum, 5)
    flops_s = 2e3 * 2048**3 / cpu_ms(lambda: square @ square, 5)
    config = backend.config
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = (2 * query + 2 * kv + 3 * config.intermediate_size) * config.hidden_size
    body, head = layer * config.num_layers, config.vocab_size * config.hidden_size
    rows = []
    for pair in pairs:
        sequences, context = (int(part) for part in pair.split(":"))
        kv_bytes = sequences * context * backend.block_bytes / BLOCK_SIZE
        read_s = (backend.weights_bytes + kv_bytes) / read_bytes_s
        decode_s = max(read_s, 2 * sequences * (body + head) / flops_s)
        prefill_s = 2 * sequences * (context * body + head) / flops_s
        rows.append(
            {
                "engine": f"floor ({read_bytes_s / 1e9:.0f} GB/s, {flops_s / 1e9:.0f} GFLOP/s)",
                "batch": sequences,
                "context": context,
                "prefill_ms": prefill_s * 1e3,
                "decode_ms": decode_s * 1e3,
            }
        )
    return rows


def peer_rows(command: str, gguf: Path, pairs: list[str]) -> list[Row]:
    words = shlex.split(command)
    if command == "transformers":
        words = [sys.executable, str(PEERS / "transformers_cpu.py"), str(gguf)]
    lines = subprocess.run([*words, *pairs], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def best(rounds: list[list[Row]]) -> list[Row]:
    """Each engine's and pair's best figures over the rounds."""
    found: dict[tuple[str, int, int], Row] = {}
    for row in (row for rows in rounds for row in rows):
        known = found.setdefault((row["engine"], row["batch"], row["context"]), row)
        for figure in ("prefill_ms", "decode_ms"):
            known[figure] = min(known[figure], row[figure])
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="BATCH:CONTEXT")
    parser.add_argument("--model", help="as for `headwater serve`; none: the demo model")
    parser.add_argument("--isa", action="append", help="kernel variant; may be repeated; none: the best")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer", action="append", default=[], help="`transformers` or a command; may be repeated")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = resolve(args.model)
    checkpoint = open_checkpoint(model)
    backends = [CpuBackend(checkpoint, CpuOptions(threads=args.threads, isa=isa)) for isa in args.isa or [None]]
    for backend in backends:
        tokens = max(int(batch) * (int(context) + BLOCK_SIZE) for batch, context in (p.split(":") for p in args.pairs))
        backend.allocate_kv(-(-tokens // BLOCK_SIZE), BLOCK_SIZE)
    rounds = [floors(backends[0], args.pairs)]
    for _ in range(args.rounds):
        rounds += [[measure(backend, pair) for pair in args.pairs] for backend in backends]
        rounds += [peer_rows(command, model.weight_files[0], args.pairs) for command in args.peer]
    rows = best(rounds)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'engine':40}{'batch':>6}{'context':>9}{'decode ms':>11}{'prefill ms':>12}   load {os.getloadavg()[0]:.1f}")
    for row in sorted(rows, key=lambda row: (row["context"], row["batch"])):
        print(f"{row['engine']:40}{row['batch']:6}{row['context']:9}{row['decode_ms']:11.1f}{row['prefill_ms']:12.1f}")


if __name__ == "__main__":
    main()
