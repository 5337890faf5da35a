"""The CPU engine beside plain transformers, vLLM for CPU and llama.cpp: one run, one table.

    bench/peers/setup vllm llama_cpp demo
    python bench/peers/cpu_engines.py [--rounds 2] [--without vllm ...] [--json]

The same model (float32 for transformers and vLLM, the GGUF file for llama.cpp, whose weights stay at 4 bits), one core
and one thread each. Figures are CPU milliseconds per decode step at batch and context, and of a prefill of 512 tokens;
a host that is busy with other work changes CPU time less than wall time. Rounds alternate between engines; the table
shows each one's best round, since interference only ever adds.
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from cpu_engine import BLOCK_SIZE, Row, best, measure, peer_rows  # noqa: E402

from headwater.engines.native.checkpoints import open_checkpoint  # noqa: E402
from headwater.engines.native.cpu.backend import CpuBackend, CpuOptions  # noqa: E402
from headwater.weights import resolve  # noqa: E402

HERE = Path(__file__).parent
PEERS = Path(os.environ.get("PEERS", ROOT / "build/peers"))
DECODE = ("1:64", "8:64", "32:64", "8:512")
PREFILL = "1:512"


def commands(gguf: Path) -> dict[str, str]:
    demo = PEERS / "demo"
    found = {
        "transformers": [sys.executable, HERE / "transformers_cpu.py", demo],
        "vllm": [PEERS / "vllm/bin/python", HERE / "vllm_cpu.py", demo],
        "llama_cpp": ["node", HERE / "llama_cpp.mjs", PEERS / "llama_cpp", gguf],
    }
    return {name: shlex.join(str(word) for word in words) for name, words in found.items()}


def table(rows: list[Row]) -> str:
    by_pair = {(row["engine"], f"{row['batch']}:{row['context']}"): row for row in rows}
    columns = [f"batch {batch}, context {context}" for batch, context in (pair.split(":") for pair in DECODE)]
    lines = ["| CPU ms | " + " | ".join(columns) + " | prefill 512 |", "|---" * (len(columns) + 2) + "|"]
    for engine in dict.fromkeys(row["engine"] for row in rows):
        cells = [f"{by_pair[engine, pair]['decode_ms']:.1f}" for pair in DECODE]
        cells.append(f"{by_pair[engine, PREFILL]['prefill_ms']:,.0f}")
        lines.append(f"| {engine} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--without", action="append", default=[], metavar="PEER", help="leave a peer out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = resolve(None)
    backend = CpuBackend(open_checkpoint(model), CpuOptions(threads=1))
    backend.allocate_kv(8 * (512 + BLOCK_SIZE) // BLOCK_SIZE, BLOCK_SIZE)
    pairs = [*DECODE, PREFILL]
    found = []
    loads = []
    for _ in range(args.rounds):
        loads.append(os.getloadavg()[0])
        found.append([measure(backend, pair) for pair in pairs])
        for name, command in commands(model.weight_files[0]).items():
            if name not in args.without:
                loads.append(os.getloadavg()[0])
                found.append(peer_rows(command, model.weight_files[0], pairs))
    rows = best(found)
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    print(f"\nLoad average {min(loads):.1f} to {max(loads):.1f}, {os.cpu_count()} cores.", file=sys.stderr)


if __name__ == "__main__":
    main()
