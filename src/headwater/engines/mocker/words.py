"""Token ids that read as plain words, from a tokenizer.json, so that made-up output is printable text."""

import re

import msgspec

from headwater.errors import ModelError

_MAX_WORDS = 4096
_WORD = re.compile(r"[Ġ▁][a-z]{2,12}")
"""With the mark of a leading space that byte-level (Ġ) and SentencePiece (▁) vocabularies use."""
_PLAIN = re.compile(r"[A-Za-z0-9]+")


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _AddedToken(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


class Vocabulary(msgspec.Struct, frozen=True):
    """`size` covers added tokens; `words` is never empty."""

    size: int
    words: tuple[int, ...]


def read_vocabulary(tokenizer_json: bytes) -> Vocabulary:
    """Raises `ModelError`."""
    try:
        tokenizer = msgspec.json.decode(tokenizer_json, type=_Tokenizer)
    except msgspec.DecodeError as error:
        raise ModelError(f"tokenizer.json cannot be read: {error}") from error
    vocab = tokenizer.model.vocab
    pieces = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
    added = {token.id for token in tokenizer.added_tokens}
    usable = {piece: number for piece, number in pieces.items() if number not in added}
    if not usable:
        raise ModelError("tokenizer.json has no ordinary tokens")
    words = _matching(usable, _WORD) or _matching(usable, _PLAIN) or sorted(usable.values())
    return Vocabulary(1 + max([*pieces.values(), *added]), tuple(words[:_MAX_WORDS]))


def _matching(pieces: dict[str, int], pattern: re.Pattern[str]) -> list[int]:
    return sorted(number for piece, number in pieces.items() if pattern.fullmatch(piece))
