"""The store's connector as a worker of ours attaches it to its vLLM, and how requests tell it their names.

They do in vLLM's `kv_transfer_params`. Clients of a vLLM of their own can send such parameters too; so they are
believed only by a connector that was attached by a worker, which passes on none of its clients'.
"""

from pathlib import Path
from typing import Any

import msgspec

from headwater.kv.connectors.naming import Naming

CONNECTOR = "HeadwaterConnector"
MODULE = "headwater.kv.connectors.vllm"

_BY_WORKER = "named_by_worker"
_NAMING = "headwater_naming"


def request_params(naming: Naming, others: dict[str, Any] | None = None) -> dict[str, Any]:
    """`others`: what else connectors are told of it, as by a ticket, which names no blocks."""
    return {**(others or {}), _NAMING: msgspec.to_builtins(naming)}


def naming_in(params: dict[str, Any] | None) -> Naming | None:
    """None also for one that makes no sense: the request is computed, and vLLM goes on."""
    try:
        return msgspec.convert(params[_NAMING], Naming) if params and _NAMING in params else None
    except msgspec.ValidationError:
        return None


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
