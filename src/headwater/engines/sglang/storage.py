"""The store of the host as HiCache's storage back-end, beside what the operator says of HiCache.

SGLang has one such back-end. What it cannot keep there is refused before it loads anything.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from headwater.engines.base import STORE_FLAGS
from headwater.engines.sglang_wire.settings import LEAST_PAGE_SIZE
from headwater.errors import ConfigError
from headwater.kv.connectors.sglang_naming import MODULE, storage_config

_WITH_PLAIN_PAGES = (None, "NGRAM")
_HINT = "leave out the KV store's flags for these workers, or this one"


def attach_store(parsed: argparse.Namespace, socket: Path, names: Path) -> bool:
    """Whether it was attached; not if the operator has done so. `parsed`: SGLang's arguments. Raises `ConfigError`."""
    more = _extra_config(parsed.hicache_storage_backend_extra_config)
    if parsed.hicache_storage_backend == "dynamic" and more.get("module_path") == MODULE:
        return False
    _check(parsed)
    parsed.enable_hierarchical_cache = True
    parsed.hicache_storage_backend = "dynamic"
    parsed.hicache_storage_backend_extra_config = storage_config(socket, names, more)
    return True


def _extra_config(said: str | None) -> dict[str, Any]:
    """The operator's own words, such as `prefetch_threshold`."""
    try:
        found = json.loads(said or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"--hicache-storage-backend-extra-config {said} is no JSON object, as it must be beside {STORE_FLAGS}",
            hint=_HINT,
        )
    return found


def _check(parsed: argparse.Namespace) -> None:
    for flag, said, why in (
        (
            "--hicache-storage-backend",
            parsed.hicache_storage_backend,
            "SGLang has one storage back-end, and the KV store is to be it",
        ),
        (
            "--enable-unified-cache-external-linker",
            parsed.enable_unified_cache_external_linker,
            "SGLang has this or HiCache, which the KV store is attached to",
        ),
        (
            "--disable-radix-cache (--no-enable-prefix-caching)",
            parsed.disable_radix_cache,
            "SGLang looks for prefixes in a store only if it keeps some itself",
        ),
        (
            "--disaggregation-mode",
            parsed.disaggregation_mode if parsed.disaggregation_mode == "decode" else None,
            "SGLang's decode servers look for no prefixes",
        ),
        (
            "--speculative-algorithm",
            parsed.speculative_algorithm if parsed.speculative_algorithm not in _WITH_PLAIN_PAGES else None,
            "SGLang's pages then hold the state of a draft model too, which the KV store does not keep",
        ),
        (
            "--nnodes",
            parsed.nnodes if parsed.nnodes > 1 else None,
            "the KV store is that of one node",
        ),
        (
            "--page-size",
            parsed.page_size if parsed.page_size < LEAST_PAGE_SIZE else None,
            f"the KV store wants pages of {LEAST_PAGE_SIZE} tokens or more",
        ),
    ):
        if said:
            value = "" if said is True else f" {said}"
            raise ConfigError(f"{flag}{value} does not go with {STORE_FLAGS}: {why}", hint=_HINT)
