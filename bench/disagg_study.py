"""Adaptive roles against every fixed role vector of the same workers, simulated on step times fitted to silicon.

    python bench/disagg_study.py                       # the table: two models, six shapes, three objectives, loads
    python bench/disagg_study.py --shape 3000/150 --load 0.85 --verbose
    python bench/disagg_study.py --prefill-error 0.1 --decode-error -0.1    # the planner's time model is wrong
    python bench/disagg_study.py --flip                # the mix flips every minute
    python bench/disagg_study.py --issue-3774          # two TP4 workers against one TP8, closed loop
    python bench/disagg_study.py --check               # the fast simulation beside the production parts
    python bench/disagg_study.py --fit                 # fit the step times anew (needs headwater[silicon])

Traffic is Poisson, prompts +-25 %, answers +-50 %. Load 1.0 is the largest rate of completions of any role vector with
1,500 requests at once. Every cell is judged on the same samples for all, after a minute; the planner sees only what a
frontend sees, begins with all workers aggregated and does not know lengths of answers that have not ended. The best
fixed vector is chosen in hindsight, by its mean over the samples.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean

from headwater.perf.curve import StepCurve
from headwater.perf.model import StepShape
from headwater.planner.decide import PlannerSettings
from headwater.planner.objective import Objective
from headwater.planner.plan import RolePlan, aggregated, candidates
from headwater.planner.pool import WorkerModel
from headwater.planner.whatif import FastCluster, Job, Outcomes
from headwater.sim.adaptive import AdaptiveCluster
from headwater.sim.planned import planned_cluster, requests_of
from headwater.sim.report import summarise as report_of

CURVES = Path(__file__).with_name("disagg_curves.json")
KV_TOKENS = {
    "llama-3.1-70b-fp8": {1: 310_000, 2: 1_060_000, 4: 2_500_000, 8: 5_500_000},
    "gpt-oss-120b": {1: 800_000, 2: 2_400_000, 4: 5_500_000, 8: 12_000_000},
}
KV_BYTES = {"llama-3.1-70b-fp8": 163_840, "gpt-oss-120b": 73_728}
LAYOUTS = {
    "llama-3.1-70b-fp8": [(1, 1, 1, 1, 2, 2), (2, 2, 2, 2)],
    "gpt-oss-120b": [(1, 1, 1, 1, 4), (2, 2, 2, 2)],
}
SHAPES = {
    "1000/1000": [(1.0, 1000, 1000)],
    "3000/150": [(1.0, 3000, 150)],
    "4000/500": [(1.0, 4000, 500)],
    "8000/500": [(1.0, 8000, 500)],
    "32000/500": [(1.0, 32000, 500)],
    "mixed": [(0.25, 1000, 1000), (0.25, 3000, 150), (0.2, 4000, 500), (0.2, 8000, 500), (0.1, 32000, 500)],
}
FLIP = [([(1.0, 8000, 100)], 4.5), ([(1.0, 500, 1500)], 8.0)]
"""Shapes and rates of a cluster with the capacity of Llama on four TP2 workers, a minute each."""
LINK_BYTES_PER_MS = 300e6
MEANINGFUL = 0.3
"""Cells in which the best fixed vector attains less say nothing about a goodput ratio."""
WARM_MS = 60_000.0
JUDGED_REQUESTS = 300
JUDGED_MS = 90_000.0


@dataclass(frozen=True)
class Cell:
    model: str
    layout: tuple[int, ...]
    shape: str
    objective: str
    load: float

    @property
    def name(self) -> str:
        tps = "+".join(f"{self.layout.count(tp)}xTP{tp}" for tp in sorted(set(self.layout)))
        return f"{self.model:18} {tps:12} {self.shape:10} {self.objective:5} {self.load:4.2f}"


@dataclass
class Result:
    cell: Cell
    best: RolePlan
    best_goodput: float
    best_attained: float
    aggregated: float
    worst: float
    adaptive: float
    attained: float
    changes: float
    unfinished: int
    plan: str

    @property
    def ratio(self) -> float:
        return self.adaptive / self.best_goodput if self.best_goodput else 1.0


def curves() -> dict[str, StepCurve]:
    stored = json.loads(CURVES.read_text())
    return {name: StepCurve(**{**one, "knots": tuple(map(tuple, one["knots"]))}) for name, one in stored.items()}


def fit_curves() -> None:
    from headwater.perf.aiconfigurator import SiliconSteps

    fitted = {
        f"{model}/{tp}": asdict(StepCurve.fit(SiliconSteps.named("h200-sxm", model, tp)))
        for model in KV_TOKENS
        for tp in (1, 2, 4, 8)
    }
    CURVES.write_text(json.dumps(fitted, indent=1) + "\n")


def pool_of(known: dict[str, StepCurve], model: str, layout: Sequence[int], chunk: int) -> list[WorkerModel]:
    made = {
        tp: WorkerModel(
            known[f"{model}/{tp}"], KV_TOKENS[model][tp], chunk, 256, LINK_BYTES_PER_MS, KV_BYTES[model], f"TP{tp}"
        )
        for tp in set(layout)
    }
    return [made[tp] for tp in layout]


def draw(random: Random, shape: list[tuple[float, int, int]]) -> tuple[int, int]:
    _, prompt, output = random.choices(shape, [share for share, _, _ in shape])[0]
    return int(prompt * random.uniform(0.75, 1.25)), max(2, int(output * random.uniform(0.5, 1.5)))


def arrivals(
    shape: list[tuple[float, int, int]], rate: float, until_ms: float, seed: str, start: float = 0.0
) -> list[Job]:
    random = Random(seed)
    at_ms, jobs = start, []
    while True:
        at_ms += random.expovariate(rate) * 1000
        if at_ms > until_ms:
            return jobs
        jobs.append(Job(at_ms, *draw(random, shape)))


def capacity(pool: list[WorkerModel], shape: list[tuple[float, int, int]]) -> float:
    """Requests a second that the best role vector completes, of a minute's worth and more that come all at once."""
    random = Random("capacity")
    longest = max(prompt for _, prompt, _ in shape)
    jobs = [Job(0.0, *draw(random, shape)) for _ in range(1500 if longest < 20_000 else 400)]
    expected = fmean([job.output_tokens for job in jobs])
    plans = candidates([model.name for model in pool])
    return max(len(jobs) / FastCluster(pool, plan, expected).run(jobs).ended_ms * 1000 for plan in plans)


def objective_of(cell: Cell, known: dict[str, StepCurve]) -> Objective:
    prompt = 16_000 if cell.shape == "mixed" else SHAPES[cell.shape][0][1]
    curve = known[f"{cell.model}/2"]
    alone = 0.0
    for start in range(0, prompt, 8192):
        tokens = min(8192, prompt - start)
        alone += curve.step_ms(StepShape(tokens, tokens * (start + (tokens + 1) / 2)))
    tight, loose, middle = (10, 40, 15) if cell.model.startswith("gpt-oss") else (25, 80, 35)
    match cell.objective:
        case "tpot":
            return Objective(10 * alone + 500, tight)
        case "ttft":
            return Objective(2.5 * alone + 100, loose)
        case _:
            return Objective(4 * alone + 150, middle)


def judged(jobs: Sequence[Job], outcomes: Outcomes, objective: Objective, warm_ms: float) -> tuple[float, float]:
    """(requests per s within the objectives, share of them)."""
    ttft, tpot = outcomes.ttft_ms, outcomes.tpot_ms
    numbers = [number for number, job in enumerate(jobs) if job.at_ms >= warm_ms]
    met = sum(objective.met(ttft[number], tpot[number]) for number in numbers)
    seconds = (jobs[-1].at_ms - warm_ms) / 1000
    return met / seconds, met / len(numbers)


def run_fixed(pool: list[WorkerModel], plan: RolePlan, jobs: Sequence[Job]) -> FastCluster:
    cluster = FastCluster(pool, plan, fmean([job.output_tokens for job in jobs]))
    cluster.run(jobs, jobs[-1].at_ms * 3)
    return cluster


def lines(run: AdaptiveCluster, names: Sequence[str]) -> Iterator[str]:
    for now, decision in run.decisions:
        score, factors = decision.scores[decision.plan], decision.correction
        yield (
            f"  {now / 1000:5.0f} s {decision.plan.describe(names)}: {decision.reason}; promises {score.attained:.2f} "
            f"{score.e2e_ms:.0f} ms; x{factors.prefill:.2f} x{factors.decode:.2f}"
        )


def study(cell: Cell, known: dict[str, StepCurve], args: argparse.Namespace, cache: dict[object, object]) -> Result:
    pool = pool_of(known, cell.model, cell.layout, args.chunk)
    shape = SHAPES[cell.shape]
    key = (cell.model, cell.layout, cell.shape)
    if key not in cache:
        cache[key] = capacity(pool, shape)
    rate = cell.load * float(cache[key])  # type: ignore[arg-type]
    objective = objective_of(cell, known)
    until = WARM_MS + max(JUDGED_MS, JUDGED_REQUESTS / rate * 1000)
    believed = [
        replace(model, curve=model.curve.scaled(prefill=1 + args.prefill_error, decode=1 + args.decode_error))
        for model in pool
    ]
    believed = [believed[cell.layout.index(tp)] for tp in cell.layout]
    fixed: dict[RolePlan, list[float]] = {}
    adaptive, attained, changes, unfinished, plan = [], [], 0, 0, ""
    for sample in range(args.samples):
        jobs = arrivals(shape, rate, until, f"{key}/{sample + args.seed}")
        for candidate in candidates([model.name for model in pool]):
            run_key = (key, cell.load, sample, candidate)
            if run_key not in cache:
                cache[run_key] = run_fixed(pool, candidate, jobs).outcomes
            fixed.setdefault(candidate, []).append(judged(jobs, cache[run_key], objective, WARM_MS)[0])
        watched = AdaptiveCluster(pool, PlannerSettings(objective=objective), believed)
        cluster = watched.run(jobs)
        goodput, share = judged(jobs, cluster.outcomes, objective, WARM_MS)
        adaptive.append(goodput)
        attained.append(share)
        changes += watched.num_changes
        unfinished += cluster.num_open if cell.load < 1 else 0
        plan = watched.planner.plan.describe([model.name for model in pool])
        if args.verbose:
            print(f" sample {sample}: {goodput:.2f}/s of {rate:.2f}/s, best {max(v[-1] for v in fixed.values()):.2f}")
            print("\n".join(lines(watched, [model.name for model in pool])))
    means = {candidate: fmean(values) for candidate, values in fixed.items()}
    best = max(means, key=lambda candidate: means[candidate])
    flat = next(value for candidate, value in means.items() if candidate.aggregated)
    return Result(
        cell,
        best,
        means[best],
        means[best] / rate,
        flat,
        min(means.values()),
        fmean(adaptive),
        fmean(attained),
        changes / args.samples,
        unfinished,
        plan,
    )


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    for model in args.model or LAYOUTS:
        for layout in LAYOUTS[model][: args.layouts]:
            for shape in args.shape or SHAPES:
                for load in args.load or [0.7, 0.85, 1.0]:
                    for objective in args.objective or ["tpot", "ttft", "both"]:
                        yield Cell(model, layout, shape, objective, load)


def table(args: argparse.Namespace) -> None:
    known = curves()
    cache: dict[object, object] = {}
    results: list[Result] = []
    started = time.process_time()
    print(f"{'cell':57}{'best fixed':>34}{'goodput':>9}{'agg':>6}{'worst':>6}{'ours':>7}{'met':>6}{'moves':>6}")
    last = None
    for cell in cells(args):
        if (cell.model, cell.layout, cell.shape, cell.load) != last:
            cache = {key: value for key, value in cache.items() if isinstance(value, float)}
            last = (cell.model, cell.layout, cell.shape, cell.load)
        result = study(cell, known, args, cache)
        results.append(result)
        names = [f"TP{tp}" for tp in cell.layout]
        best = result.best_goodput or inf
        print(
            f"{cell.name:57}{short(result.best, names):>34}{result.best_goodput:9.2f}{result.aggregated / best:6.2f}"
            f"{result.worst / best:6.2f}{result.ratio:7.3f}{result.attained:6.0%}{result.changes:6.1f}"
            f"{f'  unfinished {result.unfinished}' if result.unfinished else ''}  {result.plan}",
            flush=True,
        )
    summarise(results)
    print(f"{time.process_time() - started:.0f} s of CPU")


def short(plan: RolePlan, names: Sequence[str]) -> str:
    return plan.describe(names).replace("prefill", "P").replace("decode", "D").replace("aggregated", "agg")


def summarise(results: Sequence[Result]) -> None:
    for name, chosen in (
        ("at <= 0.85 of capacity", [r for r in results if r.cell.load < 1]),
        ("at capacity", [r for r in results if r.cell.load >= 1]),
    ):
        ratios = sorted(result.ratio for result in chosen if result.best_attained > MEANINGFUL)
        if ratios:
            print(
                f"{name}: {len(ratios)} cells, mean {fmean(ratios):.3f}, least {ratios[0]:.3f}, "
                f"5th percentile {ratios[len(ratios) // 20]:.3f}, < 0.95: {sum(r < 0.95 for r in ratios)}, "
                f"< 0.99: {sum(r < 0.99 for r in ratios)}; unfinished {sum(r.unfinished for r in chosen)}"
            )


def flip(args: argparse.Namespace) -> None:
    """One minute each, for six minutes, the first two of which are not judged."""
    known = curves()
    model = "llama-3.1-70b-fp8"
    for layout in ((2, 2, 2, 2), (1, 1, 2, 2, 2)):
        pool = pool_of(known, model, layout, args.chunk)
        for objective_name in ("tpot", "both"):
            objective = {"tpot": Objective(6000, 25), "both": Objective(2500, 35)}[objective_name]
            fixed: dict[RolePlan, list[float]] = {}
            ours, changes = [], 0
            for sample in range(args.samples):
                jobs: list[Job] = []
                for minute in range(8):
                    shape, rate = FLIP[minute % 2]
                    start = minute * 60_000.0
                    jobs += arrivals(shape, rate * args.flip_load, start + 60_000, f"{sample}/{minute}", start)
                for candidate in candidates([one.name for one in pool]):
                    outcomes = run_fixed(pool, candidate, jobs).outcomes
                    fixed.setdefault(candidate, []).append(judged(jobs, outcomes, objective, 120_000)[0])
                watched = AdaptiveCluster(pool, PlannerSettings(objective=objective))
                ours.append(judged(jobs, watched.run(jobs).outcomes, objective, 120_000)[0])
                changes += watched.num_changes
                if args.verbose:
                    print("\n".join(lines(watched, [model.name for model in pool])))
            means = {candidate: fmean(values) for candidate, values in fixed.items()}
            best = max(means, key=lambda candidate: means[candidate])
            names = [one.name for one in pool]
            print(
                f"flip {layout} {objective_name:5} best fixed {short(best, names)} {means[best]:.2f}/s, "
                f"ours {fmean(ours):.2f}/s = {fmean(ours) / means[best]:.3f}, {changes / args.samples:.1f} moves"
            )


def issue_3774(args: argparse.Namespace) -> None:
    """Output rate and mean end-to-end time of a closed loop, against one aggregated worker of all GPUs."""
    known = curves()
    model = "gpt-oss-120b"
    whole, halves = pool_of(known, model, (8,), args.chunk), pool_of(known, model, (4, 4), args.chunk)
    split = RolePlan(("prefill", "decode"))
    print(f"{'shape':10}{'users':>6}{'TP8 tok/s':>11}{'2xTP4':>8}{'TP4P+TP4D':>11}{'adaptive 2xTP4':>16}  (E2E)")
    for name in ("1000/1000", "3000/150"):
        for users in (16, 32, 64):
            random = Random(f"{name}/{users}")
            jobs = [Job(0.0, *draw(random, SHAPES[name])) for _ in range(24 * users)]
            expected = fmean([job.output_tokens for job in jobs])
            base = closed(FastCluster(whole, aggregated(1), expected), jobs, users)
            others = [
                closed(FastCluster(halves, aggregated(2), expected), jobs, users),
                closed(FastCluster(halves, split, expected), jobs, users),
                closed(AdaptiveCluster(halves, PlannerSettings()), jobs, users),
            ]
            cells = "".join(f"{rate / base[0]:9.3f} ({e2e / base[1]:.3f})" for rate, e2e in others)
            print(f"{name:10}{users:6}{base[0]:11.0f}{cells}")


def closed(cluster: FastCluster | AdaptiveCluster, jobs: Sequence[Job], users: int) -> tuple[float, float]:
    """(output tokens per s, mean end-to-end time in ms) of what came after the first quarter and before the last."""
    outcome = cluster.run_closed(jobs, users)
    ran = outcome if isinstance(outcome, FastCluster) else cluster
    assert isinstance(ran, FastCluster)
    first, last = len(jobs) // 4, len(jobs) * 3 // 4
    seconds = (ran.started_ms[last] - ran.started_ms[first]) / 1000
    tokens = sum(job.output_tokens for job in jobs[first:last])
    return tokens / seconds, fmean(ran.outcomes.e2e_ms[first:last])


def check(args: argparse.Namespace) -> None:
    """The fast simulation beside the production router and schedulers, a minute of traffic at 0.7 of capacity."""
    known = curves()
    print(f"{'shape':11}{'roles':24}{'TTFT ms':>18}{'TPOT ms':>16}{'E2E ms':>20}{'CPU s':>8}  (fast / production)")
    for name in args.shape or ["1000/1000", "3000/150", "8000/500"]:
        pool = pool_of(known, "llama-3.1-70b-fp8", (2, 2, 2, 2), args.chunk)
        rate = 0.7 * capacity(pool, SHAPES[name])
        jobs = arrivals(SHAPES[name], rate, 60_000, "check")
        expected = fmean([job.output_tokens for job in jobs])
        for plan in candidates([model.name for model in pool]):
            fast = FastCluster(pool, plan, expected).run(jobs)
            started = time.process_time()
            result = planned_cluster(pool, plan).run(requests_of(jobs))
            production = report_of(result, trace=name, policy="delay", mode=plan.describe(), ceiling=0.0)
            pairs = (
                (fast.ttft_ms, production.ttft_ms_mean),
                (fast.tpot_ms, production.tpot_ms_mean),
                (fast.e2e_ms, production.e2e_ms_mean),
            )
            cells = "".join(f"{fmean(mine):10.1f} /{theirs:8.1f}" for mine, theirs in pairs)
            print(f"{name:11}{plan.describe():24}{cells}{time.process_time() - started:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(LAYOUTS))
    parser.add_argument("--layouts", type=int, default=2, help="of each model, the first N")
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--objective", action="append", choices=["tpot", "ttft", "both"])
    parser.add_argument("--load", action="append", type=float)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--prefill-error", type=float, default=0.0)
    parser.add_argument("--decode-error", type=float, default=0.0)
    parser.add_argument("--flip", action="store_true")
    parser.add_argument("--flip-load", type=float, default=1.0)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--issue-3774", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    if args.fit:
        fit_curves()
    elif args.check:
        check(args)
    elif args.issue_3774:
        issue_3774(args)
    elif args.flip:
        flip(args)
    else:
        table(args)


if __name__ == "__main__":
    main()
