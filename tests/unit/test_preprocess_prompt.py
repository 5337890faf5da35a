"""Limits on prompts: arithmetic that helps, and refusals that cost little."""

import pytest

from headwater.errors import ContextTooLong, InvalidRequest
from headwater.frontend.openai.model import ServedModel
from headwater.frontend.preprocess.prompt import MostTokens, PromptLimits
from headwater.frontend.preprocess.tokenizer import Tokenizer, pack_ids
from headwater.kv.identity import chain_block_ids, namespace
from headwater.types import BLOCK_ID_BYTES
from headwater.weights import ResolvedModel
from openai_twin import served_demo


class CountingTokenizer:
    """Counts the characters that were really tokenized."""

    backend = "counting"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        self.num_chars += len(text)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: object, *, skip_special_tokens: bool) -> str:
        raise NotImplementedError


@pytest.fixture(scope="module")
def model(demo_model: ResolvedModel) -> ServedModel:
    return served_demo(demo_model)


LIMITS = PromptLimits(max_model_len=8192, longest_token_chars=81, block_size=16)


@pytest.mark.parametrize(
    ("prompt", "asked", "default", "granted"),
    [(10, 5, None, 5), (10, None, None, 8182), (10, None, 16, 16), (8190, None, 16, 2), (8191, 1, None, 1)],
)
def test_tokens_that_fit(prompt: int, asked: int | None, default: int | None, granted: int) -> None:
    assert LIMITS.fit_max_tokens(prompt, MostTokens(asked, "max_tokens", default), "prompt") == granted


@pytest.mark.parametrize(
    ("prompt", "asked", "message"),
    [
        (
            9120,
            500,
            "the prompt has 9,120 tokens, the model's context is 8,192: at most 8,191 prompt tokens leave room",
        ),
        (
            8000,
            500,
            "the prompt has 8,000 tokens and max_tokens is 500, together 8,500 > 8,192: "
            "at most 7,692 prompt tokens, or max_tokens at most 192 with this prompt",
        ),
        (
            10,
            2**62,
            "the prompt has 10 tokens and max_tokens is 4,611,686,018,427,387,904, together "
            "4,611,686,018,427,387,914 > 8,192: max_tokens at most 8,182 with this prompt",
        ),
        (8192, None, "the prompt has 8,192 tokens, the model's context is 8,192"),
    ],
)
def test_tokens_that_do_not_fit(prompt: int, asked: int | None, message: str) -> None:
    with pytest.raises(ContextTooLong) as caught:
        LIMITS.fit_max_tokens(prompt, MostTokens(asked, "max_tokens"), "prompt")
    assert str(caught.value).startswith(message)
    assert caught.value.param == ("prompt" if asked is None or asked < 8192 else "max_tokens")


def test_a_hopeless_text_is_not_tokenized_at_all(model: ServedModel) -> None:
    tokenizer = CountingTokenizer(model.tokenizer)
    with pytest.raises(ContextTooLong, match=r"10,000,000 characters, at least 123,457 tokens"):
        LIMITS.encode(tokenizer, "word " * 2_000_000, "prompt", add_special_tokens=True)
    assert tokenizer.num_chars == 0


def test_a_long_text_is_refused_after_its_beginning(model: ServedModel) -> None:
    tokenizer = CountingTokenizer(model.tokenizer)
    with pytest.raises(ContextTooLong, match=r"its first 65,536 alone are"):
        LIMITS.encode(tokenizer, "word " * 100_000, "prompt", add_special_tokens=True)
    assert tokenizer.num_chars == 65_536


def test_a_long_text_of_long_tokens_is_tokenized(model: ServedModel) -> None:
    ids = LIMITS.encode(model.tokenizer, "#" * 200_000, "prompt", add_special_tokens=True)
    assert len(ids) // 4 < 8192


def test_without_a_bound_long_texts_are_tokenized_in_part(model: ServedModel) -> None:
    tokenizer = CountingTokenizer(model.tokenizer)
    unbounded = PromptLimits(max_model_len=100, longest_token_chars=None, block_size=16)
    with pytest.raises(ContextTooLong):
        unbounded.encode(tokenizer, "word " * 1_000_000, "prompt", add_special_tokens=True)
    assert tokenizer.num_chars == 800


def test_block_ids_are_those_of_the_identity(model: ServedModel) -> None:
    ids = pack_ids(range(100))
    key = namespace("fingerprint", "layout", salt="tenant")
    prompt = LIMITS.prompt(ids, key)
    assert prompt.block_ids == chain_block_ids(key, ids, 16)
    assert len(prompt.block_ids) == 100 // 16 * BLOCK_ID_BYTES
    assert prompt.num_tokens == 100


def test_characters_without_tokens_are_named(model: ServedModel) -> None:
    """This model has no token for the byte 0xf2; a text with it is the client's mistake, not ours."""
    with pytest.raises(InvalidRequest, match="no tokens for") as caught:
        LIMITS.encode(model.tokenizer, "before \U000a5184 after", "prompt", add_special_tokens=False)
    assert caught.value.param == "prompt"
