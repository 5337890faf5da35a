"""What a hand-off between two vLLM workers costs: time to the first token and to the last one, here and elsewhere.

    PYTHONPATH=bench build/peers/vllm/bin/python bench/vllm_handoff.py [--lengths 128 512 960] [--repeats 8]

One prefill worker and one decode worker, a core each, nothing cached, one request at a time: so nothing is gained here,
and what is added is the hand-off. The same prompts go to the decode worker with and without a prefill worker, in turn;
the answers have to be equal. VLLM_MODEL and VLLM_VOCABULARY name another model.
"""

import argparse
import asyncio
import os
from random import Random
from statistics import median

import uvloop
from handoff_workers import Bench, Worker, bench, request
from vllm_cluster import MODEL, drawn

FLAGS = [
    MODEL,
    "--engine",
    "vllm",
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "1024",
    "--threads",
    "1",
]
FLAGS += ["--block-size", "32", "--num-kv-blocks", "128", "--no-enable-prefix-caching", "--kv-staging", "512MiB"]
ANSWER = 8


async def pair(here: Bench) -> tuple[Worker, Worker]:
    """Each on a core of its own, as `headwater serve` would place them."""
    started = []
    for core, role in enumerate(("prefill", "decode")):
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
        started.append(asyncio.create_task(here.start(role, *FLAGS)))
        await asyncio.sleep(1.0)
    prefill, decode = await asyncio.gather(*started)
    return prefill, decode


async def run(lengths: list[int], repeats: int) -> None:
    random, stream = Random(1), 0
    async with bench() as here:
        prefill, decode = await pair(here)
        print(
            "| tokens | first token ms, here | elsewhere | last token ms, here | elsewhere | blocks moved | fell back |"
        )
        print("|---|---|---|---|---|---|---|")
        for length in lengths:
            times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            before = decode.counts
            for number in range(repeats + 1):
                prompt, answers = drawn(random, length), []
                for handed in (False, True) if number % 2 else (True, False):
                    stream += 1
                    where = prefill.remote() if handed else None
                    took = await decode.run(request(stream, prompt, ANSWER, where))
                    answers.append(decode.tokens[stream])
                    if number:  # the first pair warms up
                        times[handed].append(took)
                if answers[0] != answers[1]:
                    raise SystemExit(f"answers differ at {length} tokens: {answers}")
            await asyncio.sleep(0.3)
            cells = [
                f"{1e3 * median(took[at] for took in times[handed]):.0f}" for at in (0, 1) for handed in (False, True)
            ]
            moved = decode.counts.blocks_moved - before.blocks_moved
            print(
                f"| {length} | {' | '.join(cells)} | {moved} | {decode.counts.fell_back - before.fell_back} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 960])
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    uvloop.run(run(args.lengths, args.repeats))


if __name__ == "__main__":
    main()
