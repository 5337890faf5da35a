"""The simulated cluster with pools: workers that prefill and workers that decode, as `headwater serve` runs them.

It is the cluster of `headwater.sim.cluster` in all but where prompts are computed. The router chooses the decode worker
as ever; the frontend's own code (`headwater.frontend.prefills`) then compares computing there with every prefill worker
and books both; hand-offs go by the production rules on virtual links (`headwater.sim.handoffs`). A decode worker has no
leaps over steps while a prompt is on its way to it, so that pools take more time to simulate.
"""

from collections.abc import Callable, Sequence

from headwater.errors import ConfigError
from headwater.frontend.prefills import Prefills
from headwater.handoff.wait import Line, OwnWork
from headwater.protocol.cluster import Instance
from headwater.protocol.events import LoadReport, WorkerEvent
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.router.policy import Policy
from headwater.router.ticket import Placed
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.outside import BlocksExported, Export, ExportWaits, FirstToken, KvNews, LoadEnded, LoadStarted
from headwater.sim.cluster import News, SimCluster, SimConfig, SimTicket
from headwater.sim.describe import instance
from headwater.sim.handoffs import Handoffs, HandoffTotals, PoolConfig, Side, longest_s
from headwater.sim.tiers import SimStore
from headwater.sim.timing import StepTimes
from headwater.sim.worker import SimWorker
from headwater.types import Role


class PooledWorker(SimWorker):
    """A worker that may have prompts computed elsewhere, or compute them for others."""

    def __init__(
        self, number: int, limits: SchedulerLimits, times: StepTimes, store: SimStore | None, handoffs: Handoffs
    ) -> None:
        super().__init__(f"w{number:04}", limits, times, store)
        self.number = number
        self.inbound_free_at = self.outbound_free_at = 0.0
        self.line = Line()
        self.own_work = OwnWork()
        self._handoffs = handoffs
        self._exchanges = True
        self._exported: set[int] = set()

    def submit(
        self,
        request: EngineRequest,
        answer_ids: bytes,
        now: float,
        *,
        load_s: float | None = None,
        export: Export | None = None,
    ) -> None:
        if request.prefill is not None:
            load_s = longest_s(request, request.prefill)
        super().submit(request, answer_ids, now, load_s=load_s, export=export)

    # -- done by hand-offs

    def export(self, request: EngineRequest, export: Export, now: float) -> None:
        self._exported.add(request.stream)
        self.submit(request, b"", now, export=export)

    def tell_waiting(self, now: float) -> None:
        self._scheduler.exchange.tell_waiting(now)
        self._follow(now)

    def release(self, stream: int) -> None:
        self._exported.discard(stream)
        self._scheduler.release(stream)

    def arrived(self, stream: int, num_blocks: int) -> None:
        self._scheduler.exchange.arrived(stream, num_blocks)

    def prefilled(self, stream: int, first: FirstToken) -> None:
        self._scheduler.prefilled(stream, first)

    def loaded(self, stream: int, num_blocks: int) -> None:
        self._scheduler.exchange.loaded(stream, num_blocks, cached=False)

    def stopped(self, stream: int) -> None:
        self._scheduler.exchange.stopped(stream)

    # -- told to others

    def finish(self, now: float) -> tuple[list[SequenceOutput], list[WorkerEvent]]:
        outputs, events = super().finish(now)
        return self._own(outputs, now), events

    def report(self) -> LoadReport:
        report = super().report()
        self.line.observe(report)
        return report

    def take_early(self, now: float) -> tuple[list[SequenceOutput], list[WorkerEvent]]:
        """What there is to tell before the step under way has ended."""
        self._forget_ended()
        return self._own(self._scheduler.take_outputs(), now), [*self._scheduler.drain_events()]

    def check(self) -> None:
        """Raise `InternalError` when blocks are lost."""
        self._scheduler.check()
        self._scheduler.check_idle()

    def _own(self, outputs: list[SequenceOutput], now: float) -> list[SequenceOutput]:
        """Without those of sequences that others asked for, which go to these."""
        if not outputs or not self._exported:
            return outputs
        for output in outputs:
            if output.stream in self._exported and output.finish_reason is not None:
                self._handoffs.on_output(output, now)
        return [output for output in outputs if output.stream not in self._exported]

    def _heed(self, news: KvNews, now: float) -> bool:
        match news:
            case BlocksExported(stream=stream, first_block=first_block, blocks=blocks):
                self._handoffs.on_exported(stream, first_block, len(blocks), now)
            case LoadStarted(stream=stream) if stream not in self._chains:
                if not self._handoffs.on_load(news, now):
                    self._scheduler.exchange.loaded(stream, news.first_block)
                    return True
            case LoadEnded(stream=stream) if stream not in self._chains:
                if not self._handoffs.on_load_ended(stream, now):
                    self._scheduler.exchange.stopped(stream)
            case ExportWaits():
                self._handoffs.on_waits(news, self.line, now)
            case _:
                return super()._heed(news, now)
        return False


class PooledCluster(SimCluster):
    """One run of a configuration with pools."""

    def __init__(self, config: SimConfig, times: Sequence[StepTimes], policy: Policy) -> None:
        """Raises `ConfigError` when the pools are not all workers."""
        if config.pools is None or config.pools.num_prefill + config.pools.num_decode != config.num_workers:
            raise ConfigError(f"{config.num_workers} workers in pools of {config.pools}")
        self._pools: PoolConfig = config.pools
        card = instance("", config.limits(), "both", self._pools.kv_bytes_per_token).card
        self._handoffs = Handoffs(self._pools, card, self)
        self._pooled: list[PooledWorker] = []
        super().__init__(config, times, policy)
        self._prefills = Prefills(self._view, self._pools.settings, lambda _: self._pools.loose)

    def check(self) -> None:
        """Once all requests have ended: raise `InternalError` when blocks are lost."""
        for worker in self._pooled:
            worker.check()

    # -- done by hand-offs

    def change(self, worker: Side, what: Callable[[], None], now: float) -> None:
        assert isinstance(worker, PooledWorker)
        before = worker.ends_at
        what()
        self._resume(worker.number, before, now)
        self._tell_early(worker, now)

    def handed_over(self, stream: int) -> None:
        is_open = self._open[stream]
        assert is_open.prefill_booking is not None
        is_open.record.prefiller = int(is_open.prefill_booking.worker.worker_id[1:])

    # -- what is another way than without pools

    def _make_worker(self, number: int, times: StepTimes, store: SimStore | None) -> SimWorker:
        worker = PooledWorker(number, self._config.limits(), times, store, self._handoffs)
        self._pooled.append(worker)
        return worker

    def _instance(self, number: int) -> Instance:
        role: Role = "prefill" if number < self._pools.num_prefill else "decode"
        return instance(self._pooled[number].worker_id, self._config.limits(), role, self._pools.kv_bytes_per_token)

    def _handoff_totals(self) -> HandoffTotals:
        return self._handoffs.totals

    def _place(self, ticket: SimTicket, placed: Placed, now: float) -> None:
        asked, sequence = ticket.request, ticket.sequence
        choice = self._prefills.choose(asked, placed.worker)
        self._prefills.name(choice, [sequence])
        is_open, where = self._open[sequence.stream], sequence.prefill
        if where is not None:
            decoder = self._pooled[int(placed.worker.worker_id[1:])]
            self._handoffs.begin(sequence, where, decoder, self._pooled[int(where.worker_id[1:])])
        is_open.prefill_booking = self._prefills.book(choice, asked)
        super()._place(ticket, placed, now)
        if choice is not None and choice.remote:
            record = is_open.record
            record.predicted_cached_tokens = max(record.predicted_cached_tokens, choice.chosen.cached_tokens)

    def _begin(self, number: int, now: float) -> None:
        super()._begin(number, now)
        self._tell_early(self._pooled[number], now)

    def _tell_early(self, worker: PooledWorker, now: float) -> None:
        outputs, events = worker.take_early(now)
        for output in outputs:
            self._note(output, now)
        if outputs or events:
            self._tell(News(worker.worker_id, events, outputs), now)


def make_cluster(config: SimConfig, times: Sequence[StepTimes], policy: Policy) -> SimCluster:
    """With pools or without."""
    return SimCluster(config, times, policy) if config.pools is None else PooledCluster(config, times, policy)
