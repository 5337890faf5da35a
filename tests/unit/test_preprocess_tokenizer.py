"""Tokenizers: equal ids, bytes from end to end, the faster library only where it is proven right."""

import json
from array import array
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import ModelError
from headwater.frontend.preprocess import tokenizer as module
from headwater.frontend.preprocess.corpus import self_check_corpus
from headwater.frontend.preprocess.folding import folded
from headwater.frontend.preprocess.tokenizer import (
    FastTokenizer,
    ReferenceTokenizer,
    load_tokenizer,
    pack_ids,
    unpack_ids,
)
from headwater.frontend.preprocess.tokenizer_file import read_tokenizer_file
from headwater.weights import ResolvedModel


@pytest.fixture(scope="module")
def plain(demo_model: ResolvedModel) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(demo_model.tokenizer_json.decode())


@pytest.fixture(scope="module")
def fast(demo_model: ResolvedModel) -> FastTokenizer:
    return FastTokenizer(demo_model.tokenizer_json.decode())


@pytest.fixture(scope="module")
def one_step(demo_model: ResolvedModel) -> FastTokenizer:
    spelling = folded(demo_model.tokenizer_json.decode())
    assert spelling is not None
    return FastTokenizer(spelling)


@pytest.fixture(scope="module")
def reference(demo_model: ResolvedModel) -> ReferenceTokenizer:
    return ReferenceTokenizer(demo_model.tokenizer_json.decode())


@settings(deadline=None)
@given(text=st.text(max_size=200), special=st.booleans())
def test_both_libraries_equal_the_plain_encoding(
    plain: tokenizers.Tokenizer, fast: FastTokenizer, reference: ReferenceTokenizer, text: str, special: bool
) -> None:
    expected = array("I", plain.encode(text, add_special_tokens=special).ids).tobytes()
    assert reference.encode(text, add_special_tokens=special) == expected
    assert fast.encode(text, add_special_tokens=special) == expected


def test_special_tokens_in_the_text_are_recognised(fast: FastTokenizer) -> None:
    assert unpack_ids(fast.encode("<|im_start|>user<|im_end|>", add_special_tokens=False)) == [1, 4093, 2]


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet="  \n\t 019½Ⅷ٣abZ'sdlvmret!.,日🙂\u00a0\u3000", max_size=30))
def test_folding_two_steps_into_one_changes_no_id(
    reference: ReferenceTokenizer, one_step: FastTokenizer, text: str
) -> None:
    assert one_step.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "Digits", "individual_digits": False}, {"type": "ByteLevel", "add_prefix_space": False}],
        [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": True}],
        [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": False}],
        [{"type": "ByteLevel", "add_prefix_space": False}],
    ],
)
def test_other_steps_are_left_alone(steps: list[dict[str, object]]) -> None:
    assert folded(json.dumps({"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}})) is None
    assert folded("[]") is None


def test_a_folding_that_differs_is_not_used(demo_model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = demo_model.tokenizer_json.decode().replace('"Digits"', '"Whitespace"')
    monkeypatch.setattr(module, "folded", lambda _json: swapped)
    chosen = load_tokenizer(demo_model.tokenizer_json, "auto")
    assert chosen.backend == "fastokens"
    assert len(unpack_ids(chosen.encode("12", add_special_tokens=False))) == 2


def test_truncation_and_padding_of_the_file_are_switched_off(demo_model: ResolvedModel) -> None:
    file = tokenizers.Tokenizer.from_str(demo_model.tokenizer_json.decode())
    file.enable_truncation(4)
    file.enable_padding(length=64)
    for backend in (FastTokenizer, ReferenceTokenizer):
        ids = unpack_ids(backend(file.to_str()).encode("one two three four five six", add_special_tokens=False))
        assert 4 < len(ids) < 64


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 2**32 - 1)))
def test_packing_is_little_endian_and_reversible(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert packed == b"".join(token_id.to_bytes(4, "little") for token_id in ids)
    assert unpack_ids(packed) == ids


@pytest.mark.parametrize("ids", [[-1], [2**32], ["x"], [1.5]])
def test_what_is_no_id_is_not_packed(ids: list[Any]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        pack_ids(ids)


def test_the_fast_one_is_chosen_when_it_agrees(demo_model: ResolvedModel) -> None:
    assert load_tokenizer(demo_model.tokenizer_json, "auto").backend == "fastokens"
    assert load_tokenizer(demo_model.tokenizer_json, "tokenizers").backend == "tokenizers"


def test_a_difference_anywhere_in_the_corpus_disqualifies_the_fast_one(
    demo_model: ResolvedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    culprit = self_check_corpus()[20]

    class Wrong(FastTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
            ids = super().encode(text, add_special_tokens=add_special_tokens)
            return ids[4:] if text == culprit else ids

    monkeypatch.setattr(module, "FastTokenizer", Wrong)
    assert load_tokenizer(demo_model.tokenizer_json, "auto").backend == "tokenizers"
    assert "other ids than the reference" in caplog.text
    with pytest.raises(ModelError, match="other ids than the reference"):
        load_tokenizer(demo_model.tokenizer_json, "fastokens")


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"model": {"vocab": {}}}', b"[" * 10_000])
def test_files_that_are_no_tokenizer(data: bytes) -> None:
    with pytest.raises(ModelError):
        read_tokenizer_file(data)
    with pytest.raises(ModelError):
        load_tokenizer(data, "auto")


def test_bound_on_what_one_token_covers(demo_model: ResolvedModel, plain: tokenizers.Tokenizer) -> None:
    file = read_tokenizer_file(demo_model.tokenizer_json)
    bound = file.longest_token_chars
    assert bound is not None
    for text in (" " * 5000, "#" * 5000, "\n" * 5000, "👩‍👩‍👧‍👦" * 300, "a" * 5000, "<|endoftext|>" * 200):
        assert len(plain.encode(text, add_special_tokens=False).ids) * bound >= len(text)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"added_tokens": [{"id": 0, "content": "<x>", "rstrip": True}]},
    ],
)
def test_no_bound_where_text_may_vanish(demo_model: ResolvedModel, change: dict[str, Any]) -> None:
    changed = json.loads(demo_model.tokenizer_json) | change
    assert read_tokenizer_file(json.dumps(changed).encode()).longest_token_chars is None


def test_composition_is_allowed_for(demo_model: ResolvedModel) -> None:
    changed = json.loads(demo_model.tokenizer_json) | {"normalizer": {"type": "NFC"}}
    assert read_tokenizer_file(json.dumps(changed).encode()).longest_token_chars == 4 * 81
