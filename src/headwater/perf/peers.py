"""How the workers of one class compare: who is slower than the rest, how far apart they are, and whom to believe.

Each is known by the logarithm of measured over predicted, once as a slow mean (its speed) and once as a quick one (its
level). A level far from the median of all is not believed: whatever such a worker is, it is not what its class is
called, and a model of the class must not learn from it. When the median itself is far off, the model is wrong, not the
workers. The rule needs three workers: of two, neither can be told to be the odd one.
"""

import math
from dataclasses import dataclass
from statistics import median

_SHRINK_SAMPLES = 2000.0
_DEAD_ZONE = 0.05
_SPEED_MEMORY = 1.0 / 1000.0
_LEVEL_MEMORY = 1.0 / 32.0
_LIMIT = math.log(4.0)
_LEVEL_LIMIT = math.log(1000.0)
_LEAST_SAMPLES = 50
_LEAST_WORKERS = 3
_ODD = math.log(1.5)
_WRONG = math.log(2.0)
_STRIDE = 32
"""Samples between two looks at the median."""


@dataclass(slots=True)
class _Worker:
    speed: float = 0.0
    level: float = 0.0
    num_samples: float = 0.0


class Peers:
    """See the module docstring."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._middle = 0.0
        self._until_look = 0

    def note(self, worker_id: str, log_ratio: float) -> None:
        """A step of a worker took exp(log_ratio) times what the model predicted."""
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker()
        worker.num_samples += 1.0
        clipped = max(-_LIMIT, min(_LIMIT, log_ratio))
        worker.speed += max(_SPEED_MEMORY, 1.0 / worker.num_samples) * (clipped - worker.speed)
        clipped = max(-_LEVEL_LIMIT, min(_LEVEL_LIMIT, log_ratio))
        worker.level += max(_LEVEL_MEMORY, 1.0 / worker.num_samples) * (clipped - worker.level)
        self._until_look -= 1
        if self._until_look <= 0:
            self._until_look = _STRIDE
            self._middle = median([worker.level for worker in self._workers.values()])

    def is_odd(self, worker_id: str) -> bool:
        """Whether the class is not to learn from this worker."""
        if len(self._workers) < _LEAST_WORKERS:
            return False
        return abs(self._workers[worker_id].level - self._middle) > _ODD

    @property
    def model_is_wrong(self) -> bool:
        return len(self._workers) >= _LEAST_WORKERS and abs(self._middle) > _WRONG

    def start_over(self) -> None:
        """There is a new model, on the level of most workers. Who was odd still is."""
        for worker in self._workers.values():
            worker.level -= self._middle
            worker.speed = worker.num_samples = 0.0
        self._middle = 0.0

    def factor(self, worker_id: str) -> float:
        """How much slower than its class a worker is; 1 until the evidence is strong and the gap is real.

        Never below 1: a worker that claims to be faster than its class gains nothing by it.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return 1.0
        shrunk = worker.speed * worker.num_samples / (worker.num_samples + _SHRINK_SAMPLES)
        return math.exp(shrunk) if shrunk > _DEAD_ZONE else 1.0

    def disagreement(self) -> float:
        """How far apart workers measure, relative: the width below which price differences mean nothing.

        A median, so that one worker that lies or is slow does not decide it for all.
        """
        speeds = [worker.speed for worker in self._workers.values() if worker.num_samples >= _LEAST_SAMPLES]
        if len(speeds) < 2:
            return 0.0
        middle = median(speeds)
        return median([abs(speed - middle) for speed in speeds])

    def forget(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)
