"""The store as HiCache's storage back-end in an SGLang of a worker of ours, and the keys that SGLang has for pages.

A back-end is shown keys and no tokens, so the worker computes the same keys from a request's tokens, and tells the
back-end which block of the cluster is behind each (`names`). Keys are SHA-256 over the key of the page before and the
tokens as little-endian u32; a salt seeds the first one. So SGLang 0.5.23 has it (`mem_cache/utils.py`,
`cpp_utils/hash_binding.cpp`); pages of pairs, which it makes for EAGLE, are not of this kind.
"""

import json
from array import array
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from sys import byteorder
from typing import Any

from headwater.kv.connectors.names import NameLog
from headwater.kv.connectors.naming import Naming
from headwater.kv.identity import chain_block_ids
from headwater.types import BLOCK_ID_BYTES, TOKEN_ID_BYTES, BlockId

MODULE = "headwater.kv.connectors.sglang"
CLASS = "HeadwaterStorage"

_SEED = b"sglang-cache-namespace-v1"
_MAX_KNOWN = 1 << 17


def storage_config(socket: Path, names: Path, more: dict[str, Any]) -> str:
    """What SGLang is to be told, as `--hicache-storage-backend-extra-config` of the `dynamic` back-end.

    `more`: what the operator adds."""
    return json.dumps(
        {
            **more,
            "backend_name": "headwater",
            "module_path": MODULE,
            "class_name": CLASS,
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            "socket": str(socket),
            "names": str(names),
        }
    )


def seed(salt: str | None) -> bytes:
    """What stands for the key before the first page."""
    if salt is None:
        return b""
    encoded = salt.encode()
    return sha256(_SEED + b"\x00\x01" + len(encoded).to_bytes(8, "little") + encoded).digest()


class PageNames:
    """Of the requests that are open. `page_tokens`: as many as a block has."""

    def __init__(self, log: NameLog, page_tokens: int) -> None:
        self._log, self._page_tokens = log, page_tokens
        self._open: dict[int, _Sequence] = {}
        self._keys: dict[bytes, bytes] = {}
        """Of blocks that were met lately: prompts begin alike."""

    def begin(self, stream: int, naming: Naming, tokens: "array[int]", salt: str | None) -> None:
        """All that SGLang is given of a request, before it is."""
        sequence = self._open[stream] = _Sequence(naming, seed(salt))
        self._grow(sequence, tokens)

    def grow(self, stream: int, token_ids: list[int]) -> None:
        """What came of it."""
        if (sequence := self._open.get(stream)) is not None:
            self._grow(sequence, array("I", token_ids))

    def end(self, stream: int) -> None:
        self._open.pop(stream, None)

    def _grow(self, sequence: "_Sequence", tokens: "array[int]") -> None:
        sequence.rest += tokens
        count = len(sequence.rest) // self._page_tokens
        if not count:
            return
        full = sequence.rest[: count * self._page_tokens]
        del sequence.rest[: count * self._page_tokens]
        if byteorder == "big":
            full.byteswap()
        ids, keys = self._chains(sequence, full.tobytes())
        sequence.last_id, sequence.last_key = BlockId(ids[-BLOCK_ID_BYTES:]), keys[-1]
        self._log.tell(sequence.naming, keys, ids)

    def _chains(self, sequence: "_Sequence", tokens: bytes) -> tuple[bytes, list[bytes]]:
        """Ids of the blocks, and SGLang's keys of the same pages."""
        ids = chain_block_ids(sequence.naming.key(), tokens, self._page_tokens, parent=sequence.last_id)
        stride = self._page_tokens * TOKEN_ID_BYTES
        keys, key = list[bytes](), sequence.last_key
        if len(self._keys) > _MAX_KNOWN:
            self._keys.clear()
        for number, (start, end) in enumerate(pairwise(range(0, len(tokens) + 1, stride))):
            block_id = ids[number * BLOCK_ID_BYTES : (number + 1) * BLOCK_ID_BYTES]
            known = self._keys.get(block_id)
            if known is None:
                known = self._keys[block_id] = sha256(key + tokens[start:end]).digest()
            key = known
            keys.append(key)
        return ids, keys


class _Sequence:
    def __init__(self, naming: Naming, first: bytes) -> None:
        self.naming = naming
        self.last_key = first
        self.last_id: BlockId | None = None
        self.rest = array("I")
        """Tokens of a page that is not full."""
