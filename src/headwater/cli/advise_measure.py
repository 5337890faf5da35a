"""`headwater advise --measure`: a short load on the cluster that runs here, once per plan of roles.

Needs adaptive workers (`--role adaptive`): roles are set, the load is put on, and at the end the planner chooses again.
"""

import argparse
import asyncio
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from headwater.bench.arrivals import ClosedLoop, Poisson
from headwater.bench.command import first_model
from headwater.bench.http_client import Target
from headwater.bench.load import LoadRun, RequestRecord, RequestShape
from headwater.bench.report import tpot_s
from headwater.bench.workload import SyntheticWorkload
from headwater.cli.http import Server, error_message
from headwater.errors import ConfigError, HeadwaterError, Unavailable
from headwater.planner.objective import Objective
from headwater.planner.plan import RolePlan, candidates

_CHANGE_TIMEOUT_S = 15.0
_POLL_S = 0.1
_SETTLING_PART = 0.3
"""Of a load, that only fills the cluster."""
_ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Measured:
    """One plan under the load."""

    name: str
    num_requests: int
    failed: int
    attained: float
    goodput_per_s: float
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float


def measure(args: argparse.Namespace, server: Server, objective: Objective) -> Iterator[Measured]:
    """Every plan in turn, then the planner's own choice. Roles are put back whatever happens."""
    workers = _adaptive_workers(server)
    plans = list(candidates([""] * len(workers)))
    try:
        for plan in plans:
            _set_roles(server, dict(zip(workers, plan.roles, strict=True)))
            yield _measure(args, server, objective, _name(plan))
        _set_roles(server, None)
        yield _measure(args, server, objective, _ADAPTIVE)
    finally:
        _set_roles(server, None)


def _name(plan: RolePlan) -> str:
    prefill = plan.roles.count("prefill")
    return f"{len(plan.roles)} both" if plan.aggregated else f"{prefill} prefill + {len(plan.roles) - prefill} decode"


def _adaptive_workers(server: Server) -> list[str]:
    found = [worker for worker in server.get_json("/debug/cluster")["workers"] if worker.get("adaptive")]
    models = {worker["model"] for worker in found}
    if len(found) < 2 or len(models) > 1:
        raise ConfigError(
            f"{len(found)} adaptive workers of {len(models)} models are here: --measure needs two or more of one model",
            hint="headwater serve MODEL --workers 4 --role adaptive",
        )
    return sorted(worker["worker_id"] for worker in found)


def _set_roles(server: Server, roles: dict[str, Any] | None) -> None:
    status, answer = server.ask("POST", "/admin/plan", {"roles": roles})
    if status != 202:
        raise HeadwaterError(f"roles could not be set: {error_message(answer)}")
    deadline = time.monotonic() + _CHANGE_TIMEOUT_S
    while roles is not None and time.monotonic() < deadline:
        now = {worker["worker_id"]: worker["role"] for worker in server.get_json("/debug/cluster")["workers"]}
        if all(now.get(worker_id) == role for worker_id, role in roles.items()):
            return
        time.sleep(_POLL_S)
    if roles is not None:
        raise Unavailable("workers did not take the roles they were given in time")


def _measure(args: argparse.Namespace, server: Server, objective: Objective, name: str) -> Measured:
    print(f"measuring {name} for {args.seconds:g} s", file=sys.stderr, flush=True)
    records, seconds = asyncio.run(_load(args, server, seed=zlib.crc32(name.encode())))
    judged = [record for record in records if record.started_s >= _SETTLING_PART * seconds]
    good = [record for record in judged if record.error is None and record.ttft_s is not None]
    if not good:
        reason = next((record.error for record in records if record.error), "nothing was answered in time")
        raise HeadwaterError(f"no request succeeded with {name}: {reason}")
    met = sum([objective.met(_ms(record.ttft_s), _ms(tpot_s(record))) for record in good])
    return Measured(
        name,
        len(judged),
        len(judged) - len(good),
        met / len(judged),
        met / ((1 - _SETTLING_PART) * seconds),
        fmean([_ms(record.ttft_s) for record in good]),
        fmean([_ms(tpot_s(record)) for record in good]),
        fmean([_ms(record.e2e_s) for record in good]),
    )


async def _load(args: argparse.Namespace, server: Server, seed: int) -> tuple[list[RequestRecord], float]:
    """Prompts of its own for each plan: the caches are to help none."""
    target = Target.parse(server.url, server.api_key)
    load = LoadRun(target, RequestShape(await first_model(target)), timeout_s=max(60.0, 4 * args.seconds))
    rate = args.rate or 1.0
    closed = args.concurrency[0] if args.concurrency else None
    num = int(rate * args.seconds) if closed is None else 4 * closed
    requests = SyntheticWorkload(max(4, num), args.isl, args.osl, seed=seed).requests(1.0)
    began = time.monotonic()
    try:
        records = await load.run(requests, Poisson(rate, 0) if closed is None else ClosedLoop(closed))
    finally:
        load.close()
    return records, args.seconds if closed is None else time.monotonic() - began


def _ms(seconds: float | None) -> float:
    return 0.0 if seconds is None else 1e3 * seconds
