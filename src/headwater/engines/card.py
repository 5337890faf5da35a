"""What a worker tells frontends about its model's texts: names and artifacts, from a resolved model."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from headwater.config.schema import EngineConfig
from headwater.protocol.cluster import Artifact


def text_artifacts(
    tokenizer_json: bytes, tokenizer_config: bytes | None, chat_template: str | None
) -> tuple[list[Artifact], dict[str, Path | bytes]]:
    """The card's artifact list, and the contents by digest."""
    files: Mapping[str, bytes | None] = {
        "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": tokenizer_config,
        "chat_template.jinja": None if chat_template is None else chat_template.encode(),
    }
    artifacts: list[Artifact] = []
    contents: dict[str, Path | bytes] = {}
    for name, content in files.items():
        if content is not None:
            digest = hashlib.sha256(content).hexdigest()
            artifacts.append(Artifact(name, digest, len(content)))
            contents[digest] = content
    return artifacts, contents


def served_names(config: EngineConfig, own_name: str) -> list[str]:
    """What the API calls the model; the first is the main name."""
    return list(config.served_model_name) or [own_name]


def stored_layout(name: str, details: object) -> str:
    """`name` of a layout, for an engine that goes to a store by itself.

    Ids of blocks are bound to it. In a store that outlives the engine, blocks of another release or kind of numbers
    must not be in the place of ours."""
    return f"{name}.{hashlib.blake2b(repr(details).encode(), digest_size=8).hexdigest()}"
