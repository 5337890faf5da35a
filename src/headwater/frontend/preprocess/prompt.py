"""Prompt text to token ids and block ids, with limits that hold before the work is done.

A hopeless text is refused by arithmetic (no token covers more than so many characters) or after tokenizing a beginning
that is already too long, so a prompt of any size costs time in proportion to what the model could take at most.
"""

from dataclasses import dataclass

import msgspec

from headwater.errors import ContextTooLong, InvalidRequest
from headwater.frontend.preprocess.tokenizer import Tokenizer, unpack_ids
from headwater.kv.identity import chain_block_ids
from headwater.types import TOKEN_ID_BYTES

_GENEROUS_CHARS_PER_TOKEN = 8
_BORDER_TOKENS = 16
"""A beginning may be tokenized into a few more tokens than it has inside the whole text."""


class Prompt(msgspec.Struct, frozen=True):
    """Ready for the engine."""

    ids: bytes
    block_ids: bytes
    namespace: bytes
    text: str | None = None
    """What was tokenized; None when the client sent ids."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // TOKEN_ID_BYTES


@dataclass(frozen=True, slots=True)
class MostTokens:
    """How many tokens are to be generated at most."""

    value: int | None
    """As asked."""
    param: str
    """The field that asks."""
    default: int | None = None
    """Where nothing is asked; None: all that fit."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a model takes."""

    max_model_len: int
    longest_token_chars: int | None
    block_size: int
    vocab_size: int | None = None
    """Checked when given: some tokenizers have ids that the model has not."""

    def check_chars(self, num_chars: int, param: str) -> None:
        """Refuse what cannot fit whatever the tokens turn out to be."""
        if self.longest_token_chars is None:
            return
        at_least = -(-num_chars // self.longest_token_chars)
        if at_least >= self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {num_chars:,} characters, at least {at_least:,} tokens; "
                f"the model's context is {self.max_model_len:,} tokens",
                param=param,
            )

    def encode(self, tokenizer: Tokenizer, text: str, param: str, *, add_special_tokens: bool) -> bytes:
        """Ids of a text that might fit. Raises `ContextTooLong` without tokenizing much more than would fit."""
        self.check_chars(len(text), param)
        generous = self.max_model_len * _GENEROUS_CHARS_PER_TOKEN
        if len(text) > 2 * generous:
            beginning = _encoded(tokenizer, text[:generous], param, add_special_tokens)
            num_tokens = len(beginning) // TOKEN_ID_BYTES
            if num_tokens > self.max_model_len + _BORDER_TOKENS:
                raise ContextTooLong(
                    f"the prompt has {len(text):,} characters, its first {generous:,} alone are {num_tokens:,} "
                    f"tokens; the model's context is {self.max_model_len:,} tokens",
                    param=param,
                )
        ids = _encoded(tokenizer, text, param, add_special_tokens)
        if self.vocab_size is not None:
            self._check_ids(ids, param)
        return ids

    def _check_ids(self, ids: bytes, param: str) -> None:
        highest = max(unpack_ids(ids), default=0)
        if self.vocab_size is not None and highest >= self.vocab_size:
            raise InvalidRequest(
                f"{param} contains the token {highest:,}, which the tokenizer has and the model has not "
                f"(its tokens are 0 to {self.vocab_size - 1:,})",
                param=param,
            )

    def prompt(self, ids: bytes, namespace: bytes, text: str | None = None) -> Prompt:
        return Prompt(ids, chain_block_ids(namespace, ids, self.block_size), namespace, text)

    def check_tokens(self, num_prompt_tokens: int, param: str) -> None:
        """Refuse a prompt that leaves no room for an answer."""
        if num_prompt_tokens >= self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {num_prompt_tokens:,} tokens, the model's context is {self.max_model_len:,}: "
                f"at most {self.max_model_len - 1:,} prompt tokens leave room for an answer",
                param=param,
            )

    def fit_max_tokens(self, num_prompt_tokens: int, asked: MostTokens, param: str) -> int:
        """How many tokens may be generated; `param`: the field with the prompt."""
        self.check_tokens(num_prompt_tokens, param)
        room = self.max_model_len - num_prompt_tokens
        if asked.value is None:
            return room if asked.default is None else min(asked.default, room)
        if asked.value > room:
            raise self._does_not_fit(num_prompt_tokens, asked.value, asked.param, param)
        return asked.value

    def _does_not_fit(self, num_prompt_tokens: int, most: int, most_param: str, param: str) -> ContextTooLong:
        longest = self.max_model_len
        start = (
            f"the prompt has {num_prompt_tokens:,} tokens and {most_param} is {most:,}, "
            f"together {num_prompt_tokens + most:,} > {longest:,}: "
        )
        at_most = f"{most_param} at most {longest - num_prompt_tokens:,} with this prompt"
        if most >= longest:
            return ContextTooLong(start + at_most, param=most_param)
        return ContextTooLong(start + f"at most {longest - most:,} prompt tokens, or {at_most}", param=param)


def _encoded(tokenizer: Tokenizer, text: str, param: str, add_special_tokens: bool) -> bytes:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except ValueError as error:
        raise InvalidRequest(
            f"{param} holds characters that the model has no tokens for ({error})", param=param
        ) from None
