"""What a `tokenizer.json` says that the frontend must know besides how to encode.

Read once per model: the text of every id, which ids are special, how token texts become bytes, and how many
characters one token can cover at most. Refuses files without a vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headwater.errors import ModelError

DecoderKind = Literal["byte_level", "byte_fallback", "other"]
"""How token texts become bytes: GPT-2's byte alphabet, SentencePiece with `<0xNN>` tokens, or something else."""

WORD_MARK = "\u2581"
"""SentencePiece's sign for a space."""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
BYTE_ALPHABET: dict[int, int] = {byte: byte for byte in _PRINTABLE} | {
    0x100 + number: byte for number, byte in enumerate(_OTHERS)
}
"""GPT-2's printable character (its code) for each byte, backwards."""
_TEXT_BYTES = frozenset((*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0)))

_NFC_SHRINK = 4
"""Composition replaces at most this many characters by one."""


class AddedToken(msgspec.Struct, frozen=True):
    """An entry beside the model's vocabulary, matched before it."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    type: str | None = None
    byte_fallback: bool = False


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """The facts about one tokenizer."""

    tokens: list[str | None]
    """Text of each id as the vocabulary spells it; None for ids that do not exist."""
    added: dict[int, AddedToken]
    special_ids: frozenset[int]
    decoder: DecoderKind
    longest_token_chars: int | None
    """No token covers more characters of input; None when no bound can be given."""


def read_tokenizer_file(data: bytes) -> TokenizerFile:
    """Raises `ModelError` when the file is not a tokenizer."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"tokenizer.json cannot be read: {error}") from error
    vocab = file.model.vocab
    ids = vocab if isinstance(vocab, dict) else {text: number for number, (text, _) in enumerate(vocab)}
    added = {token.id: token for token in file.added_tokens}
    highest = max([*ids.values(), *added], default=-1)
    if highest < 0:
        raise ModelError("tokenizer.json has an empty vocabulary")
    tokens: list[str | None] = [None] * (highest + 1)
    for text, number in ids.items():
        tokens[number] = text
    for token in file.added_tokens:
        tokens[token.id] = token.content
    return TokenizerFile(
        tokens=tokens,
        added=added,
        special_ids=frozenset(token.id for token in file.added_tokens if token.special),
        decoder=_decoder_kind(file.decoder),
        longest_token_chars=_longest_token_chars(file, tokens),
    )


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """A pipeline part as the list of its steps."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for step in part.get(inner, []) if isinstance(step, dict)]
    return [part]


def _decoder_kind(decoder: dict[str, Any] | None) -> DecoderKind:
    kinds = [step.get("type") for step in _steps(decoder, "decoders")]
    if kinds == ["ByteLevel"]:
        return "byte_level"
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return "byte_fallback"
    return "other"


def _longest_token_chars(file: _File, tokens: list[str | None]) -> int | None:
    """A bound exists when every character of input ends up in a token and nothing is thrown away on the way."""
    pre_tokenizers = _steps(file.pre_tokenizer, "pretokenizers")
    normalizers = _steps(file.normalizer, "normalizers")
    lossless = (
        file.model.type == "BPE"
        and (file.model.byte_fallback or _spells_all_text(pre_tokenizers, tokens))
        and not any(token.lstrip or token.rstrip for token in file.added_tokens)
        and all(_keeps_text(step) for step in pre_tokenizers)
        and all(_keeps_length(step) for step in normalizers)
    )
    if not lossless:
        return None
    longest = max(len(text) for text in tokens if text is not None)
    composes = any(step.get("type") == "NFC" for step in normalizers)
    return longest * (_NFC_SHRINK if composes else 1)


def _spells_all_text(pre_tokenizers: list[dict[str, Any]], tokens: list[str | None]) -> bool:
    """Whether every character but control characters has a byte that is a token of its own.

    Beyond ASCII every character has a continuation byte. Some vocabularies lack bytes that never occur in text.
    """
    if not any(step.get("type") == "ByteLevel" for step in pre_tokenizers):
        return False
    single = {BYTE_ALPHABET.get(ord(text)) for text in tokens if text is not None and len(text) == 1}
    return single >= _TEXT_BYTES


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    return kind in {"Split", "ByteLevel", "Digits", "Metaspace"} and pre_tokenizer.get("behavior") != "Removed"


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    """Whether a normalizer makes text shorter by composition at most."""
    kind = normalizer.get("type")
    if kind == "Replace":
        pattern = normalizer.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        content = normalizer.get("content")
        return isinstance(literal, str) and isinstance(content, str) and len(content) >= len(literal)
    return kind in {"NFC", "Prepend"}
