"""What a hand-off adds to the time to the first token, on an idle pair of workers with the real model.

    python bench/handoff.py --prompt-tokens 2048 --repeats 7

The same prompt length is prefilled at the decode worker and at the prefill worker, taking turns, never the same prompt
twice. Each worker has one core. Prints the medians, what was added, the CPU seconds of both processes (which a busy
machine does not change much), and how many KV blocks were moved.
"""

import argparse
import asyncio
import statistics

import uvloop
from handoff_workers import bench, prompt_of, request
from processes import cpu_s

BLOCK_SIZE = 16


async def measure(prompt_tokens: int, repeats: int, flags: list[str]) -> None:
    blocks = 4 * (prompt_tokens // BLOCK_SIZE + 8)
    sizes = ("--threads", "1", "--num-kv-blocks", str(blocks), "--max-model-len", str(prompt_tokens + 64), *flags)
    async with bench(*sizes) as here:
        prefill, decode = await here.start("prefill"), await here.start("decode")
        local: list[float] = []
        remote: list[float] = []
        cpu: dict[bool, list[float]] = {False: [], True: []}
        stream = 0
        for number in range(repeats + 1):
            for times, where in ((local, None), (remote, prefill.remote(10 * prompt_tokens))):
                stream += 1
                prompt = prompt_of(prompt_tokens, 10 + stream, 40_000)
                before = sum(cpu_s(worker.instance.pid) for worker in (prefill, decode))
                first_s, _ = await decode.run(request(stream, prompt, 2, where))
                await decode.free(10.0)
                after = sum(cpu_s(worker.instance.pid) for worker in (prefill, decode))
                if number:
                    times.append(first_s * 1000)
                    cpu[where is not None].append(after - before)
        await asyncio.sleep(0.5)
        added = statistics.median(there - at for at, there in zip(local, remote, strict=True))
        print(f"{prompt_tokens} tokens, {repeats} repeats, first token in ms (median, least)")
        for name, times, used in (("here", local, cpu[False]), ("elsewhere", remote, cpu[True])):
            middle = statistics.median(times)
            print(f"  {name:<10} {middle:8.1f} {min(times):8.1f}   CPU {statistics.median(used):6.2f} s")
        print(f"  added      {added:8.1f} {min(remote) - min(local):8.1f}")
        per_prompt = decode.counts.blocks_moved / decode.counts.done
        print(f"  blocks moved per prompt {per_prompt:g}, needed {-(-prompt_tokens // BLOCK_SIZE)}", end="")
        print(f"; handed off {decode.counts.done}, fell back {decode.counts.fell_back}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("flags", nargs="*", help="further flags of the workers, after --")
    args = parser.parse_args()
    uvloop.run(measure(args.prompt_tokens, args.repeats, args.flags))


if __name__ == "__main__":
    main()
