"""A Hugging Face tokenizer.json rebuilt from GGUF metadata.

Two families: byte-level BPE (`gpt2`), whose pre-tokenizer is named by `tokenizer.ggml.pre`, and SentencePiece BPE with
byte fallback (`llama`). A file that carries its tokenizer.json whole is taken at its word. An unknown pre-tokenizer is
refused: guessing one gives wrong tokens silently.
"""

import json
from dataclasses import dataclass
from typing import Final

from headwater.errors import ModelError
from headwater.weights.gguf import GgufFile

Json = dict[str, object]

_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5

_GPT2_SPLIT: Final = ""
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """How text is cut before merging."""

    split: str = _GPT2_SPLIT
    """Regular expression; empty: the one built into byte-level BPE."""
    single_digits: bool = False
    whole_words: bool = False
    """A piece that is in the vocabulary is taken as it is, whatever the merges say."""
    nfc: bool = False
    adds_bos: bool = False
    """Whether a sequence starts with BOS when the file does not say."""


_LLAMA3: Final = _Pre(_LLAMA3_SPLIT, whole_words=True, adds_bos=True)
_QWEN2: Final = _Pre(_QWEN2_SPLIT, nfc=True)
_GPT2: Final = _Pre()
_DIGITS: Final = _Pre(single_digits=True)

_PRE: Final = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "mpt": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": _Pre(_LLAMA3_SPLIT),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Pre(_TEKKEN_SPLIT, whole_words=True, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    kinds: list[int]
    bos: int | None
    eos: int | None
    adds_bos: bool
    adds_eos: bool

    def of_kind(self, *kinds: int) -> list[int]:
        return [i for i, kind in enumerate(self.kinds) if kind in kinds]


def tokenizer_json(gguf: GgufFile) -> bytes:
    """The content of tokenizer.json. Raises `ModelError` when the tokenizer cannot be rebuilt."""
    embedded = gguf.text("tokenizer.huggingface.json")
    if embedded is not None:
        return embedded.encode()
    model = gguf.text("tokenizer.ggml.model")
    if model == "gpt2":
        document = _byte_level(gguf)
    elif model == "llama":
        document = _sentencepiece(gguf)
    else:
        raise ModelError(
            f"{gguf.path.name}: tokenizer model {model!r} cannot be rebuilt (supported: gpt2, llama)",
            hint="Give the folder or tokenizer.json of the original model with --tokenizer.",
        )
    return json.dumps(document, ensure_ascii=False).encode()


def tokenizer_config(gguf: GgufFile) -> bytes:
    """The parts of tokenizer_config.json that a chat template refers to."""
    tokens = gguf.texts("tokenizer.ggml.tokens") or []
    config: Json = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = gguf.integer(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    return json.dumps(config, ensure_ascii=False).encode()


def _vocabulary(gguf: GgufFile, *, adds_bos: bool) -> _Vocabulary:
    tokens = gguf.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{gguf.path.name} has no vocabulary", hint="Give a tokenizer with --tokenizer.")
    kinds = gguf.integers("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"{gguf.path.name}: {len(tokens)} tokens but {len(kinds)} token types")
    bos, eos = (_token_id(gguf, name, len(tokens)) for name in ("bos", "eos"))
    says_bos, says_eos = gguf.flag("tokenizer.ggml.add_bos_token"), gguf.flag("tokenizer.ggml.add_eos_token")
    return _Vocabulary(tokens, kinds, bos, eos, adds_bos if says_bos is None else says_bos, bool(says_eos))


def _token_id(gguf: GgufFile, name: str, num_tokens: int) -> int | None:
    token_id = gguf.integer(f"tokenizer.ggml.{name}_token_id")
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise ModelError(f"{gguf.path.name}: {name} token {token_id} is outside the vocabulary of {num_tokens}")
    return token_id


def _byte_level(gguf: GgufFile) -> Json:
    name = gguf.text("tokenizer.ggml.pre")
    pre = _PRE.get(name or "")
    if pre is None:
        raise ModelError(
            f"{gguf.path.name}: pre-tokenizer {name!r} is not known (known: {', '.join(sorted(_PRE))})",
            hint="Give the folder or tokenizer.json of the original model with --tokenizer.",
        )
    vocabulary = _vocabulary(gguf, adds_bos=pre.adds_bos)
    vocab = _ids_by_text(vocabulary)
    model: Json = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre.whole_words,
        "vocab": vocab,
        "merges": _written_merges(gguf, vocab),
    }
    decoder: Json = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    normalizer: Json | None = {"type": "NFC"} if pre.nfc else None
    return _document(vocabulary, model, normalizer, _pre_tokenizer(gguf, pre), decoder)


def _pre_tokenizer(gguf: GgufFile, pre: _Pre) -> Json:
    prefix = bool(gguf.flag("tokenizer.ggml.add_space_prefix"))
    steps: list[Json] = []
    if pre.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if pre.split:
        steps.append({"type": "Split", "pattern": {"Regex": pre.split}, "behavior": "Isolated", "invert": False})
    steps.append({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": not pre.split})
    return {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]


def _written_merges(gguf: GgufFile, vocab: dict[str, int]) -> list[list[str]]:
    """The file's merges, best first. One that leads out of the vocabulary can never be applied and is left out."""
    merges: list[list[str]] = []
    for text in gguf.texts("tokenizer.ggml.merges") or []:
        cut = text.find(" ", 1)
        left, right = text[:cut], text[cut + 1 :]
        if cut > 0 and left in vocab and right in vocab and left + right in vocab:
            merges.append([left, right])
    if not merges:
        raise ModelError(f"{gguf.path.name} has no usable merges", hint="Give a tokenizer with --tokenizer.")
    return merges


def _sentencepiece(gguf: GgufFile) -> Json:
    vocabulary = _vocabulary(gguf, adds_bos=True)
    scores = gguf.numbers("tokenizer.ggml.scores") or []
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{gguf.path.name}: {len(vocabulary.tokens)} tokens but {len(scores)} scores")
    vocab = _ids_by_text(vocabulary)
    unknown = vocabulary.of_kind(_UNKNOWN)
    model: Json = {
        "type": "BPE",
        "dropout": None,
        "unk_token": vocabulary.tokens[unknown[0]] if unknown else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": _scored_merges(vocabulary, vocab, scores),
    }
    space: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    to_space: Json = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    normalizer: Json = space
    decoders: list[Json] = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if gguf.flag("tokenizer.ggml.add_space_prefix") is not False:
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _document(vocabulary, model, normalizer, None, {"type": "Sequence", "decoders": decoders})


def _scored_merges(vocabulary: _Vocabulary, vocab: dict[str, int], scores: list[float]) -> list[list[str]]:
    """SentencePiece joins the neighbours whose union has the best score: every split of every piece, best first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece_id in vocabulary.of_kind(_NORMAL):
        piece = vocabulary.tokens[piece_id]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[piece_id], -len(left), -len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3])
    return [[left, right] for _, _, _, left, right in ranked]


def _ids_by_text(vocabulary: _Vocabulary) -> dict[str, int]:
    """Unused slots carry made-up names that must never match text; of equal names the first is meant."""
    vocab: dict[str, int] = {}
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind != _UNUSED:
            vocab.setdefault(text, token_id)
    return vocab


def _document(
    vocabulary: _Vocabulary, model: Json, normalizer: Json | None, pre_tokenizer: Json | None, decoder: Json
) -> Json:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(vocabulary),
        "decoder": decoder,
        "model": model,
    }


def _added_tokens(vocabulary: _Vocabulary) -> list[Json]:
    return [
        {
            "id": token_id,
            "content": vocabulary.tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.kinds[token_id] != _USER_DEFINED,
        }
        for token_id in vocabulary.of_kind(_UNKNOWN, _CONTROL, _USER_DEFINED)
        if vocabulary.tokens[token_id]
    ]


def _post_processor(vocabulary: _Vocabulary) -> Json | None:
    before = [vocabulary.bos] if vocabulary.adds_bos and vocabulary.bos is not None else []
    after = [vocabulary.eos] if vocabulary.adds_eos and vocabulary.eos is not None else []
    if not before and not after:
        return None

    def special(token_id: int, type_id: int) -> Json:
        return {"SpecialToken": {"id": vocabulary.tokens[token_id], "type_id": type_id}}

    def sequence(name: str, type_id: int) -> list[Json]:
        content: Json = {"Sequence": {"id": name, "type_id": type_id}}
        return [*(special(i, type_id) for i in before), content, *(special(i, type_id) for i in after)]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            vocabulary.tokens[i]: {"id": vocabulary.tokens[i], "ids": [i], "tokens": [vocabulary.tokens[i]]}
            for i in before + after
        },
    }
