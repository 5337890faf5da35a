"""What the planner tries out in its fast simulation (`headwater.planner.whatif`), in the full one: pools and jobs.

A pool is of one class of workers. Requests share no prefixes, and the router knows the step times.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from headwater.bench.traces import TraceRow
from headwater.planner.plan import RolePlan
from headwater.planner.pool import WorkerModel
from headwater.planner.whatif import Job
from headwater.router.delay import Delay
from headwater.router.disagg import DisaggSettings
from headwater.sim.cluster import SimCluster, SimConfig
from headwater.sim.conditions import Conditions
from headwater.sim.handoffs import KvLink, PoolConfig
from headwater.sim.pools import make_cluster
from headwater.sim.timing import Belief, PredictedTimes
from headwater.sim.workload import SimRequest, from_trace

BLOCK_TOKENS = 16


def planned_cluster(pool: Sequence[WorkerModel], plan: RolePlan) -> SimCluster:
    """`plan`: those that prefill come first."""
    model = pool[0]
    config = SimConfig(
        len(pool),
        block_size=BLOCK_TOKENS,
        num_blocks=max(1, model.kv_tokens // BLOCK_TOKENS),
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=max(model.chunk_tokens, model.max_num_seqs + BLOCK_TOKENS),
        conditions=Conditions(belief=Belief()),
    )
    if not plan.aggregated:
        config = replace(config, pools=_pools(model, plan))
    return make_cluster(config, [PredictedTimes(model.curve)] * len(pool), Delay())


def requests_of(jobs: Iterable[Job]) -> Iterator[SimRequest]:
    rows = (TraceRow(job.at_ms / 1000, job.prompt_tokens, job.output_tokens) for job in jobs)
    return from_trace(rows, BLOCK_TOKENS)


def _pools(model: WorkerModel, plan: RolePlan) -> PoolConfig:
    num_prefill = plan.roles.count("prefill")
    return PoolConfig(
        num_prefill,
        len(plan.roles) - num_prefill,
        int(model.kv_bytes_per_token),
        DisaggSettings(link_bytes_per_ms=model.link_bytes_per_ms),
        KvLink(1000 * model.link_bytes_per_ms),
        plan.loose,
    )
