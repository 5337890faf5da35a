"""Predicted step times against measured GPUs: the arithmetic prior, and the tables of `aiconfigurator-core`.

    pip install 'headwater[silicon]'
    python bench/silicon.py [--every 3]

The package brings points measured on real servers: mean time to first token and per output token at a concurrency,
prompt and answer length. A point is predicted from single steps in a steady state: `c` sequences decode together, and
while one of them is generated each of the others is replaced once, whose prefill runs in mixed steps; one round in
ten begins with all of them at once, as the measurements did. Nothing is fitted
to the model a point is of: one factor per engine is chosen by the other models and applied to the held-out one.
Reported are medians of |predicted / measured - 1|, as is and with that factor.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from math import exp, log
from statistics import median
from typing import Protocol

from headwater.errors import ConfigError
from headwater.perf.aiconfigurator import SYSTEMS, SiliconSteps
from headwater.perf.model import StepShape
from headwater.perf.roofline import DEVICES, Roofline

NAMES = {
    ("meta-llama/Llama-3.1-70B", "fp8"): "llama-3.1-70b-fp8",
    ("meta-llama/Llama-3.1-8B-Instruct", ""): "llama-3.1-8b",
    ("Qwen/Qwen3-32B", "fp8"): "qwen3-32b-fp8",
    ("Qwen/Qwen3-32B", ""): "qwen3-32b",
    ("openai/gpt-oss-120b", "fp4"): "gpt-oss-120b",
}
"""Points we have both a shape and tables for, by (model, precision)."""
MAX_BATCHED_TOKENS = 8192
ROUNDS = 10
"""Requests per place in such measurements. The first round begins with all at once, which then queue for prefill."""


class Steps(Protocol):
    def step_ms(self, shape: StepShape) -> float: ...


@dataclass(frozen=True)
class Point:
    model: str
    device: str
    engine: str
    tensor_parallel: int
    concurrency: int
    prompt_tokens: int
    answer_tokens: int
    ttft_ms: float
    tpot_ms: float


def points() -> Iterator[Point]:
    devices = {theirs: ours for ours, theirs in SYSTEMS.items()}
    source = files("aiconfigurator_core") / "systems" / "silicon_sample.csv"
    with source.open() as file:
        for row in csv.DictReader(file):
            model = NAMES.get((row["model_path"], row["precision"]))
            single = row["attention_dp_size"] in ("", "1") and row["pp_size"] in ("", "1")
            if row["mode"] != "agg" or model is None or row["system"] not in devices or not single:
                continue
            yield Point(
                model,
                devices[row["system"]],
                row["backend"],
                int(row["tp_size"]),
                int(row["batch_size"]),
                int(row["isl"]),
                int(row["osl"]),
                float(row["silicon_ttft_ms"]),
                float(row["silicon_tpot_ms"]),
            )


def predict(steps: Steps, point: Point) -> tuple[float, float]:
    """(TTFT, TPOT) in ms."""
    others = point.concurrency - 1
    context = point.prompt_tokens + point.answer_tokens / 2
    decode_ms = steps.step_ms(StepShape(0, 0, point.concurrency, point.concurrency * context))
    beside_ms = steps.step_ms(StepShape(0, 0, others, others * context)) if others else 0.0
    prefill_ms = sum(chunk_ms(steps, point, start, others, context) for start in chunks(point.prompt_tokens))
    added_ms = prefill_ms - beside_ms * len(chunks(point.prompt_tokens))
    tpot_ms = decode_ms + others * added_ms / point.answer_tokens
    busy = min(0.9, others * added_ms / (point.answer_tokens * tpot_ms))
    waited_ms = beside_ms / 2 + busy * prefill_ms / (2 * (1 - busy))
    return waited_ms + prefill_ms + others / 2 * prefill_ms / ROUNDS, tpot_ms


def chunks(tokens: int) -> range:
    return range(0, tokens, MAX_BATCHED_TOKENS)


def chunk_ms(steps: Steps, point: Point, start: int, others: int, context: float) -> float:
    tokens = min(MAX_BATCHED_TOKENS, point.prompt_tokens - start)
    pairs = tokens * (start + (tokens + 1) / 2)
    return steps.step_ms(StepShape(tokens, pairs, others, others * context))


def predictions(found: list[Point], make: Callable[[Point], Steps]) -> dict[Point, tuple[float, float]]:
    known: dict[tuple[str, str, int, str], Steps | None] = {}
    result: dict[Point, tuple[float, float]] = {}
    for point in found:
        key = (point.device, point.model, point.tensor_parallel, point.engine)
        if key not in known:
            try:
                known[key] = make(point)
            except ConfigError as error:
                print(f"  {error.message}")
                known[key] = None
        steps = known[key]
        if steps is not None:
            try:
                result[point] = predict(steps, point)
            except RuntimeError as error:
                print(f"  {key}: {error}")
                known[key] = None
    return result


def held_out_factors(predicted: dict[Point, tuple[float, float]], figure: int) -> dict[tuple[str, str], float]:
    """Per (model, engine): the median ratio of measured to predicted of the engine's other models."""
    logs: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for point, values in predicted.items():
        logs[point.engine].append((point.model, log(measured(point)[figure] / values[figure])))
    factors: dict[tuple[str, str], float] = {}
    for engine, entries in logs.items():
        for model in {model for model, _ in entries}:
            others = [value for other, value in entries if other != model]
            factors[model, engine] = exp(median(others)) if others else 1.0
    return factors


def measured(point: Point) -> tuple[float, float]:
    return point.ttft_ms, point.tpot_ms


def report(title: str, predicted: dict[Point, tuple[float, float]]) -> None:
    print(f"\n{title}: {len(predicted)} points")
    print(f"  {'model':20}{'points':>8}{'TTFT':>9}{'held out':>10}{'TPOT':>9}{'held out':>10}")
    factors = [held_out_factors(predicted, figure) for figure in (0, 1)]
    models = sorted({point.model for point in predicted})
    for model in [*models, "all"]:
        members = [point for point in predicted if model in (point.model, "all")]
        cells = ""
        for figure in (0, 1):
            for factor_of in (None, factors[figure]):
                errors = [
                    abs(
                        predicted[point][figure]
                        * (factor_of[point.model, point.engine] if factor_of else 1.0)
                        / measured(point)[figure]
                        - 1
                    )
                    for point in members
                ]
                cells += f"{median(errors):>{9 if factor_of is None else 10}.1%}"
        print(f"  {model:20}{len(members):>8}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th point")
    args = parser.parse_args()
    found = [point for point in points() if point.device in DEVICES][:: args.every]
    arithmetic = predictions(found, lambda point: Roofline.named(point.device, point.model, point.tensor_parallel))
    tables = predictions(
        found, lambda point: SiliconSteps.named(point.device, point.model, point.tensor_parallel, point.engine)
    )
    shared = [point for point in found if point in arithmetic and point in tables]
    report("arithmetic (roofline), same points", {point: arithmetic[point] for point in shared})
    report("measured operators (aiconfigurator-core)", {point: tables[point] for point in shared})


if __name__ == "__main__":
    main()
