"""What it costs that several frontends route without one mind: simulated, with and without telling each other.

    python bench/router_frontends.py TRACE[:ROWS] [--speed X | --closed N] [--workers 8] [--frontends 1 2 4]

Each frontend has a view, an index and a router of its own, gets every event, and takes a share of the requests at
random. `blind`: each knows its own bookings only. `told`: workers report by frontend what they were given, at most
every 20 ms (`headwater.worker.shares`, `headwater.router.foreign`), which is what production does.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean

import msgspec

from headwater.bench.report import percentile
from headwater.protocol.events import LoadReport, WorkerEvent
from headwater.router.delay import Delay
from headwater.router.queue import AdmissionQueue
from headwater.router.router import Router
from headwater.router.ticket import Ticket
from headwater.router.view import ClusterView
from headwater.sim.cluster import NO_QUEUE, SimCluster, SimConfig
from headwater.sim.records import SimResult
from headwater.sim.run import Load
from headwater.sim.timing import DynamoPolynomial
from headwater.worker.load import SHARED_INTERVAL_S
from headwater.worker.shares import FrontendShares


class Frontends(SimCluster):
    """The simulated cluster with several routers; `_view` and `_queue` are those of whoever acts."""

    def __init__(self, config: SimConfig, num_frontends: int, told: bool) -> None:
        times = [DynamoPolynomial()] * config.num_workers
        super().__init__(config, times, Delay())
        self._told = told
        self._random = Random(1)
        self._fronts: list[tuple[ClusterView, AdmissionQueue]] = []
        for number in range(num_frontends):
            self._view = ClusterView(frontend_id=str(number))
            self._queue = AdmissionQueue(Router(self._view, Delay()), NO_QUEUE)
            self._introduce(times[0])
            self._fronts.append((self._view, self._queue))
        self._owner: dict[int, int] = {}
        self._shares = [FrontendShares() for _ in times]
        self._reported = [-1.0] * len(times)

    def _act_as(self, number: int) -> None:
        self._view, self._queue = self._fronts[number]

    def _arrive(self, now: float) -> None:
        self._owner[len(self._records)] = number = self._random.randrange(len(self._fronts))
        self._act_as(number)
        super()._arrive(now)

    def _place(self, ticket: Ticket, placed, now: float) -> None:  # type: ignore[no-untyped-def]
        worker, request = int(placed.worker.worker_id[1:]), ticket.sequence  # type: ignore[attr-defined]
        request.expected_cached_tokens = placed.decision.cached_tokens
        self._shares[worker].opened(b"%d" % self._owner[request.stream], request.stream, request)
        super()._place(ticket, placed, now)
        self._report(worker, now)

    def _learn(self, news, now: float) -> None:  # type: ignore[no-untyped-def]
        worker = int(news.worker_id[1:])
        self._shares[worker].stepped(news.outputs)
        events, news.events = news.events, []
        for output in news.outputs:
            self._act_as(self._owner[output.stream])
            super()._learn(type(news)(news.worker_id, [], [output]), now)
        if self._told:  # reports without shares would say that nobody else has anything there
            events = [event for event in events if not isinstance(event, LoadReport)]
        self._tell_all(news.worker_id, events)
        self._report(worker, now)

    def _report(self, worker: int, now: float) -> None:
        if self._told and now - self._reported[worker] >= SHARED_INTERVAL_S:
            self._reported[worker] = now
            report = self._workers[worker].report()
            assert isinstance(report, LoadReport)
            loads = self._shares[worker].loads(lambda peer: peer.decode())
            report = msgspec.structs.replace(report, frontends=loads)
            self._tell_all(self._workers[worker].worker_id, [report])

    def _tell_all(self, worker_id: str, events: Sequence[WorkerEvent]) -> None:
        for view, _ in self._fronts:
            view.apply(worker_id, events)


def show(name: str, num_frontends: int, result: SimResult) -> None:
    ttft = sorted((record.first_token_s - record.arrived_s) * 1e3 for record in result.records)
    e2e = [(record.finished_s - record.arrived_s) * 1e3 for record in result.records]
    hit = sum(record.cached_tokens for record in result.records)
    prompt = sum(record.prompt_tokens for record in result.records)
    output = sum(record.output_tokens for record in result.records)
    print(
        f"{num_frontends} frontends {name:6} hit {hit / prompt:6.1%}  TTFT {fmean(ttft):6.0f} ms, "
        f"p99 {percentile(ttft, 99):6.0f} ms  E2E {fmean(e2e):6.0f} ms  {output / result.duration_s:6.0f} tok/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--closed", type=int)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--frontends", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    path, _, rows = args.trace.partition(":")
    requests = Load(Path(path), 64, int(rows) if rows else None).requests()
    config = SimConfig(args.workers, arrival_speed=args.speed, in_flight_per_worker=args.closed)
    for number in args.frontends:
        for told in (False, True) if number > 1 else (False,):
            name = "told" if told else "blind" if number > 1 else ""
            show(name, number, Frontends(config, number, told).run(requests))


if __name__ == "__main__":
    main()
