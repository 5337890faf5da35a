"""CPU milliseconds of plain transformers per decode step and per prefill: float32, one thread, its own KV cache.

Usage: python bench/peers/transformers_cpu.py MODEL.gguf|FOLDER BATCH:CONTEXT [...]    One JSON line per pair.
"""

import copy
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

STEPS = 5


def main() -> None:
    path, *pairs = sys.argv[1:]
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = load(Path(path))
    for pair in pairs:
        print(json.dumps(measure(model, *(int(part) for part in pair.split(":")))), flush=True)


def load(path: Path) -> torch.nn.Module:
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.inference_mode()
def measure(model: torch.nn.Module, batch: int, context: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, context), generator=generator)
    started = time.process_time()
    past = model(ids[:, :-1], use_cache=True, logits_to_keep=1).cache
    prefill_ms = (time.process_time() - started) * 1e3
    times = []
    for _ in range(STEPS + 1):
        cache = copy.deepcopy(past)
        started = time.process_time()
        model(ids[:, -1:], cache=cache, use_cache=True)
        times.append((time.process_time() - started) * 1e3)
    return {
        "engine": "transformers float32",
        "batch": batch,
        "context": context,
        "prefill_ms": prefill_ms,
        "decode_ms": median(times[1:]),
    }


if __name__ == "__main__":
    main()
