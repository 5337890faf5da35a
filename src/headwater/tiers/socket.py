"""Where the workers of a graph find their node's store.

Apart from `headwater.tiers.node`, which opens one: every worker asks this as it starts, and imports no store for it.
"""

from pathlib import Path

from headwater.config.schema import EngineConfig, KvConfig
from headwater.errors import ConfigError
from headwater.kv.node.address import default_socket


def store_socket(config: KvConfig) -> Path | None:
    """Where this node's store listens; None when there is none."""
    if config.kv_socket is not None:
        return Path(config.kv_socket).expanduser()
    return default_socket() if config.own_store else None


def check_used(config: KvConfig, engine: EngineConfig) -> None:
    """Raises `ConfigError` for a store that no worker of this graph could use."""
    if not engine.attach or store_socket(config) is None:
        return
    given = [name for name in KvConfig.__struct_fields__ if getattr(config, name) != getattr(KvConfig(), name)]
    flags = ", ".join("--" + name.replace("_", "-") for name in given)
    raise ConfigError(
        f"{flags} does not go with --attach: what a server that runs already keeps its KV blocks in is its own affair",
        hint="start the server with the store's connector and run `headwater kv serve` beside it, or run its engine in "
        "the worker (--engine)",
    )
