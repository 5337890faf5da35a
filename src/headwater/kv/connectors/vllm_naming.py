"""How a worker of ours has the store's connector in its vLLM name blocks: as its cluster does, so that routers know
what the store has, and by the tenant that a request speaks for.

A request carries that in vLLM's `kv_transfer_params`. Clients of a vLLM of their own can send such parameters too; so
they are believed only by a connector that was attached by a worker, which passes on none of its clients'.
"""

from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec

from headwater.kv.block import Family, Label

CONNECTOR = "HeadwaterConnector"
MODULE = "headwater.kv.connectors.vllm"

_BY_WORKER = "named_by_worker"
_NAMING = "headwater_naming"


class Naming(msgspec.Struct, frozen=True):
    """Of one request."""

    namespace: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Key under which its blocks are hashed."""
    model: Label
    tenant: Label

    def request_params(self, others: dict[str, Any] | None = None) -> dict[str, Any]:
        """`others`: what else connectors are told of it, as by a ticket, which names no blocks."""
        return {**(others or {}), _NAMING: msgspec.to_builtins(self)}

    @classmethod
    def of(cls, params: dict[str, Any] | None) -> Self | None:
        """None also for one that makes no sense: the request is computed, and vLLM goes on."""
        try:
            return msgspec.convert(params[_NAMING], cls) if params and _NAMING in params else None
        except msgspec.ValidationError:
            return None

    def key(self, era: str) -> bytes:
        """`era` tells the time before a reset of the cache from that after: then nobody but this engine knows."""
        key = bytes.fromhex(self.namespace)
        return blake2b(era.encode(), key=key, digest_size=len(key)).digest() if era else key

    def family(self, family: Family) -> Family:
        """That of an engine's blocks, for this request."""
        return msgspec.structs.replace(family, model=self.model, tenant=self.tenant)


def store_connector(socket: Path) -> dict[str, Any]:
    """What vLLM is to be told, as its `KVTransferConfig` takes it."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": str(socket), _BY_WORKER: True},
        "kv_load_failure_policy": "recompute",
    }


def named_by_worker(extra: dict[str, Any]) -> bool:
    """By the `kv_connector_extra_config` of a connector."""
    return extra.get(_BY_WORKER) is True
