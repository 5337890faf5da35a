"""What a frontend needs from a GGUF model: tokenizer, template, end tokens, sampling defaults, and the shards.

End tokens follow the convention of GGUF runtimes: the ids the metadata names, and every control token whose text is a
known end of turn or document, because publishers often name only one of them.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwater.errors import ModelError
from headwater.weights import gguf_tokenizer
from headwater.weights.gguf import GgufFile, read_gguf

_END_TEXTS: Final = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>"}
)
_CONTROL: Final = 3
_SHARD: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_SHARDS: Final = 1024
_SAMPLING_KEYS: Final = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class GgufTexts:
    """The non-tensor part of a GGUF model."""

    gguf: GgufFile
    files: tuple[Path, ...]
    """All shards, the first being `gguf`."""
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]
    tokenizer_config: bytes

    def tokenizer_json(self) -> bytes:
        return gguf_tokenizer.tokenizer_json(self.gguf)


def read(file: Path) -> GgufTexts:
    """Read the metadata of a GGUF model, given its only or first file. Raises `ModelError`."""
    gguf = read_gguf(file)
    return GgufTexts(
        gguf=gguf,
        files=shard_files(gguf),
        chat_template=gguf.text("tokenizer.chat_template"),
        bos_token_id=gguf.integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_tokens(gguf),
        default_sampling=_default_sampling(gguf),
        tokenizer_config=gguf_tokenizer.tokenizer_config(gguf),
    )


def model_name(file: Path) -> str:
    """The file's name without its ending and part number, in lower case."""
    matched = _SHARD.fullmatch(file.name)
    return (matched["stem"] if matched else file.stem).lower()


def is_first_shard(file: Path) -> bool:
    """Whether a model can be opened through this file: it is not split, or it is the first part."""
    matched = _SHARD.fullmatch(file.name)
    return matched is None or int(matched["number"]) == 1


def shard_files(gguf: GgufFile) -> tuple[Path, ...]:
    """All files of a split model, in order. Their names follow from the first one's, never from metadata."""
    count = gguf.integer("split.count") or 1
    if count == 1:
        return (gguf.path,)
    matched = _SHARD.fullmatch(gguf.path.name)
    if not 1 < count <= _MAX_SHARDS or matched is None or int(matched["count"]) != count:
        raise ModelError(f"{gguf.path.name} says it is one of {count} parts, but is not named so")
    if int(matched["number"]) != 1:
        raise ModelError(f"{gguf.path.name} is not the first part", hint=f"Name {matched['stem']}-00001-of-...")
    files = tuple(gguf.path.with_name(f"{matched['stem']}-{n + 1:05}-of-{count:05}.gguf") for n in range(count))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"parts of {matched['stem']} are missing: {', '.join(missing[:5])}")
    return files


def _end_tokens(gguf: GgufFile) -> tuple[int, ...]:
    ids = [gguf.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = gguf.texts("tokenizer.ggml.tokens") or [], gguf.integers("tokenizer.ggml.token_type") or []
    named = [
        i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL and text in _END_TEXTS
    ]
    return tuple(dict.fromkeys(i for i in [*ids, *named] if i is not None and 0 <= i < len(tokens)))


def _default_sampling(gguf: GgufFile) -> dict[str, float]:
    found = {name: gguf.number(f"general.sampling.{key}") for key, name in _SAMPLING_KEYS.items()}
    return {name: value for name, value in found.items() if value is not None}
