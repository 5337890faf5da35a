"""The router of a frontend, made from the configuration."""

import math
from collections.abc import Mapping, Sequence
from typing import cast, get_args

from headwater.config.schema import RouterConfig
from headwater.errors import ConfigError
from headwater.frontend.policies import load_policy
from headwater.router.affinity import SessionAffinity
from headwater.router.policy import PolicySettings
from headwater.router.queue import PriorityClass, QueueLimits
from headwater.router.router import Router
from headwater.router.view import ClusterView


def build_router(config: RouterConfig, frontend_id: str) -> Router:
    """Raises `ConfigError`."""
    policy = load_policy(config.router_policy, PolicySettings(config.router_decode_share))
    affinity = SessionAffinity(config.router_session_affinity, config.router_session_ttl)
    view = ClusterView(max_index_blocks=config.router_index_blocks, frontend_id=frontend_id)
    return Router(view, policy, affinity)


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
        values[name] = value
    return values
