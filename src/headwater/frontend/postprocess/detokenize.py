"""Token ids to text, step by step, never a partial character.

`ByteDetokenizer` (tables) is exact: pushes and flush together give the text of all bytes, with U+FFFD only for bytes
that are not UTF-8. `WindowDetokenizer` serves tokenizers whose decoder looks at neighbours; it decodes a short window
and emits what is settled.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_new_decoder = getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One sequence's text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        ...

    def flush(self) -> str:
        """What is left at the end; unfinished characters become U+FFFD."""
        ...


class ByteDetokenizer:
    """Joins token bytes and decodes them as far as characters are whole."""

    __slots__ = ("_decoder", "_pieces")

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decoder = _new_decoder("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        if len(token_ids) == 1:
            return self._decoder.decode(pieces[token_ids[0]])
        return self._decoder.decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    @property
    def unfinished(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return self._decoder.getstate()[0] != b""


class WindowDetokenizer:
    """Decodes the last few tokens with and without the new one; the difference is new text."""

    __slots__ = ("_decode", "_emitted", "_ids", "_start")

    _LONGEST_WAIT = 16
    """Tokens after which an unfinished character is taken for a broken one."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """`context`: the last few ids of the prompt, so that spacing between words comes out right."""
        self._decode = decode
        self._ids: list[int] = list(context)
        self._start = 0
        self._emitted = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        known = self._decode(self._ids[self._start : self._emitted])
        text = self._decode(self._ids[self._start :])
        waiting = len(self._ids) - self._emitted
        if len(text) <= len(known) or (text.endswith(_REPLACEMENT) and waiting < self._LONGEST_WAIT):
            return ""
        self._start = self._emitted
        self._emitted = len(self._ids)
        if self._start > 64:
            del self._ids[: self._start]
            self._emitted -= self._start
            self._start = 0
        return text[len(known) :]

    def flush(self) -> str:
        known = self._decode(self._ids[self._start : self._emitted])
        text = self._decode(self._ids[self._start :])
        self._start = self._emitted = len(self._ids)
        return text[len(known) :]
