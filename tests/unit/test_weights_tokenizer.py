"""Tokenizers rebuilt from GGUF metadata give the ids of the original, also through fastokens."""

import json
import random
from pathlib import Path
from typing import Any

import fastokens
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from gguf_fixtures import TOKENS, byte_level_tokens, write_vocabulary
from headwater.errors import ModelError
from headwater.weights import ResolvedModel, gguf_texts
from headwater.weights.gguf import read_gguf
from headwater.weights.gguf_tokenizer import tokenizer_config, tokenizer_json

CORPUS = (
    Path(__file__).read_text() + Path(random.__file__).read_text()[:60_000] + "Größe naïve 日本語 привет мир 👩‍👧 " * 20
)


def diverse_texts() -> list[str]:
    rng = random.Random(11)
    texts = [
        "Hello world",
        " leading and trailing  ",
        "The year 2024 had 366 days; 1,234,567.89! 1 2  3",
        "a\n\n\nb\t\tc \r\n\r\n x",
        "<|im_start|>user\nhi<|im_end|>\n<s>not</s>",
        "日本語のテキスト 한국어 العربية ١٢٣ ²³ ½ ⅷ",
        "👩‍👩‍👧‍👦 emoji 🎉🏽",
        "don't I'LL they're WE'VE 'tis o'clock",
        "x" * 300,
        "é e\u0301 ﬁ \u200b\u00a0\ufeff",
        "def f(x):\n    return x**2  # comment\n\n\n",
        "",
        "   ",
    ]
    ranges = [
        (32, 127),
        (0xA0, 0x250),
        (0x400, 0x500),
        (0x4E00, 0x4F00),
        (0x1F300, 0x1F700),
        (48, 58),
        (32, 33),
        (10, 11),
    ]
    lengths = [rng.randrange(1, 60) for _ in range(200)]
    return texts + ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(length)) for length in lengths]


def rebuilt(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(tokenizer_json(read_gguf(path)))


def assert_same_ids(got: Any, expected: Any, *, special: bool = False) -> None:
    for text in diverse_texts():
        ids = expected.encode(text, add_special_tokens=special).ids
        assert got.encode(text, add_special_tokens=special).ids == ids, text


def trained(pre_tokenizer: Any, normalizer: Any = None, *, whole_words: bool = False) -> tokenizers.Tokenizer:
    """A byte-level tokenizer trained on this file, as a publisher would have written it."""
    original = tokenizers.Tokenizer(models.BPE(ignore_merges=whole_words))
    original.pre_tokenizer = pre_tokenizer
    original.decoder = decoders.ByteLevel()
    if normalizer is not None:
        original.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [*TOKENS, "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    original.train_from_iterator([CORPUS], trainer)
    return original


def write_byte_level(path: Path, original: tokenizers.Tokenizer, pre: str, **metadata: Any) -> None:
    model = json.loads(original.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [3 if i < 5 else 1 for i in range(len(tokens))]
    merges = [" ".join(pair) for pair in model["merges"]]
    write_vocabulary(path, metadata, tokens=tokens, pre=pre, merges=merges, kinds=kinds)


def split_then_bytes(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def published_pattern(name: str) -> str:
    """The pre-tokenizer patterns as transformers has them for the original vocabularies."""
    if name == "qwen2":
        from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

        return str(PRETOKENIZE_REGEX)
    from transformers.convert_slow_tokenizer import TikTokenConverter

    return str(TikTokenConverter.__init__.__defaults__[1])


def original_of(pre: str) -> tokenizers.Tokenizer:
    match pre:
        case "gpt-2":
            return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
        case "smollm" | "starcoder":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return trained(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))
        case "qwen2":
            return trained(split_then_bytes(published_pattern("qwen2")), normalizers.NFC())
        case "llama-bpe":
            return trained(split_then_bytes(published_pattern("llama3")), whole_words=True)
    raise AssertionError(pre)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "starcoder", "qwen2", "llama-bpe"])
def test_byte_level_ids_equal_the_original(tmp_path: Path, pre: str) -> None:
    original = original_of(pre)
    write_byte_level(tmp_path / "t.gguf", original, pre)
    got = rebuilt(tmp_path / "t.gguf")
    assert_same_ids(got, original)
    assert_same_ids(fastokens.Tokenizer.from_json_str(got.to_str()), original)
    for text in diverse_texts():
        ids = got.encode(text, add_special_tokens=False).ids
        expected = original.normalizer.normalize_str(text) if original.normalizer else text
        assert got.decode(ids, skip_special_tokens=False) == expected


def test_llama3_starts_with_bos_unless_told_otherwise(tmp_path: Path) -> None:
    original = original_of("llama-bpe")
    write_byte_level(tmp_path / "a.gguf", original, "llama-bpe")
    assert rebuilt(tmp_path / "a.gguf").encode("hi").ids[0] == 1
    write_byte_level(tmp_path / "b.gguf", original, "llama-bpe", **{"tokenizer.ggml.add_bos_token": False})
    assert rebuilt(tmp_path / "b.gguf").encode("hi").ids[0] != 1
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    write_byte_level(tmp_path / "c.gguf", original_of("gpt-2"), "gpt-2", **flags)
    ids = rebuilt(tmp_path / "c.gguf").encode("hi").ids
    assert (ids[0], ids[-1]) == (1, 2)


def sentencepiece_like() -> tokenizers.Tokenizer:
    """A Llama-2-like tokenizer: BPE over ▁ with byte fallback. Trained merges stand for trained scores."""
    original = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    original.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [*TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=special, show_progress=False, limit_alphabet=90)
    # Words keep their ▁ at the front, as sentencepiece trains.
    original.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    original.train_from_iterator([CORPUS], trainer)
    document = json.loads(original.to_str())
    document["pre_tokenizer"] = None
    document["added_tokens"] = document["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def write_sentencepiece(path: Path, original: tokenizers.Tokenizer, **metadata: Any) -> None:
    model = json.loads(original.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(model["merges"])))}
    scores = [-float(ranks.get(token, 10_000)) for token in tokens]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    write_vocabulary(path, metadata, tokens=tokens, model="llama", pre=None, kinds=kinds, scores=scores)


def test_sentencepiece_ids_equal_the_original(tmp_path: Path) -> None:
    original = sentencepiece_like()
    write_sentencepiece(tmp_path / "t.gguf", original)
    got = rebuilt(tmp_path / "t.gguf")
    assert_same_ids(got, original)
    for text in diverse_texts():
        if "<s>" not in text:  # after a special token Llama tokenizers put a space of their own
            assert got.decode(got.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
    assert got.encode("hi").ids[0] == 1, "Llama tokenizers start with BOS"


def test_sentencepiece_without_the_leading_space(tmp_path: Path) -> None:
    original = sentencepiece_like()
    write_sentencepiece(tmp_path / "t.gguf", original, **{"tokenizer.ggml.add_space_prefix": False})
    got = rebuilt(tmp_path / "t.gguf")
    assert got.encode("hi", add_special_tokens=False).tokens[0][0] == "h"
    for text in diverse_texts():
        assert got.decode(got.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_the_demo_tokenizer_equals_transformers_conversion(demo_model: ResolvedModel) -> None:
    """transformers leaves out that SmolLM cuts digits one by one; with that put right the ids are equal."""
    import transformers

    file = demo_model.weight_files[0]
    theirs = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).backend_tokenizer
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = tokenizers.Tokenizer.from_buffer(demo_model.tokenizer_json)
    assert_same_ids(ours, theirs)
    assert_same_ids(fastokens.Tokenizer.from_json_str(demo_model.tokenizer_json.decode()), theirs)
    assert ours.encode("<|im_start|>").ids == [1]
    assert ours.encode("12 3").tokens == ["1", "2", "Ġ", "3"]


def test_user_defined_tokens_are_shown_and_unused_ones_never_match(tmp_path: Path) -> None:
    tokens = [*byte_level_tokens(), "<tool>", "[PAD9]"]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 5) + [4, 5]
    write_vocabulary(tmp_path / "t.gguf", tokens=tokens, kinds=kinds)
    got = rebuilt(tmp_path / "t.gguf")
    ids = got.encode("x<tool>[PAD9]").ids
    assert len(tokens) - 2 in ids
    assert len(tokens) - 1 not in ids
    assert got.decode(ids, skip_special_tokens=True) == "x<tool>[PAD9]"
    assert got.decode(got.encode("a</s>b").ids, skip_special_tokens=True) == "ab"


def test_an_embedded_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "t.gguf", {"tokenizer.huggingface.json": '{"model": {}}'})
    assert tokenizer_json(read_gguf(tmp_path / "t.gguf")) == b'{"model": {}}'


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ({"pre": "invented"}, "pre-tokenizer 'invented' is not known.*llama-bpe"),
        ({"pre": None}, "pre-tokenizer None is not known"),
        ({"model": "t5", "pre": None}, "tokenizer model 't5' cannot be rebuilt"),
        ({"kinds": [1, 1]}, "261 tokens but 2 token types"),
        ({"ids": {"bos": 999}}, "bos token 999 is outside the vocabulary of 261"),
        ({"merges": ["no such merge"]}, "no usable merges"),
        ({"model": "llama", "scores": [0.0]}, "261 tokens but 1 scores"),
        ({"tokens": []}, "no vocabulary"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(tmp_path: Path, vocabulary: dict[str, Any], message: str) -> None:
    write_vocabulary(tmp_path / "t.gguf", **vocabulary)
    with pytest.raises(ModelError, match=message):
        tokenizer_json(read_gguf(tmp_path / "t.gguf"))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_metadata_gives_a_tokenizer_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged-tokenizer.gguf"
    write_vocabulary(path, model="llama", pre=None, scores=[0.0] * 261)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        document = json.loads(gguf_texts.read(path).tokenizer_json())
    except ModelError:
        return
    assert document["model"]["type"] == "BPE"


def test_end_tokens_are_all_of_them(tmp_path: Path) -> None:
    tokens = [*byte_level_tokens(), "<|eot_id|>", "<|im_end|>", "<|end|>"]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 6) + [3, 3, 1]
    write_vocabulary(tmp_path / "t.gguf", tokens=tokens, kinds=kinds, ids={"eos": 2, "eot": 5, "eom": 10_000})
    texts = gguf_texts.read(tmp_path / "t.gguf")
    assert texts.eos_token_ids == (2, 5, len(tokens) - 3, len(tokens) - 2), "named, then known by their text"


def test_sampling_defaults_and_special_texts(tmp_path: Path) -> None:
    metadata = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    write_vocabulary(tmp_path / "t.gguf", metadata)
    texts = gguf_texts.read(tmp_path / "t.gguf")
    assert texts.default_sampling == pytest.approx({"temperature": 0.7, "top_k": 20.0, "repetition_penalty": 1.1})
    assert json.loads(tokenizer_config(texts.gguf)) == {"bos_token": "<s>", "eos_token": "</s>"}
