"""CPU time of the router: per decision, per booking, per stored block.

    python bench/router_cpu.py [--workers 8 64 1000] [--blocks 128 8192] [--json]

A decision is what a frontend pays to place one request: index look-up, home, prices of all workers, choice, predicted
first token, and the record that can explain it. About a third of the workers hold a part of the prompt, all of them
have other requests booked. Process CPU time, the best of several rounds, so that a busy host does less harm.
"""

import argparse
import json
import time
from collections.abc import Callable
from random import Random
from struct import pack

from headwater.frontend.journal import DecisionJournal
from headwater.frontend.router_metrics import RouterMetrics
from headwater.perf.model import StepModel, StepShape
from headwater.protocol.cluster import Instance, ModelCard
from headwater.protocol.events import BlocksRemoved, BlocksStored
from headwater.router.decisions import DecisionRecord
from headwater.router.delay import Delay
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.view import ClusterView
from headwater.router.worker import time_class

BLOCK_SIZE = 16
ROUNDS = 7


def instance(number: int) -> Instance:
    card = ModelCard(
        name="m",
        served_names=["m"],
        fingerprint="f",
        architecture="",
        dtype="",
        kv_layout="",
        max_model_len=1 << 20,
        block_size=BLOCK_SIZE,
        vocab_size=1 << 17,
    )
    return Instance(
        worker_id=f"worker-{number:04}",
        role="both",
        state="ready",
        card=card,
        request_address="",
        event_address="",
        engine="bench",
        version=(1, 0),
        kv_blocks=1 << 15,
        max_num_batched_tokens=8192,
    )


def busy_cluster(num_workers: int, prompt: list[bytes], random: Random) -> Router:
    view = ClusterView()
    for number in range(num_workers):
        view.put(instance(number))
        view.set_connected(f"worker-{number:04}", True)
    model = StepModel()
    for tokens in (1, 500, 4000, 8192):
        model.observe(StepShape(tokens, tokens * tokens / 2), 10 + 0.02 * tokens + 1e-6 * tokens * tokens)
        model.observe(StepShape(0, 0, tokens / 100, 50.0 * tokens), 6 + 5e-4 * tokens)
    view.set_costs(time_class(instance(0)), model, 8192)
    for worker in view.workers:
        if random.random() < 0.3:
            view.apply(worker.worker_id, [BlocksStored(b"".join(prompt[: random.randrange(1, len(prompt))]))])
        for _ in range(random.randrange(6)):
            booking = view.book(worker, random.randrange(100, 5000), 200)
            if random.random() < 0.7:
                view.prefilled(booking)
    return Router(view, Delay())


def best_us(call: Callable[[], object], repeats: int) -> float:
    """CPU microseconds of a call."""
    call()
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(repeats):
            call()
        best = min(best, (time.process_time() - started) / repeats)
    return best * 1e6


def measure(num_workers: int, num_blocks: int) -> dict[str, float]:
    random = Random(1)
    prompt = [pack("<QQ", random.getrandbits(64), 0) for _ in range(num_blocks)]
    ids = b"".join(prompt)
    router = busy_cluster(num_workers, prompt, random)
    journal = DecisionJournal(router, RouterMetrics())

    def decide() -> None:
        asked = RouteRequest("f", num_blocks * BLOCK_SIZE + 7, 200, block_ids=ids, block_size=BLOCK_SIZE)
        record = DecisionRecord("r", "m", 0.0, asked.num_prompt_tokens, 1)
        journal.begin(record)
        worker, decision = router.route(asked, "m")
        journal.decided(record, asked, worker, decision)

    asked = RouteRequest("f", num_blocks * BLOCK_SIZE + 7, 200, block_ids=ids, block_size=BLOCK_SIZE)
    worker, decision = router.route(asked, "m")

    def book() -> None:
        booking = router.view.book(worker, asked.num_prompt_tokens, 200, decision.cached_tokens, asked.keys)
        router.view.prefilled(booking)
        router.view.release(booking, 200)

    fresh = b"".join([pack("<QQ", random.getrandbits(64), 0) for _ in range(num_blocks)])

    def store() -> None:
        router.view.apply("worker-0000", [BlocksStored(fresh), BlocksRemoved(fresh)])

    repeats = max(5, 20_000 // (num_workers + num_blocks // 64))
    return {
        "workers": num_workers,
        "blocks": num_blocks,
        "decision_us": best_us(decide, repeats),
        "explain_us": best_us(decision.explain, max(3, repeats // 10)),
        "booking_us": best_us(book, max(5, 20_000 // num_blocks)),
        "stored_and_removed_blocks_per_s": num_blocks / best_us(store, max(5, 20_000 // num_blocks)) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 8192])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for num_workers in args.workers:
        for num_blocks in args.blocks:
            row = measure(num_workers, num_blocks)
            if args.json:
                print(json.dumps(row), flush=True)
            else:
                print(
                    f"{num_workers:5} workers, {num_blocks:5} blocks: decision {row['decision_us']:7.1f} us, "
                    f"booking {row['booking_us']:7.1f} us, explanation {row['explain_us']:8.1f} us, "
                    f"{row['stored_and_removed_blocks_per_s'] / 1e6:.1f} M blocks/s stored and removed",
                    flush=True,
                )


if __name__ == "__main__":
    main()
