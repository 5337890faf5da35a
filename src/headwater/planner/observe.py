"""What a frontend knows, as the planner takes it: decisions made become traffic, workers become models of time."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import log2, nan

from headwater.perf.curve import StepCurve
from headwater.perf.model import StepModel
from headwater.planner.pool import WorkerModel
from headwater.planner.traffic import Served
from headwater.router.decisions import DecisionRecord
from headwater.router.worker import WorkerView, time_class

_ROOM_STEPS = 2
"""Per doubling: workers with about as much room are alike."""
_KNOWN_SAMPLES = 16.0
"""Measured steps below which nothing is believed of a class of workers."""


def served_of(records: Iterable[DecisionRecord], worker_ids: Collection[str]) -> list[Served]:
    """Requests that were given to these workers, in order of arrival; times in ms since the epoch.

    Answers of a prompt with several count as one of their mean length.
    """
    found = [_served(record) for record in records if record.worker_id in worker_ids]
    return sorted(found, key=lambda served: served.at_ms)


def _served(record: DecisionRecord) -> Served:
    cached = record.cached_tokens if record.cached_tokens is not None else record.predicted_cached_tokens
    served = Served(record.asked * 1000, record.prompt_tokens, min(cached, max(0, record.prompt_tokens - 1)))
    served.open = record.outcome in ("waiting", "running")
    served.generated = int(served.open and record.ttft_ms is not None)
    tokens = record.output_tokens // max(1, record.num_sequences)
    if record.outcome == "finished" and record.e2e_ms is not None and record.ttft_ms is not None and tokens:
        served.output_tokens = tokens
        served.ttft_ms = record.queued_ms + record.ttft_ms
        later = max(0.0, record.e2e_ms - served.ttft_ms)
        served.tpot_ms = later / (tokens - 1) if tokens > 1 else nan
    return served


def known(model: StepModel) -> bool:
    return model.num_samples >= _KNOWN_SAMPLES


def pool_of(
    workers: Sequence[WorkerView], steps: Mapping[str, StepModel], link_bytes_per_ms: float
) -> list[WorkerModel] | None:
    """Models of these workers; None while step times of one of them are unknown. `steps`: by class of times."""
    made: dict[tuple[str, int, int, int], WorkerModel] = {}
    pool: list[WorkerModel] = []
    for worker in workers:
        instance = worker.instance
        name = time_class(instance)
        if name not in steps or not known(steps[name]):
            return None
        room = instance.kv_blocks * instance.card.block_size
        key = (name, round(_ROOM_STEPS * log2(max(1, room))), instance.max_num_batched_tokens, instance.max_num_seqs)
        if key not in made:
            made[key] = WorkerModel(
                curve=StepCurve.of(steps[name].coefficients),
                kv_tokens=max(1, room),
                chunk_tokens=max(16, worker.chunk_tokens),
                max_num_seqs=max(1, instance.max_num_seqs),
                link_bytes_per_ms=link_bytes_per_ms,
                kv_bytes_per_token=float(instance.card.kv_bytes_per_token),
                name=f"{name}/{len(made)}",
            )
        pool.append(made[key])
    return pool
