"""Who does not move on? Held against what the time model expects, not against a fixed time.

A worker moves on when it sends a step, or when its engine's own loop makes a report. One that has work of ours and
did neither for `PATIENCE` times its longest step, expected or seen of late, and for no less than the floor, hangs.
While nothing is known of its steps it is given longer, and so is one of which nothing is heard while it computes a
prompt, or a whole answer. When many hang at once it is more likely that everything is slow: beyond half of those that
serve a model a worker is given much longer, and the last one longest, for nobody is to wait without a bound. An
idle worker that has not computed for a while is due for a canary. Time in which a worker could have run and got no
processor, as it says itself (`LoadReport.starved_ms`), is no silence, up to a limit. Pure: time comes in; a stall of
our own (`forgive`) is nobody's fault.
"""

from dataclasses import dataclass

from headwater.protocol.events import LoadReport
from headwater.router.view import ClusterView
from headwater.router.worker import WorkerView

PATIENCE = 5.0
"""Times the longest step that is expected."""
_FADING = 0.95
_MUCH_PATIENCE = 5.0
"""Times the longest silence that is in order: while half of the workers are out of service, and for one that says that
it gets no processor."""
_Progress = tuple[int, int, int]
"""Steps, turns and tokens: one that hangs counts none of them."""


@dataclass(frozen=True, slots=True)
class VigilLimits:
    hang_timeout_s: float = 2.0
    """Least silence that counts as a hang, the look included; 0: never."""
    unknown_timeout_s: float = 30.0
    """While no step time is known, and while nothing is heard by nature: others may be served there first."""
    whole_answer_s: float = 600.0
    """While an answer is computed of which nothing is heard before its end."""
    last_timeout_s: float = 60.0
    """Least silence of the last worker of a model."""
    canary_interval_s: float = 30.0
    """Idle for so long: time for a canary; 0: never."""
    look_s: float = 0.1
    """Time between two looks."""
    hopeless_s: float = 0.0
    """Out of service and without a sign of life for so long: it is not expected back; 0: it always is."""


@dataclass(slots=True)
class _Watched:
    moved_on: float
    """When it last did, or began to have work of ours."""
    computed: float
    """When it last took a step."""
    starved_s: float = 0.0
    """Of the time since then: without a processor."""
    slowest_ms: float = 0.0
    """Of the steps it took of late; fades with every report."""
    progress: _Progress | None = None
    busy: bool = False
    asked: bool = False
    """A canary is under way."""

    def move_on(self, now: float) -> None:
        self.moved_on, self.starved_s = now, 0.0


@dataclass(slots=True)
class _Out:
    """One that is out of service."""

    silent_since: float
    progress: _Progress | None
    starved_s: float = 0.0
    """Of the time since then: without a processor."""

    def move_on(self, now: float) -> None:
        self.silent_since, self.starved_s = now, 0.0


class Vigil:
    """Those that are in service, and those that should be."""

    def __init__(self, view: ClusterView, limits: VigilLimits) -> None:
        self.limits = limits
        self._view = view
        self._watched: dict[str, _Watched] = {}
        self._out: dict[str, _Out] = {}

    def add(self, worker_id: str, now: float) -> None:
        self._watched[worker_id] = _Watched(now, now)
        self._out.pop(worker_id, None)

    def put_out(self, worker_id: str, now: float) -> None:
        """It gets nothing until it answers."""
        watched = self._watched.pop(worker_id, None)
        self._out.setdefault(worker_id, _Out(now, watched.progress if watched is not None else None))

    def remove(self, worker_id: str) -> None:
        self._watched.pop(worker_id, None)
        self._out.pop(worker_id, None)

    def stepped(self, worker_id: str, now: float) -> None:
        watched, out = self._watched.get(worker_id), self._out.get(worker_id)
        if out is not None:
            out.move_on(now)
        if watched is not None:
            watched.move_on(now)
            watched.computed = now

    def asked(self, worker_id: str, now: float) -> None:
        """It was sent a canary: from now on it has work of ours."""
        watched = self._watched.get(worker_id)
        if watched is not None:
            watched.asked = watched.busy = True
            watched.move_on(now)

    def answered(self, worker_id: str) -> None:
        """The canary is back, or not waited for any more."""
        watched = self._watched.get(worker_id)
        if watched is not None:
            watched.asked = False

    def reported(self, worker_id: str, load: LoadReport, now: float) -> None:
        """A report; one that only repeats an earlier one proves nothing."""
        watched, out = self._watched.get(worker_id), self._out.get(worker_id)
        progress = (load.steps, load.turns, load.generated_tokens)
        if out is not None:
            if progress != out.progress:
                out.move_on(now)
            out.progress, out.starved_s = progress, max(out.starved_s, load.starved_ms / 1e3)
        if watched is None:
            return
        if watched.progress is None or load.steps != watched.progress[0]:
            watched.computed = now
        if progress != watched.progress:
            watched.move_on(now)
        watched.starved_s = max(watched.starved_s, load.starved_ms / 1e3)
        watched.progress = progress
        slowest_ms = max([timing.duration_ms for timing in load.timings], default=0.0)
        watched.slowest_ms = max(slowest_ms, _FADING * watched.slowest_ms)

    def forgive(self, seconds: float, now: float) -> None:
        """We did not look for so much longer than meant. Whoever was heard of in the meantime needs no forgiveness."""
        for watched in self._watched.values():
            watched.moved_on = min(now, watched.moved_on + seconds)
            watched.computed = min(now, watched.computed + seconds)
        for out in self._out.values():
            out.silent_since = min(now, out.silent_since + seconds)

    def suspects(self, now: float) -> list[tuple[str, float]]:
        """Workers at work, or out of service, that have been silent for half of what is in order at least, and since
        when."""
        least_s, hopeless_s = self.limits.hang_timeout_s / 2, self.limits.hopeless_s / 2
        working = [
            (worker_id, watched.moved_on)
            for worker_id, watched in self._watched.items()
            if watched.busy and least_s and now - watched.moved_on > least_s
        ]
        return working + [
            (worker_id, out.silent_since)
            for worker_id, out in self._out.items()
            if hopeless_s and now - out.silent_since > hopeless_s
        ]

    def excuse(self, worker_id: str, starved_s: float) -> None:
        """So much of its present silence it got no processor."""
        silent = self._watched.get(worker_id) or self._out.get(worker_id)
        if silent is not None:
            silent.starved_s = max(silent.starved_s, starved_s)

    def hanging(self, now: float) -> list[tuple[str, float]]:
        """Workers that hang, and for how long they have been silent."""
        if not self.limits.hang_timeout_s:
            return []
        found: list[tuple[str, float]] = []
        for worker_id, watched in self._watched.items():
            worker = self._view.worker(worker_id)
            busy = worker is not None and (watched.asked or worker.booked_sequences > 0)
            if busy and not watched.busy:
                watched.move_on(now)
            watched.busy = busy
            silent_s = now - watched.moved_on
            if worker is None or not busy or silent_s <= self.limits.hang_timeout_s - self.limits.look_s:
                continue
            bound_s = self.bound_s(worker)
            silent_s -= min(watched.starved_s, (_MUCH_PATIENCE - 1.0) * bound_s)
            if silent_s > bound_s - self.limits.look_s:
                found.append((worker_id, silent_s))
        return found

    def may_be_put_aside(self, worker_id: str, silent_s: float) -> bool:
        """Whether enough others would be left to serve its model, or it is not worth waiting for any longer."""
        worker = self._view.worker(worker_id)
        if worker is None:
            return False
        fingerprint = worker.instance.card.fingerprint
        peers = [other for other in self._view.workers if other.instance.card.fingerprint == fingerprint]
        others = sum(other.eligible for other in peers) - worker.eligible
        patience = 1.0 if others and others >= len(peers) // 2 else _MUCH_PATIENCE
        least_s = 0.0 if others else self.limits.last_timeout_s
        return silent_s > max(least_s, patience * self.bound_s(worker)) - self.limits.look_s

    def hopeless(self, now: float) -> list[tuple[str, float]]:
        """Workers that are not expected back, and for how long nothing was heard; named again after as long."""
        found: list[tuple[str, float]] = []
        for worker_id, out in self._out.items():
            silent_s, hopeless_s = now - out.silent_since, self.limits.hopeless_s
            if 0 < hopeless_s < silent_s - min(out.starved_s, (_MUCH_PATIENCE - 1.0) * hopeless_s):
                out.move_on(now)
                found.append((worker_id, silent_s))
        return found

    def due_for_canary(self, now: float) -> list[str]:
        """Idle for long: they are due again after another interval."""
        if not self.limits.canary_interval_s:
            return []
        due: list[str] = []
        for worker_id, watched in self._watched.items():
            if not watched.busy and now - watched.computed >= self.limits.canary_interval_s:
                watched.computed = now
                due.append(worker_id)
        return due

    def longest_answer_s(self, worker: WorkerView) -> float:
        """Until a canary is answered, by one that gives signs of life."""
        quiet = worker.load is not None and worker.load.quiet_prefill
        return _MUCH_PATIENCE * max(self.bound_s(worker), self.limits.unknown_timeout_s if quiet else 0.0)

    def bound_s(self, worker: WorkerView) -> float:
        """The longest silence that is in order."""
        limits, load, quiet = self.limits, worker.load, quiet_tokens(worker)
        least_s = limits.hang_timeout_s
        if load is not None and load.num_whole:
            least_s = max(least_s, limits.whole_answer_s)
        if worker.costs is None:
            return max(least_s, limits.unknown_timeout_s * max(1, -(-quiet // worker.chunk_tokens)))
        if quiet or (load is not None and load.relays):
            least_s = max(least_s, limits.unknown_timeout_s)
        watched = self._watched.get(worker.worker_id)
        seen_ms = watched.slowest_ms if watched is not None else 0.0
        return max(least_s, PATIENCE * max(longest_silence_ms(worker), seen_ms) / 1e3)


def quiet_tokens(worker: WorkerView) -> int:
    """Of prompts that it computes without a sign of life."""
    load = worker.load
    if load is None or not load.quiet_prefill:
        return 0
    return max(worker.booked_prefill_tokens, load.waiting_prefill_tokens)


def longest_silence_ms(worker: WorkerView) -> float:
    """A step with all its sequences and a full chunk of its prompts, the end of the longest context; all of the prompts
    where nothing is heard before they are done."""
    occupied = worker.occupied or worker.occupy()
    costs = occupied.costs
    tokens = quiet_tokens(worker) or min(occupied.booked_prefill_tokens, costs.chunk_tokens)
    pairs = min(occupied.booked_prefill_pairs, float(tokens * max(1, worker.instance.card.max_model_len)))
    steps = max(1, -(-tokens // costs.chunk_tokens))
    return worker.speed_factor * (steps * occupied.step_ms + costs.prefill_ms(tokens, pairs))
