"""Where the workers of a graph find their node's store.

Apart from `headwater.tiers.node`, which opens one: every worker asks this as it starts, and imports no store for it.
"""

from pathlib import Path

from headwater.config.schema import KvConfig
from headwater.kv.node.address import default_socket


def store_socket(config: KvConfig) -> Path | None:
    """Where this node's store listens; None when there is none."""
    if config.kv_socket is not None:
        return Path(config.kv_socket).expanduser()
    return default_socket() if config.own_store else None
