"""The store that a graph runs for its node, from its configuration."""

from pathlib import Path

from headwater.config.schema import KvConfig
from headwater.kv.node.open import NodeOptions, parse_disk
from headwater.kv.node.peering import PeeringOptions, parse_address, read_key
from headwater.kv.stores.disk import DiskOptions
from headwater.kv.stores.ledgered import TierOptions

_LEAST_HOST_BYTES = 1 << 30
"""What comes from lower tiers passes through the host tier."""


def node_options(config: KvConfig) -> NodeOptions:
    """Raises `ConfigError`."""
    disk = None
    if config.kv_disk is not None:
        folder, size = parse_disk(config.kv_disk)
        disk = DiskOptions(folder, TierOptions(size, config.kv_policy))
    return NodeOptions(
        host=TierOptions(config.kv_host or _LEAST_HOST_BYTES, config.kv_policy),
        disk=disk,
        peering=PeeringOptions(
            parse_address(config.kv_listen) if config.kv_listen else None,
            tuple(map(parse_address, config.kv_peer)),
            read_key(Path(config.kv_peer_key).expanduser()) if config.kv_peer_key else b"",
        ),
        object_url=config.kv_object or "",
        object_setting="--kv-object",
        admission=config.kv_admission,
    )
