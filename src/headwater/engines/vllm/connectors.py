"""Which KV connectors vLLM gets: the operator's own, and before it ours for hand-offs and for the KV store of the host.

Several are one `MultiConnector`: what the first has nothing to load for is asked of the next.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

from headwater.kv.connectors.vllm_naming import MODULE, store_connector

_MULTI = "MultiConnector"


@dataclass(frozen=True, slots=True)
class Connectors:
    """`config`: as vLLM takes it; None without any."""

    config: KVTransferConfig | None
    store: bool
    """Whether the store is among them by our doing, so that its blocks are named as requests name them."""
    move: bool
    """Whether the operator has attached something that other engines fetch KV from: anything but the store."""


NO_CONNECTORS = Connectors(None, store=False, move=False)


def connectors(given: KVTransferConfig | None, handoff: dict[str, Any] | None, store: Path | None) -> Connectors:
    """`given`: by the operator. `store`: where that of this host listens."""
    own = _parts(given)
    modules = [one.get("kv_connector_module_path") for one in own]
    attached = store is not None and MODULE not in modules
    ours = [] if handoff is None else [handoff]
    if store is not None and attached:
        ours.append(store_connector(store))
    return Connectors(
        _together([*ours, *own]) if ours else given,
        store=attached,
        move=any(module != MODULE for module in modules),
    )


def _parts(given: KVTransferConfig | None) -> list[dict[str, Any]]:
    if given is None:
        return []
    if given.kv_connector == _MULTI:
        return list((given.kv_connector_extra_config or {}).get("connectors", []))
    return [{item.name: getattr(given, item.name) for item in fields(given) if item.name != "engine_id"}]


def _together(parts: list[dict[str, Any]]) -> KVTransferConfig:
    if len(parts) == 1:
        return KVTransferConfig(**parts[0])
    return KVTransferConfig(
        kv_connector=_MULTI,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": parts},
    )
