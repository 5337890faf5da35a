"""PerfModel: one answer, in milliseconds, to "how long would that take there?".

A step that computes T new prompt tokens which attend to A token pairs, and decodes n sequences over K tokens of
context, is modelled as

    t = c0 + c1 [T > 0] + c2 T + c3 A + c4 [n > 0] + c5 n + c6 K        all c >= 0

which is the roofline of a transformer with its terms added: weights (constants), linear layers (T, n), attention
(A, K). Coefficients are pooled over all workers of one hardware class and model, because errors that differ between
workers mislead a router while common errors cancel. A worker's own speed is a single factor, shrunk to 1 until many
samples insist (`headwater.perf.peers`). Transfers are latency + bytes / bandwidth per link.
"""

import math
from collections.abc import Iterable

import msgspec

from headwater.perf.fit import FitQuality, FitState, NonNegativeFit
from headwater.perf.peers import Peers
from headwater.perf.prior import NUM_FIRST, USUAL, StepPredictor, believe
from headwater.perf.shape import StepShape as StepShape
from headwater.protocol.events import StepTiming

STEP_SCALES = (1.0, 1.0, 1e3, 1e6, 1.0, 1e1, 1e5)
"""Of the features of a step, for fits."""
_LINK_SCALES = (1.0, 1e6)


class PerfState(msgspec.Struct, frozen=True):
    """A PerfModel on the wire or on disk."""

    steps: dict[str, FitState]
    links: dict[str, FitState]


class StepModel:
    """Step times of one class: a hardware class together with a model. `expected`: what is thought of such a class;
    its proportions hold until measurements say more."""

    def __init__(self, expected: StepPredictor = USUAL) -> None:
        self._fit = NonNegativeFit(STEP_SCALES)
        self.expected = expected
        self._first: list[tuple[StepShape, float]] | None = []
        """The first samples; None once they are many."""

    def observe(self, shape: StepShape, duration_ms: float) -> None:
        if not 0.0 < duration_ms < math.inf:
            return
        if self._first is None:
            self._fit.observe(shape.features(), duration_ms)
            return
        self._first.append((shape, duration_ms))
        self._fit = NonNegativeFit(STEP_SCALES)
        believe(self._fit, self._first, self.expected)
        if len(self._first) >= NUM_FIRST:
            self._first = None

    def assume(self) -> None:
        """Answer by what is expected, level included, until the first sample."""
        believe(self._fit, (), self.expected)

    def believe(self, samples: Iterable[tuple[StepShape, float]], weight: float) -> None:
        """Prior knowledge as expected durations, level included, together worth `weight` samples."""
        self._first = None
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

    @property
    def num_samples(self) -> float:
        """Effective: faded, weighted."""
        return self._fit.num_samples

    def quality(self) -> FitQuality:
        return self._fit.quality()

    def state(self) -> FitState:
        return self._fit.state()

    def merge(self, state: FitState) -> None:
        self._first = None
        self._fit.merge(state)


class PerfModel:
    """All that is known about time in one cluster."""

    def __init__(self) -> None:
        self._steps: dict[str, StepModel] = {}
        self._peers: dict[str, Peers] = {}
        self._links: dict[str, NonNegativeFit] = {}

    # Steps

    def steps(self, hardware: str) -> StepModel:
        """The pooled model of a class; a class never seen starts empty and predicts 0."""
        model = self._steps.get(hardware)
        if model is None:
            model = self._steps[hardware] = StepModel()
        return model

    def expect(self, hardware: str, expected: StepPredictor) -> StepModel:
        """Say what is thought of a class before any of its steps were measured; it is believed until then."""
        model = self._steps[hardware] = StepModel(expected)
        model.assume()
        return model

    def peers(self, hardware: str) -> Peers:
        """How the workers of a class compare."""
        peers = self._peers.get(hardware)
        if peers is None:
            peers = self._peers[hardware] = Peers()
        return peers

    def observe_step(self, hardware: str, worker: str, timing: StepTiming) -> None:
        """Take in one step; only the worker's own standing if it is an odd one out of its class."""
        shape = StepShape.of(timing)
        model, peers = self.steps(hardware), self.peers(hardware)
        expected_ms = model.step_ms(shape)
        if expected_ms > 0 and 0 < timing.duration_ms < math.inf:
            peers.note(worker, math.log(timing.duration_ms / expected_ms))
            if peers.model_is_wrong:
                peers.start_over()
                model = self._steps[hardware] = StepModel(model.expected)
            if peers.is_odd(worker):
                return
        model.observe(shape, timing.duration_ms)

    def forget_worker(self, hardware: str, worker: str) -> None:
        if hardware in self._peers:
            self._peers[hardware].forget(worker)

    # Links

    def observe_transfer(self, link: str, transferred_bytes: int, duration_ms: float) -> None:
        self._link(link).observe((1.0, transferred_bytes), duration_ms)

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
