"""PerfModel: one answer, in milliseconds, to "how long would that take there?".

A step that computes T new prompt tokens which attend to A token pairs, and decodes n sequences over K tokens of
context, is modelled as

    t = c0 + c1 [T > 0] + c2 T + c3 A + c4 [n > 0] + c5 n + c6 K        all c >= 0

which is the roofline of a transformer with its terms added: weights (constants), linear layers (T, n), attention
(A, K). Coefficients are pooled over all workers of one hardware class and model, because errors that differ between
workers mislead a router while common errors cancel. A worker's own speed is a single factor, shrunk to 1 until many
samples insist. Transfers are latency + bytes / bandwidth per link.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from headwater.perf.fit import FitQuality, FitState, NonNegativeFit
from headwater.protocol.events import StepTiming

_STEP_SCALES = (1.0, 1.0, 1e3, 1e6, 1.0, 1e1, 1e5)
_LINK_SCALES = (1.0, 1e6)
_FACTOR_SHRINK_SAMPLES = 2000.0
_FACTOR_DEAD_ZONE = 0.05
_FACTOR_MEMORY = 1.0 / 1000.0
_FACTOR_LIMIT = math.log(4.0)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is in one engine step."""

    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0
    """Sum over new tokens of the tokens each attends to."""
    decode_sequences: float = 0.0
    decode_context_tokens: float = 0.0

    def features(self) -> tuple[float, ...]:
        return (
            1.0,
            1.0 if self.prefill_tokens > 0 else 0.0,
            self.prefill_tokens,
            self.prefill_pairs,
            1.0 if self.decode_sequences > 0 else 0.0,
            self.decode_sequences,
            self.decode_context_tokens,
        )


class PerfState(msgspec.Struct, frozen=True):
    """A PerfModel on the wire or on disk."""

    steps: dict[str, FitState]
    links: dict[str, FitState]


@dataclass(slots=True)
class _WorkerFactor:
    mean_log: float = 0.0
    num_samples: float = 0.0


class StepModel:
    """Step times of one class: a hardware class together with a model."""

    def __init__(self) -> None:
        self._fit = NonNegativeFit(_STEP_SCALES)

    def observe(self, shape: StepShape, duration_ms: float) -> None:
        self._fit.observe(shape.features(), duration_ms)

    def believe(self, samples: Iterable[tuple[StepShape, float]], weight: float) -> None:
        """Prior knowledge as expected durations, together worth `weight` samples."""
        samples = list(samples)
        for shape, duration_ms in samples:
            self._fit.observe_prior(shape.features(), duration_ms, weight / len(samples))

    def step_ms(self, shape: StepShape) -> float:
        return self._fit.predict(shape.features())

    def prefill_ms(self, new_tokens: int, cached_tokens: int = 0, *, chunk_tokens: int = 8192) -> float:
        """Computing `new_tokens` after `cached_tokens`, alone, in chunks."""
        if new_tokens <= 0:
            return 0.0
        step, prefill, per_token, per_pair, *_ = self._fit.coefficients
        pairs = new_tokens * (cached_tokens + (new_tokens + 1) / 2)
        steps = math.ceil(new_tokens / chunk_tokens)
        return steps * (step + prefill) + per_token * new_tokens + per_pair * pairs

    def decode_step_ms(self, sequences: float, context_tokens: float) -> float:
        """One step that decodes `sequences` over `context_tokens` in all."""
        if sequences <= 0:
            return 0.0
        step, _, _, _, decode, per_sequence, per_context = self._fit.coefficients
        return step + decode + per_sequence * sequences + per_context * context_tokens

    @property
    def coefficients(self) -> tuple[float, ...]:
        """c0 to c6 of the module docstring."""
        return self._fit.coefficients

    def quality(self) -> FitQuality:
        return self._fit.quality()

    def state(self) -> FitState:
        return self._fit.state()

    def merge(self, state: FitState) -> None:
        self._fit.merge(state)


class PerfModel:
    """All that is known about time in one cluster."""

    def __init__(self) -> None:
        self._steps: dict[str, StepModel] = {}
        self._links: dict[str, NonNegativeFit] = {}
        self._factors: dict[str, _WorkerFactor] = {}

    # Steps

    def steps(self, hardware: str) -> StepModel:
        """The pooled model of a class; a class never seen starts empty and predicts 0."""
        model = self._steps.get(hardware)
        if model is None:
            model = self._steps[hardware] = StepModel()
        return model

    def observe_step(self, hardware: str, worker: str, timing: StepTiming) -> None:
        shape = StepShape(
            timing.num_prefill_tokens,
            timing.num_prefill_context_tokens,
            timing.num_decode_sequences,
            timing.num_decode_context_tokens,
        )
        model = self.steps(hardware)
        expected_ms = model.step_ms(shape)
        if expected_ms > 0 and timing.duration_ms > 0:
            self._observe_factor(worker, math.log(timing.duration_ms / expected_ms))
        model.observe(shape, timing.duration_ms)

    def worker_factor(self, worker: str) -> float:
        """How much slower than its class a worker is; 1 until the evidence is strong and the gap is real."""
        factor = self._factors.get(worker)
        if factor is None:
            return 1.0
        shrunk = factor.mean_log * factor.num_samples / (factor.num_samples + _FACTOR_SHRINK_SAMPLES)
        return math.exp(shrunk) if abs(shrunk) > _FACTOR_DEAD_ZONE else 1.0

    def disagreement(self) -> float:
        """Spread of the workers' measured speeds: the width below which price differences mean nothing."""
        logs = [factor.mean_log for factor in self._factors.values() if factor.num_samples >= 50]
        if len(logs) < 2:
            return 0.0
        mean = sum(logs) / len(logs)
        return math.sqrt(sum((value - mean) ** 2 for value in logs) / len(logs))

    def forget_worker(self, worker: str) -> None:
        self._factors.pop(worker, None)

    def _observe_factor(self, worker: str, log_ratio: float) -> None:
        factor = self._factors.setdefault(worker, _WorkerFactor())
        clipped = max(-_FACTOR_LIMIT, min(_FACTOR_LIMIT, log_ratio))
        factor.num_samples += 1.0
        memory = max(_FACTOR_MEMORY, 1.0 / factor.num_samples)
        factor.mean_log += memory * (clipped - factor.mean_log)

    # Links

    def observe_transfer(self, link: str, transferred_bytes: int, duration_ms: float) -> None:
        self._link(link).observe((1.0, transferred_bytes), duration_ms)

    def believe_link(self, link: str, latency_ms: float, bytes_per_s: float, weight: float = 4.0) -> None:
        for size in (64 * 1024, 1024 * 1024, 64 * 1024 * 1024):
            expected_ms = latency_ms + size / bytes_per_s * 1e3
            self._link(link).observe_prior((1.0, size), expected_ms, weight / 3)

    def transfer_ms(self, link: str, transferred_bytes: int) -> float:
        """0 for a link nothing is known about."""
        return self._link(link).predict((1.0, transferred_bytes))

    def _link(self, link: str) -> NonNegativeFit:
        fit = self._links.get(link)
        if fit is None:
            fit = self._links[link] = NonNegativeFit(_LINK_SCALES)
        return fit

    # Whole

    def state(self) -> PerfState:
        return PerfState(
            steps={hardware: model.state() for hardware, model in self._steps.items()},
            links={link: fit.state() for link, fit in self._links.items()},
        )

    def merge(self, state: PerfState) -> None:
        for hardware, fit in state.steps.items():
            self.steps(hardware).merge(fit)
        for link, fit in state.links.items():
            self._link(link).merge(fit)
