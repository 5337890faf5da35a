"""What is in the blocks of a mocker that plays another engine: events of those engines tell the tokens of a block."""

from array import array
from collections.abc import Callable, Iterable, Sequence

from headwater.kv.identity import chain_block_ids, namespace, split_block_ids
from headwater.protocol.cluster import ModelCard

BlockText = tuple[bytes | None, list[int], str | None]
"""The parent, the tokens, the salt of the prompt."""


def salted(card: ModelCard, salt: str | None) -> bytes:
    """The namespace of prompts with that salt."""
    return namespace(card.fingerprint, card.kv_layout, salt=salt or "")


class BlockTexts:
    """By id, found out when one is asked for that is not known."""

    def __init__(self, sequences: Callable[[], Iterable[tuple[Sequence[int], str | None]]]) -> None:
        """`sequences`: the tokens and the salt of each so far."""
        self._sequences = sequences
        self._known: dict[bytes, BlockText] = {}

    def clear(self) -> None:
        self._known.clear()

    def of(self, block_id: bytes, card: ModelCard) -> BlockText:
        if block_id not in self._known:
            for tokens, salt in self._sequences():
                self._name_blocks(tokens, salt, card)
        return self._known[block_id]

    def _name_blocks(self, tokens: Sequence[int], salt: str | None, card: ModelCard) -> None:
        size, parent = card.block_size, None
        joined = chain_block_ids(salted(card, salt), array("I", tokens).tobytes(), size)
        for number, block_id in enumerate(split_block_ids(joined)):
            self._known[block_id] = (parent, list(tokens[number * size : (number + 1) * size]), salt)
            parent = block_id
