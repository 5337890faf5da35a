"""Bytes of every token, and the same escaped for JSON: the tables that make detokenizing a look-up.

Exact for the two decoders whose output is a plain concatenation of token bytes: GPT-2's byte alphabet, and
SentencePiece with byte tokens. A leading space that some files strip from a whole text is kept, because what is
generated continues a prompt.
"""

from collections.abc import Callable

import msgspec

from headwater.frontend.preprocess.tokenizer_file import BYTE_ALPHABET, WORD_MARK, TokenizerFile


class TokenTable:
    """Tables by token id. Ids without a token have no bytes."""

    __slots__ = ("escaped", "pieces", "special_ids", "visible")

    def __init__(self, file: TokenizerFile, vocab_size: int) -> None:
        to_bytes = _converter(file)
        pieces = [b"" if text is None else to_bytes(text) for text in file.tokens]
        pieces += [b""] * (vocab_size - len(pieces))
        self.special_ids = file.special_ids
        self.pieces: list[bytes] = pieces
        """Bytes of each token, special tokens written out."""
        self.visible: list[bytes] = list(pieces)
        """The same with special tokens left out."""
        for special in file.special_ids:
            self.visible[special] = b""
        self.escaped: list[bytes | None] = [_escape(piece) for piece in self.visible]
        """`visible` as the inside of a JSON string; None where the bytes are not whole characters."""


def _escape(piece: bytes) -> bytes | None:
    try:
        return msgspec.json.encode(piece.decode())[1:-1]
    except UnicodeDecodeError:
        return None


def _converter(file: TokenizerFile) -> Callable[[str], bytes]:
    if file.decoder == "byte_level":
        return _ByteAlphabet().to_bytes
    if file.decoder == "byte_fallback":
        return _sentencepiece_bytes
    raise ValueError(f"no byte table for a decoder of kind {file.decoder}")


class _ByteAlphabet(dict[int, str]):
    """GPT-2's mapping of bytes to printable characters, backwards, for `str.translate`."""

    def __init__(self) -> None:
        super().__init__({code: chr(byte) for code, byte in BYTE_ALPHABET.items()})

    def __missing__(self, code: int) -> str:
        return "\u0100"

    def to_bytes(self, text: str) -> bytes:
        """A text with a character outside the alphabet stands for itself."""
        try:
            return text.translate(self).encode("latin-1")
        except UnicodeEncodeError:
            return text.encode()


def _sentencepiece_bytes(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes((int(text[3:5], 16),))
        except ValueError:
            pass
    return text.replace(WORD_MARK, " ").encode()
