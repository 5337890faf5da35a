"""The router of a frontend and the limits of its dispatcher, made from the configuration."""

import math
from collections.abc import Mapping, Sequence
from typing import cast, get_args

from headwater.config.schema import DisaggConfig, FaultsConfig, RouterConfig, ServeConfig
from headwater.errors import ConfigError
from headwater.frontend.dispatcher import DispatchLimits
from headwater.frontend.moves import MoveLimits
from headwater.frontend.planning import PlanningSettings
from headwater.frontend.policies import load_policy
from headwater.frontend.vigil import VigilLimits
from headwater.planner.decide import PlannerSettings
from headwater.planner.objective import Objective
from headwater.router.affinity import SessionAffinity
from headwater.router.disagg import DisaggSettings
from headwater.router.policy import PolicySettings
from headwater.router.queue import QueueLimits
from headwater.router.router import Router
from headwater.router.ticket import PriorityClass
from headwater.router.view import ClusterView

_BYTES_PER_MS = 1e6
"""Of a GB/s."""
_LEAST_INTERVAL_MS = 200.0
_SEQUENCES_PER_REQUEST = 8
"""Sequences may be open that many times the limit of concurrent requests (n > 1, lists of prompts)."""


def build_router(config: RouterConfig, frontend_id: str) -> Router:
    """Raises `ConfigError`."""
    policy = load_policy(config.router_policy, PolicySettings(config.router_decode_share))
    affinity = SessionAffinity(config.router_session_affinity, config.router_session_ttl)
    view = ClusterView(max_index_blocks=config.router_index_blocks, frontend_id=frontend_id)
    return Router(view, policy, affinity)


def dispatch_limits(config: ServeConfig, tenant_weights: Mapping[str, float]) -> DispatchLimits:
    """Raises `ConfigError`."""
    return DispatchLimits(
        queue=queue_limits(config.router, tenant_weights),
        moves=MoveLimits(config.faults.migration_limit, config.faults.migration_timeout),
        first_token_s=config.router.router_first_token_limit,
        max_streams=config.frontend.max_concurrent_requests * _SEQUENCES_PER_REQUEST,
        disagg=_disagg_settings(config.disaggregation),
    )


def _disagg_settings(config: DisaggConfig) -> DisaggSettings:
    return DisaggSettings(config.disagg, config.disagg_threshold, config.transfer_gb_per_s * _BYTES_PER_MS)


def planning_settings(config: DisaggConfig) -> PlanningSettings:
    objective = Objective(config.plan_ttft * 1000 or math.inf, config.plan_tpot * 1000 or math.inf)
    planner = PlannerSettings(objective=objective).every(max(_LEAST_INTERVAL_MS, config.plan_interval * 1000))
    return PlanningSettings(planner, config.transfer_gb_per_s * _BYTES_PER_MS)


def vigil_limits(config: FaultsConfig) -> VigilLimits:
    return VigilLimits(
        hang_timeout_s=config.hang_timeout,
        canary_interval_s=config.canary_interval,
        hopeless_s=config.hang_restart,
    )


def queue_limits(config: RouterConfig, tenant_weights: Mapping[str, float]) -> QueueLimits:
    """Raises `ConfigError`."""
    classes = _named("--router-class-limit", config.router_class_limit)
    unknown = classes.keys() - set(get_args(PriorityClass))
    if unknown:
        raise ConfigError(
            f"--router-class-limit {min(unknown)}: there is no such class", hint="classes are low, normal and high"
        )
    return QueueLimits(
        backlog_chunks=config.router_queue_backlog,
        max_waiting=config.router_queue_limit,
        max_wait_s=config.router_queue_timeout,
        class_limits={cast(PriorityClass, name): int(limit) for name, limit in classes.items()},
        tenant_weights=tenant_weights,
    )


def _named(flag: str, given: Sequence[str]) -> dict[str, float]:
    """From `name=number`, several times."""
    values: dict[str, float] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not name or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{flag} {text}: expected a name, an equals sign and a number above 0, as in a=2")
        if name in values:
            raise ConfigError(f"{flag} {text}: {name} has {values[name]:g} already")
        values[name] = value
    return values
