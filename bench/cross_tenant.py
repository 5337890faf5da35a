"""Can a tenant tell by timing whether another has a prompt cached? `headwater serve` with a mocker, two tenants.

    python bench/cross_tenant.py [--probes 40]

The victim sends prompts; the probe then sends, in random order, prompts that the victim has sent and prompts that
nobody has, and guesses by the time to the first token. Prints the medians and how often the better of all thresholds
guesses right: about a half (up to the luck of so many throws) means that nothing can be told. As a control, the same
for prompts that the probe itself has sent: there it can be told. Exit code 1 if the victim's can.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "fuzz")]

from fairness import Tenant, ask_ids, tenants  # noqa: E402
from served import Server, serving  # noqa: E402

PROMPT_TOKENS = 1024


def guessed(hits: list[float], misses: list[float]) -> float:
    """The best share of right guesses that any threshold gives."""
    best = 0.5
    for threshold in (*hits, *misses):
        right = sum(value <= threshold for value in hits) + sum(value > threshold for value in misses)
        best = max(best, right / (len(hits) + len(misses)))
    return best


def by_luck(count: int, rng: random.Random) -> float:
    """What `guessed` gives in 99 of 100 cases when there is nothing to be told."""
    draws = sorted(
        guessed([rng.random() for _ in range(count)], [rng.random() for _ in range(count)]) for _ in range(200)
    )
    return draws[197]


async def times(server: Server, tenant: Tenant, prompts: list[list[int]]) -> list[float]:
    before = len(tenant.ttft_ms)
    for prompt in prompts:
        await ask_ids(server, tenant, prompt)
    return tenant.ttft_ms[before:]


async def probe(
    server: Server, victim: Tenant, prober: Tenant, count: int
) -> tuple[list[float], list[float], list[float]]:
    """(times of the victim's prompts, of fresh ones, of the prober's own again)."""
    rng = random.Random(7)
    sent, fresh = ([[rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(count)] for _ in range(2))
    await times(server, victim, sent)
    order = [(True, prompt) for prompt in sent] + [(False, prompt) for prompt in fresh]
    rng.shuffle(order)
    found: dict[bool, list[float]] = {True: [], False: []}
    for cached, prompt in order:
        found[cached] += await times(server, prober, [prompt])
    return found[True], found[False], await times(server, prober, sent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probes", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, (victim, prober) = tenants(Path(folder), 1, 1)
        flags = ["--mocker-speedup", "1", "--mocker-prefill-ms-per-token", "0.05", "--keys", str(path)]
        with serving(None, *flags) as server:
            theirs, fresh, own = asyncio.run(probe(server, victim, prober, args.probes))
    luck = by_luck(args.probes, random.Random(1))
    for name, found in (("another's", theirs), ("own", own)):
        print(
            f"{name:<12} cached {statistics.median(found):6.1f} ms, fresh {statistics.median(fresh):6.1f} ms: "
            f"guessed right {100 * guessed(found, fresh):.0f} % (luck alone: up to {100 * luck:.0f} %)"
        )
    return int(guessed(theirs, fresh) > luck)


if __name__ == "__main__":
    sys.exit(main())
