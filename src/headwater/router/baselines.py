"""What others do, for comparison: their published rules on our view of the workers.

| policy | source | rule |
|---|---|---|
| random, power_of_two | textbook | any worker; the less loaded of two |
| dynamo | NVIDIA Dynamo 1.6, router design page | uncached prefill blocks + active decode blocks, lowest wins |
| sglang_cache_aware | SGLang model gateway 0.3 | unbalanced: shortest queue; match > 30 %: longest; else smallest |
| llmd | llm-d router 0.10, precise prefix sample | 2 x prefix score + 1 x free KV + 1 x short queue, highest wins |
| preble | Srivatsa et al., ICLR 2025 | match longer than the rest: exploit it; else least window load + own prefill |

They see an exact prefix index, which flatters those that have only an approximate one. Random choices are drawn from
a counter, so that a run can be replayed.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from headwater.router.policy import Candidate, Decision, decide
from headwater.router.request import RouteRequest
from headwater.router.worker import WorkerView

_MASK = (1 << 64) - 1


def draw(counter: int) -> int:
    """A 64-bit pseudo-random number (splitmix64, Steele et al., OOPSLA 2014)."""
    z = (counter + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def _listed(workers: Sequence[WorkerView], totals: Sequence[float]) -> tuple[Candidate, ...]:
    return tuple(Candidate(w.worker_id, t, {"score": t}) for w, t in zip(workers, totals, strict=True))


def _lowest(policy: str, request: RouteRequest, workers: Sequence[WorkerView], totals: Sequence[float]) -> Decision:
    winner = min(range(len(workers)), key=lambda i: (totals[i], workers[i].sent_tokens))
    return decide(policy, request, workers[winner], workers, partial(_listed, workers, totals))


class Random:
    name: ClassVar[str] = "random"
    uses_residency: ClassVar[bool] = False

    def __init__(self) -> None:
        self._counter = 0

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        self._counter += 1
        winner = workers[draw(self._counter) % len(workers)]
        return decide(self.name, request, winner, workers, partial(_listed, workers, [0.0] * len(workers)))


class PowerOfTwo:
    name: ClassVar[str] = "power_of_two"
    uses_residency: ClassVar[bool] = False

    def __init__(self) -> None:
        self._counter = 0

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        self._counter += 2
        pair = [workers[draw(self._counter + i) % len(workers)] for i in range(2)]
        winner = min(pair, key=lambda worker: worker.booked_sequences)
        loads = [float(worker.booked_sequences) for worker in workers]
        return decide(self.name, request, winner, workers, partial(_listed, workers, loads))


class Dynamo:
    name: ClassVar[str] = "dynamo"
    uses_residency: ClassVar[bool] = True

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        size = request.block_size
        totals = []
        for worker in workers:
            cached = request.cached_tokens.get(worker.worker_id, 0)
            prefill = max(0.0, (worker.booked_prefill_tokens + request.num_prompt_tokens - cached) / size)
            decode = (worker.booked_kv_tokens + request.num_prompt_tokens) / size
            totals.append(prefill + decode)
        return _lowest(self.name, request, workers, totals)


class SglangCacheAware:
    name: ClassVar[str] = "sglang_cache_aware"
    uses_residency: ClassVar[bool] = True

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        loads = [float(worker.booked_sequences) for worker in workers]
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            return _lowest(self.name, request, workers, loads)
        cached = [request.cached_tokens.get(worker.worker_id, 0) for worker in workers]
        if max(cached) > 0.3 * request.num_prompt_tokens:
            totals = [load - 1e6 * length for load, length in zip(loads, cached, strict=True)]
            return _lowest(self.name, request, workers, totals)
        return _lowest(self.name, request, workers, [float(worker.sent_tokens) for worker in workers])


class LlmD:
    name: ClassVar[str] = "llmd"
    uses_residency: ClassVar[bool] = True

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        queues = [worker.num_prefilling for worker in workers]
        widest = max(queues) - min(queues)
        totals = []
        for worker, queue in zip(workers, queues, strict=True):
            prefix = request.cached_tokens.get(worker.worker_id, 0) / max(1, request.num_prompt_tokens)
            capacity = worker.instance.kv_blocks * request.block_size
            used = min(1.0, worker.booked_kv_tokens / capacity) if capacity else 0.0
            short = 1.0 - (queue - min(queues)) / widest if widest else 1.0
            totals.append(-(2 * prefix + (1 - used) + short))
        return _lowest(self.name, request, workers, totals)


class Preble:
    name: ClassVar[str] = "preble"
    uses_residency: ClassVar[bool] = True
    window_s: ClassVar[float] = 180.0

    def __init__(self) -> None:
        self._recent: deque[tuple[float, str, int]] = deque()
        self._window: dict[str, int] = {}

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView]) -> Decision:
        while self._recent and self._recent[0][0] < request.now - self.window_s:
            _, worker_id, tokens = self._recent.popleft()
            self._window[worker_id] -= tokens
        cached = [request.cached_tokens.get(worker.worker_id, 0) for worker in workers]
        loads = [float(self._window.get(worker.worker_id, 0)) for worker in workers]
        longest = max(cached)
        if longest > request.num_prompt_tokens - longest:
            totals = [load if length == longest else float("inf") for load, length in zip(loads, cached, strict=True)]
        else:
            totals = [
                load + 2.0 * (request.num_prompt_tokens - length) for load, length in zip(loads, cached, strict=True)
            ]
        decision = _lowest(self.name, request, workers, totals)
        new_tokens = request.num_prompt_tokens - decision.cached_tokens
        self._recent.append((request.now, decision.winner, new_tokens))
        self._window[decision.winner] = self._window.get(decision.winner, 0) + new_tokens
        return decision
