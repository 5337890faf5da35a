"""Text to token ids and back: one port, two libraries.

Ids leave as little-endian u32 bytes and stay so until they reach the engine. `fastokens` is many times faster than
`tokenizers`; it is trusted with a model only after both gave the same ids for a varied corpus. Special tokens written
out in the text are recognised, as every chat template needs; others are added only on request.
"""

import logging
import sys
from array import array
from collections.abc import Sequence
from typing import Literal, Protocol

import fastokens
import tokenizers

from headwater.errors import ModelError
from headwater.frontend.preprocess.corpus import self_check_corpus
from headwater.frontend.preprocess.folding import folded

logger = logging.getLogger(__name__)

Backend = Literal["auto", "fastokens", "tokenizers"]

_BROKEN = (ValueError, TypeError, RuntimeError, NotImplementedError, OSError)
"""What the two libraries raise for a file or feature that they do not support."""


class Tokenizer(Protocol):
    """One model's tokenizer. Safe to call from several threads."""

    @property
    def backend(self) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Token ids, 4 bytes little-endian each."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class FastTokenizer:
    """`fastokens`."""

    backend = "fastokens"

    def __init__(self, json: str) -> None:
        self._tokenizer = fastokens.Tokenizer.from_json_str(json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        ids: bytes = self._tokenizer.encode_batch_flat([text], add_special_tokens)[0]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens))


class ReferenceTokenizer:
    """`tokenizers`: slower, supports every file, and says what is right."""

    backend = "tokenizers"

    def __init__(self, json: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return pack_ids(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Ids as little-endian u32 bytes. Raises `OverflowError` or `TypeError` for what is not an unsigned 32-bit id."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The opposite of `pack_ids`."""
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def load_tokenizer(data: bytes, backend: Backend, added_tokens: Sequence[str] = ()) -> Tokenizer:
    """The fastest tokenizer that is right for this file. Raises `ModelError` when there is none."""
    try:
        json = data.decode()
        reference = ReferenceTokenizer(json)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"tokenizer.json is not understood by `tokenizers`: {error}") from error
    if backend == "tokenizers":
        return reference
    doubt = ""
    for spelling in filter(None, (folded(json), json)):
        try:
            fast = FastTokenizer(spelling)
            difference = _first_difference(fast, reference, added_tokens)
        except _BROKEN as error:
            difference = f"fastokens cannot read it: {error}"
        if difference is None:
            return fast
        doubt = difference
    if backend == "fastokens":
        raise ModelError(
            f"fastokens is not usable with this tokenizer: {doubt}", hint="use --tokenizer-backend tokenizers"
        )
    logger.warning("using `tokenizers` for this model: %s", doubt)
    return reference


def _first_difference(fast: Tokenizer, reference: Tokenizer, added_tokens: Sequence[str]) -> str | None:
    mixed = "".join(f"{token}x {token} \n" for token in added_tokens)
    for text in (*self_check_corpus(), mixed):
        for special in (False, True):
            if fast.encode(text, add_special_tokens=special) != reference.encode(text, add_special_tokens=special):
                return f"other ids than the reference for {text[:40]!r}"
    return None
