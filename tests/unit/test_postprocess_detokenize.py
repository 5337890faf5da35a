"""Incremental detokenizing: exact for any split, for every kind of decoder."""

import itertools
import random
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from headwater.frontend.openai.model import ServedModel
from headwater.frontend.postprocess.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from headwater.frontend.postprocess.token_table import TokenTable
from headwater.frontend.preprocess.tokenizer import ReferenceTokenizer
from headwater.frontend.preprocess.tokenizer_file import read_tokenizer_file
from headwater.weights import ResolvedModel
from openai_twin import served_demo, token_ids

TRICKY = (
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 🏴󠁧󠁢󠁳󠁣󠁴󠁿 ❤️",
    "你好，世界！天気がいいですね。한국어 텍스트",
    "e\u0301 A\u030a q\u0307\u0323 नमस्ते क्षत्रिय สวัสดี",
    "plain text, nothing else",
    "𝕞𝕒𝕥𝕙 ∑∫√∞ \u202eRTL\u202c \x00\x01\x7f\u00a0",
)
spellable = st.text(
    st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cc", "Cs"]) | st.sampled_from("\n\t"), max_size=60
)
"""The demo model's vocabulary lacks bytes that only occur in control characters and far planes."""


@pytest.fixture(scope="module")
def model(demo_model: ResolvedModel) -> ServedModel:
    return served_demo(demo_model)


@pytest.fixture(scope="module")
def reference(demo_model: ResolvedModel) -> ReferenceTokenizer:
    return ReferenceTokenizer(demo_model.tokenizer_json.decode())


def fresh(model: ServedModel, *, skip_special_tokens: bool = True) -> Detokenizer:
    return model.detokenizer(b"", skip_special_tokens=skip_special_tokens)


def push_in_pieces(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Deltas, the flush last."""
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise(borders)]
    return [*deltas, detokenizer.flush()]


@settings(deadline=None)
@given(text=spellable | st.sampled_from(TRICKY), cuts=st.lists(st.integers(0, 500), max_size=8))
def test_any_text_in_any_split(model: ServedModel, text: str, cuts: list[int]) -> None:
    deltas = push_in_pieces(fresh(model), token_ids(model, text), cuts)
    assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@settings(deadline=None)
@given(text=st.sampled_from(TRICKY))
def test_token_by_token(model: ServedModel, text: str) -> None:
    detokenizer = fresh(model)
    deltas = [detokenizer.push([token_id]) for token_id in token_ids(model, text)]
    assert "".join(deltas) == text
    assert detokenizer.flush() == ""


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=40), skip=st.booleans(), cuts=st.lists(st.integers(0, 50)))
def test_random_ids_equal_the_full_decode(
    model: ServedModel, reference: ReferenceTokenizer, ids: list[int], skip: bool, cuts: list[int]
) -> None:
    deltas = push_in_pieces(fresh(model, skip_special_tokens=skip), ids, cuts)
    assert "".join(deltas) == reference.decode(ids, skip_special_tokens=skip)


def test_ids_that_are_not_whole_characters_equal_the_full_decode(
    model: ServedModel, reference: ReferenceTokenizer
) -> None:
    table = model.table
    assert table is not None
    broken = [token_id for token_id, escaped in enumerate(table.escaped) if escaped is None]
    assert len(broken) > 100
    draw = random.Random(5)
    for _ in range(300):
        ids = [draw.choice(broken) if draw.random() < 0.7 else draw.randrange(49_152) for _ in range(12)]
        assert "".join(push_in_pieces(fresh(model), ids, range(12))) == reference.decode(ids, skip_special_tokens=True)


def test_partial_character_is_held_and_replaced_only_at_the_end(model: ServedModel) -> None:
    ids = token_ids(model, "ok 🜲")
    detokenizer = fresh(model)
    assert "".join(detokenizer.push([token_id]) for token_id in ids[:-1]).startswith("ok")
    assert isinstance(detokenizer, ByteDetokenizer)
    assert detokenizer.unfinished
    assert detokenizer.flush() == "\ufffd"


def test_table_of_escaped_text_is_json(model: ServedModel) -> None:
    table = model.table
    assert table is not None
    quote, newline = token_ids(model, '"')[0], token_ids(model, "\n")[0]
    assert table.escaped[quote] == b'\\"'
    assert table.escaped[newline] == b"\\n"
    assert table.escaped[1] == b"", "special tokens are invisible"
    assert table.pieces[1] == b"<|im_start|>"


def sentencepiece() -> tokenizers.Tokenizer:
    """A small tokenizer with byte fallback, as Llama 2, Mistral and Gemma have."""
    letters = ["▁", *"abcdehlorwxyz,.!"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for letter in [*letters, "▁h", "he", "ll"]:
        vocab[letter] = len(vocab)
    merges = [("▁", "h"), ("h", "e"), ("l", "l")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@settings(deadline=None)
@given(text=st.text(max_size=40) | st.sampled_from(TRICKY), cuts=st.lists(st.integers(0, 500), max_size=8))
def test_byte_fallback_tokens(text: str, cuts: list[int]) -> None:
    tokenizer = sentencepiece()
    file = read_tokenizer_file(tokenizer.to_str().encode())
    assert file.decoder == "byte_fallback"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    deltas = push_in_pieces(ByteDetokenizer(TokenTable(file, len(file.tokens)).visible), ids, cuts)
    assert "".join(deltas) == " " * bool(ids) + text.replace("▁", " ")
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


def test_wordpiece_goes_through_the_window() -> None:
    words = ["[UNK]", "hello", "wor", "##ld", "##s", ",", "the", "end"]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    file = read_tokenizer_file(tokenizer.to_str().encode())
    assert file.decoder == "other"
    assert file.longest_token_chars is None, "an unknown word of any length is one token"
    ids = tokenizer.encode("hello worlds, the end").ids
    detokenizer = WindowDetokenizer(lambda part: tokenizer.decode(list(part)))
    deltas = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(deltas) + detokenizer.flush() == tokenizer.decode(ids) == "hello worlds, the end"


@settings(deadline=None)
@given(text=st.text(alphabet="ab é🙂\n", max_size=60), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_window_equals_bytes_on_a_byte_level_tokenizer(
    model: ServedModel, reference: ReferenceTokenizer, text: str, cuts: list[int]
) -> None:
    window = WindowDetokenizer(lambda ids: reference.decode(ids, skip_special_tokens=True))
    assert "".join(push_in_pieces(window, token_ids(model, text), cuts)) == text


def test_window_does_not_wait_for_ever_for_a_broken_character(
    model: ServedModel, reference: ReferenceTokenizer
) -> None:
    window = WindowDetokenizer(lambda ids: reference.decode(ids, skip_special_tokens=True))
    broken = token_ids(model, "🜲")[:1]
    text = "".join(window.push(broken) for _ in range(40))
    assert text, "something comes out before the end"
    assert set(text + window.flush()) == {"\ufffd"}


def test_window_keeps_the_space_after_a_prompt() -> None:
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Metaspace()
    prompt, answer = tokenizer.encode("hello").ids, tokenizer.encode("world").ids
    with_prompt = WindowDetokenizer(lambda ids: tokenizer.decode(list(ids)), prompt)
    assert with_prompt.push(answer) == " world"
