"""HiCache as SGLang 0.5.23 runs it over a `dynamic` storage back-end, beside the double of its `Engine`: keys of
pages, what is read of the extra configuration, and which calls a request brings about. Every rank has a back-end of its
own."""

import hashlib
import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from engine_doubles import HiCacheController, HiCacheStorage, HiCacheStorageConfig, HostPool

_READ: dict[str, type] = {
    "prefetch_threshold": int,
    "prefetch_timeout_base": float,
    "prefetch_timeout_per_ki_token": float,
    "hicache_storage_pass_prefix_keys": bool,
}
"""By SGLang itself; all else is for the back-end."""


class HiCache:
    def __init__(self, page_size: int, extra: dict[str, Any], ranks: int = 1) -> None:
        said = {name: extra.pop(name) for name in _READ if name in extra}
        for name, value in said.items():
            if not isinstance(value, _READ[name]):
                raise ValueError(f"{name} must be {_READ[name].__name__}")
        self._page_size = page_size
        self._threshold = max(said.get("prefetch_threshold", 256), page_size)
        self._pass_prefix_keys = said.get("hicache_storage_pass_prefix_keys", False)
        if not extra.get("interface_v1"):
            raise ValueError("this double knows version 1 of the interface alone")
        backend = getattr(importlib.import_module(extra["module_path"]), extra["class_name"])
        if not issubclass(backend, HiCacheStorage):
            raise TypeError(f"Backend class {extra['class_name']} must inherit from HiCacheStorage")
        self._ranks: list[HiCacheController] = []
        for rank in range(ranks):
            config = HiCacheStorageConfig(tp_rank=rank, tp_size=ranks, extra_config=dict(extra))
            self._ranks.append(HiCacheController(backend(config, {}), HostPool()))
        self.loaded: list[int] = []
        """Pages, by request."""
        self.not_written = 0
        self.thread = ThreadPoolExecutor(1)
        """One for all that it does, in order: here all requests use the same places of the pool."""

    def close(self) -> None:
        self.thread.shutdown()
        for rank in self._ranks:
            rank.storage.close()

    def rate_ms(self) -> float:
        """What a token costs, as its back-end was told."""
        rate = self._ranks[0].storage._names.rate()
        return rate.token_ms if rate is not None else 0.0

    def prefetch(self, tokens: list[int], salt: str | None) -> None:
        keys = page_keys(tokens, salt, self._page_size)
        if len(keys) * self._page_size < self._threshold:
            self.loaded.append(0)
            return
        indices = torch.arange(len(keys) * self._page_size)
        loaded = min(rank.prefetch(keys, indices) for rank in self._ranks)
        for number, rank in enumerate(self._ranks):
            found = rank.pool.kv[: loaded * self._page_size]
            assert torch.equal(found, _content(keys[:loaded], number, found)), "KV of another page or rank"
        self.loaded.append(loaded)

    def backup(self, prompt: list[int], answer: list[int], salt: str | None) -> None:
        """What the prompt has filled, and then what the answer has: two nodes of its tree."""
        keys = page_keys([*prompt, *answer], salt, self._page_size)
        first = len(prompt) // self._page_size
        for start, end in ((0, first), (first, len(keys))):
            if start < end:
                before = keys[:start] if start and self._pass_prefix_keys else None
                for number, rank in enumerate(self._ranks):
                    self._write(rank, number, keys[start:end], before)

    def _write(self, rank: HiCacheController, number: int, keys: list[str], before: list[str] | None) -> None:
        size = len(keys) * self._page_size
        rank.pool.kv[:size] = _content(keys, number, rank.pool.kv[:size])
        self.not_written += len(keys) - rank.backup(keys, torch.arange(size), before)


def page_keys(tokens: list[int], salt: str | None, page_size: int) -> list[str]:
    """`get_storage_hash_str` of `mem_cache/utils.py`, for requests without an `extra_key`."""
    prior = b""
    if salt is not None:
        namespace = hashlib.sha256(b"sglang-cache-namespace-v1")
        namespace.update(b"\x00")
        namespace.update(b"\x01" + len(salt.encode()).to_bytes(8, "little") + salt.encode())
        prior = namespace.digest()
    keys: list[str] = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = hashlib.sha256(prior)
        for token in tokens[start : start + page_size]:
            page.update(token.to_bytes(4, "little"))
        prior = page.digest()
        keys.append(prior.hex())
    return keys


def _content(keys: list[str], rank: int, like: torch.Tensor) -> torch.Tensor:
    """What a rank has computed of these pages."""
    numbers = [int(key[:2], 16) + 256 * rank for key in keys]
    values = torch.tensor(numbers, dtype=torch.float32).repeat_interleave(len(like) // max(1, len(keys)))
    return values.unsqueeze(1).expand(len(values), like.shape[1]).to(like.dtype)
