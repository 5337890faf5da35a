"""The whole native engine on CPU: where the time of a decode step goes, how fast a prepared model loads, what workers
share.

    python bench/engine_step.py step [--batch 1 8 32] [--context 64] [--steps 20]
    python bench/engine_step.py load
    python bench/engine_step.py memory [--workers 2]

Times are CPU milliseconds of the engine's thread, the median over steps, one compute thread; JSON with --json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headwater.clock import RealClock
from headwater.config.schema import EngineConfig
from headwater.engines.base import ALONE, Progress
from headwater.engines.core import EngineCore
from headwater.engines.limits import limits_of
from headwater.engines.native.engine import build_engine
from headwater.protocol.request import EngineRequest, SamplingParams
from headwater.scheduler.scheduler import Scheduler

CONFIG = EngineConfig(threads=1, max_model_len=2048, kv_cache_memory=1024**3, max_num_seqs=64)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "everything": {
        "temperature": 0.8,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "logprobs": 5,
    },
}


class Stopwatch:
    """CPU time of this thread inside wrapped methods."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return inner(*arguments)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.thread_time() - started

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        spent, self.spent = self.spent, {}
        return spent


def open_core(stopwatch: Stopwatch) -> tuple[EngineCore, list[int]]:
    """The engine and some English text in its tokens."""
    built = build_engine(CONFIG, ALONE, lambda _: None)
    tokenizer_json = built.info.artifacts[built.info.card.artifacts[0].digest]
    assert isinstance(tokenizer_json, bytes)
    text = (Path(__file__).parents[1] / "LICENSE").read_text()
    tokens = Tokenizer.from_str(tokenizer_json.decode()).encode(text).ids
    scheduler = Scheduler(limits_of(CONFIG, built.info))
    executor: Any = built.executor
    stopwatch.wrap(scheduler, "schedule", "scheduler")
    stopwatch.wrap(scheduler, "commit", "scheduler")
    stopwatch.wrap(executor, "_batch", "build")
    stopwatch.wrap(executor._backend, "forward", "forward")
    stopwatch.wrap(executor._sampler, "sample", "sampler")
    return EngineCore(scheduler, executor, RealClock()), tokens * 4


def measure_steps(
    core: EngineCore, watch: Stopwatch, text: list[int], sampling: dict[str, Any], batch: int, context: int, steps: int
) -> dict[str, float]:
    """Median CPU ms of each part over steps in which `batch` sequences decode, around `context` tokens of context."""
    length = max(context - steps // 2, 1)
    requests = [
        EngineRequest(
            stream=number,
            request_id=str(number),
            model="",
            prompt=array("I", text[number * 37 :][:length]).tobytes(),
            sampling=SamplingParams(max_tokens=100_000, ignore_eos=True, seed=number, **sampling),
        )
        for number in range(batch)
    ]
    core.submit(requests)
    while core.load().waiting_prefill_tokens or core.load().num_running < batch:
        core.step()
    core.step()
    rows = []
    watch.take()
    for _ in range(steps):
        started = time.thread_time()
        core.step()
        total = time.thread_time() - started
        rows.append({"total": total} | watch.take())
    core.abort([request.stream for request in requests])
    core.step()
    medians = {name: statistics.median(row[name] for row in rows) * 1000 for name in rows[0]}
    medians["share_percent"] = 100 * (1 - medians["forward"] / medians["total"])
    return medians


def step_command(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    watch = Stopwatch()
    core, text = open_core(watch)
    results = []
    for name, sampling in SAMPLING.items():
        for batch in arguments.batch:
            row = measure_steps(core, watch, text, sampling, batch, arguments.context, arguments.steps)
            results.append({"sampling": name, "batch": batch, "context": arguments.context} | row)
    core.close()
    return results


def load_command(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Twice: the first may have to convert."""
    results = []
    for turn in ("first", "prepared"):
        phases: list[tuple[str, float]] = []

        def note(progress: Progress, phases: list[tuple[str, float]] = phases) -> None:
            if not phases or phases[-1][0] != progress.phase:
                phases.append((progress.phase, time.perf_counter()))

        started = time.perf_counter()
        build_engine(CONFIG, ALONE, note).executor.close()
        ends = [at for _, at in phases[1:]] + [time.perf_counter()]
        parts = {f"{phase}_ms": (end - at) * 1000 for (phase, at), end in zip(phases, ends, strict=True)}
        results.append({"turn": turn, "total_ms": (time.perf_counter() - started) * 1000} | parts)
    return results


CHILD = """
import sys, time
from headwater.engines.base import ALONE
from headwater.engines.native.engine import build_engine
sys.path.insert(0, {folder!r})
from engine_step import CONFIG
built = build_engine(CONFIG, ALONE, lambda _: None)
print("ready", flush=True)
sys.stdin.read()
"""


def memory_command(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Resident memory of workers with the same model, by who else has it mapped."""
    code = CHILD.format(folder=sys.path[0])
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(arguments.workers)
    ]
    results = []
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
    for number, child in enumerate(children):
        results.append({"worker": number} | _rollup(child.pid))
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(30)
    return results


def _rollup(pid: int) -> dict[str, float]:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        fields = {line.split(":")[0]: line.split()[1] for line in file if line.endswith("kB\n")}
    names = {"resident_mib": ["Rss"], "proportional_mib": ["Pss"], "private_mib": ["Private_Clean", "Private_Dirty"]}
    return {name: sum(int(fields[key]) for key in keys) / 1024 for name, keys in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step")
    step.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    step.add_argument("--context", type=int, default=64)
    step.add_argument("--steps", type=int, default=20)
    commands.add_parser("load")
    memory = commands.add_parser("memory")
    memory.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    results = {"step": step_command, "load": load_command, "memory": memory_command}[arguments.command](arguments)
    if arguments.json:
        print(json.dumps(results))
        return
    for row in results:
        print(
            "  ".join(
                f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )


if __name__ == "__main__":
    main()
