"""The node's store as a HiCache storage backend of a stock SGLang.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "headwater",
        "module_path": "headwater.kv.connectors.sglang", "class_name": "HeadwaterStorage", "interface_v1": 1}'

Further keys: `socket` (where `headwater kv serve` listens), `fingerprint` (of the model; default its name), `tenant`,
`timeout_s`. SGLang's page keys are chained hashes already, seeded with the salt; they are hashed once more under a
namespace of model, tenant, layout and rank, so that only equal pages meet. Written against HiCacheStorage of SGLang
0.5.23.

A worker of ours attaches it by itself and names pages as its cluster does (`names`, a file; `sglang_naming`). Then each
rank keeps its part of a block, what the worker has not named is left alone, and pages that would come later than they
are computed are not there.

No call raises: HiCache does not restart a thread that ended. A store that is slow or gone is a miss. Refused as SGLang
starts: models that keep more than KV pages (sliding windows, recurrent state, draft models).
"""

import logging
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from headwater.errors import ConfigError, HeadwaterError
from headwater.kv.block import ROOT, Family
from headwater.kv.connectors.chains import socket_path
from headwater.kv.connectors.names import Named, NamesTold
from headwater.kv.identity import namespace
from headwater.kv.node.agent import StoreAgent
from headwater.kv.node.store import Piece
from headwater.kv.shards import part_ids
from headwater.types import BLOCK_ID_BYTES

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_TIMEOUT_S = 5.0
_GRACE_S = 2.0
_ASK_S = 1.0
"""HiCache asks on a thread of its own, ahead of the request's turn."""
_TELL_S = 0.2
"""A page that an answer has filled is named about when SGLang stores it."""
_KV_POOL = "kv"


class HeadwaterStorage(HiCacheStorage):  # type: ignore[misc]
    """See the module docstring. Called by HiCache's prefetch and backup threads."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self._config = storage_config
        self._model = str(extra.get("fingerprint") or storage_config.model_name or "")
        self._tenant = str(extra.get("tenant", ""))
        self._timeout_s = float(extra.get("timeout_s", _TIMEOUT_S))
        self._family: Family | None = None
        self._dtype = torch.uint8
        """Of a page."""
        self._namespace = b""
        names = str(extra.get("names", ""))
        self._names = NamesTold(Path(names)) if names else None
        self._agent = StoreAgent(socket_path(extra.get("socket")), f"sglang-{storage_config.tp_rank}")
        self._problem = ""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """What a page is: its bytes as SGLang flattens them, in the layout of this rank's pool."""
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        kind = f"sglang.{page.dtype}.{mem_pool_host.layout}.{mem_pool_host.page_size}"
        size = page.numel() * page.element_size()
        self._dtype = page.dtype
        if self._names is not None:
            part, count = self._part()
            self._family = Family("", f"{kind}.of{count}", "", size, count, beside=part > 0)
            return
        layout = f"{kind}.{self._shard()}"
        self._family = Family(self._model, layout, self._tenant, size)
        self._namespace = namespace(self._model, layout, salt=self._tenant)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises `ConfigError`, which ends the start of SGLang: a prefix without its other states is of no use."""
        if str(getattr(host_pool_name, "value", host_pool_name)) != _KV_POOL:
            raise ConfigError(f"the KV store keeps KV pages alone, and this model has {host_pool_name} beside them")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # Version 1 of the interface: pages go straight between the host pool and the store

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        chain = self._chain(keys, extra_info)
        if chain is None:
            return 0
        try:
            runs = self._agent.match(chain, timeout_s=self._timeout_s, ask_s=_ASK_S)
        except HeadwaterError as error:
            return self._note(error, 0)
        rate = self._names.rate() if self._names is not None else None
        if rate is None:
            return sum(run.num_blocks for run in runs)
        size = self.mem_pool_host.page_size
        plan = self._agent.client.plan(
            chain,
            runs,
            rate.prefill_ms,
            num_tokens=(chain.first + len(keys)) * size,
            cached_tokens=chain.first * size,
            block_tokens=size,
        )
        return plan.num_blocks

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        pool = self.mem_pool_host
        pages = self._load(keys, extra_info)
        for number, page in enumerate(pages):
            pool.set_from_flat_data_page(host_indices[number * pool.page_size], page)
        return _leading(len(pages), len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        pool = self.mem_pool_host
        pages = [pool.get_data_page(host_indices[number * pool.page_size], flat=True) for number in range(len(keys))]
        return self._offer(keys, pages, extra_info)

    # Version 0: single pages, by value

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        pages = self._load(keys, None)
        if target_locations is not None:
            for page, target in zip(pages, target_locations, strict=False):
                target.reshape(-1).copy_(page.view(target.dtype))
            return [*target_locations[: len(pages)], *[None] * (len(keys) - len(pages))]
        return [*pages, *[None] * (len(keys) - len(pages))]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return values is not None and all(self._offer(keys, values, None))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """SGLang flushes its cache; what others use is not ours to clear: `headwater kv clear` does that."""

    def close(self) -> None:
        self._agent.close()
        if self._names is not None:
            self._names.close()

    # Inside

    def _load(self, keys: list[str], extra_info: Any) -> list[torch.Tensor]:
        chain = self._chain(keys, extra_info)
        if chain is None:
            return []
        size = chain.family.payload_bytes
        buffer = bytearray(size * chain.num_blocks)
        whole = memoryview(buffer)
        views = [whole[number * size : (number + 1) * size] for number in range(chain.num_blocks)]
        try:
            loading = self._agent.load(chain, views, timeout_s=self._timeout_s)
            loaded = loading.result(self._timeout_s + _GRACE_S)
        except (HeadwaterError, TimeoutError) as error:
            return self._note(error, list[torch.Tensor]())
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        return [flat[number * size : (number + 1) * size].view(self._dtype) for number in range(loaded)]

    def _offer(self, keys: list[str], pages: Sequence[torch.Tensor], extra_info: Any) -> list[bool]:
        chain = self._chain(keys, extra_info, _TELL_S)
        if chain is None:
            return [False] * len(keys)
        kept = pages[: chain.num_blocks]
        payloads = [page.contiguous().reshape(-1).view(torch.uint8).numpy().data for page in kept]
        if any(len(payload) != chain.family.payload_bytes for payload in payloads):
            return [False] * len(keys)
        try:
            self._agent.offer(chain, payloads).result(self._timeout_s + _GRACE_S)
        except (HeadwaterError, TimeoutError) as error:
            return self._note(error, [False] * len(keys))
        return _leading(self._agent.num_in_host(chain.ids), len(keys))

    def _chain(self, keys: list[str], extra_info: Any, wait_s: float = 0.0) -> Piece | None:
        """`extra_info.prefix_keys` are the pages before these; where SGLang leaves them out the chain begins here."""
        if self._family is None or not keys:
            return None
        before = list(getattr(extra_info, "prefix_keys", None) or ())
        if self._names is not None:
            return self._named_chain(self._family, self._names, keys, before, wait_s)
        parent = self._id(before[-1]) if before else ROOT
        return Piece(self._family, b"".join(map(self._id, keys)), len(before), parent)

    def _named_chain(
        self, family: Family, names: NamesTold, keys: list[str], before: list[str], wait_s: float
    ) -> Piece | None:
        """As far as the worker has named them. One that never will, for no page of it is known, is not waited for."""
        parent = names.find(bytes.fromhex(before[-1])) if before else None
        pages = list(map(bytes.fromhex, keys))
        if (before and parent is None) or (not before and names.find(pages[0]) is None):
            return None
        found = names.leading(pages, wait_s)
        if not found:
            return None
        own = found[0].naming.family(family)
        return Piece(own, self._part_ids(found), len(before), self._part_ids([parent]) if parent else ROOT)

    def _part_ids(self, found: Sequence[Named]) -> bytes:
        assert self._family is not None
        return part_ids(b"".join(one.block_id for one in found), self._family.layout, self._part()[0])

    def _part(self) -> tuple[int, int]:
        """Which part of how many this rank keeps of a block; all ranks the same of latent attention (MLA)."""
        config = self._config
        tensor = (0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size)
        number, count = 0, 1
        for rank, size in (
            (config.pp_rank, config.pp_size),
            (config.attn_cp_rank, config.attn_cp_size),
            tensor,
        ):
            number, count = number * size + rank, count * size
        return number, count

    def _id(self, key: str) -> bytes:
        return blake2b(key.encode(), key=self._namespace, digest_size=BLOCK_ID_BYTES).digest()

    def _shard(self) -> str:
        config = self._config
        tensor = "all" if config.is_mla_model else f"{config.tp_rank}/{config.tp_size}"
        return f"tp{tensor}.pp{config.pp_rank}/{config.pp_size}.cp{config.attn_cp_rank}/{config.attn_cp_size}"

    def _note(self, error: Exception, answer: Answer) -> Answer:
        if str(error) != self._problem:
            self._problem = str(error)
            _log.warning("the KV store does not answer, pages are computed: %s", error)
        return answer


def _leading(good: int, count: int) -> list[bool]:
    return [True] * good + [False] * (count - good)
