"""The texts of a model (tokenizer, chat template, special ids), without its weights where that is possible."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headwater.config.schema import EngineConfig
from headwater.engines.base import ProgressSink
from headwater.errors import ConfigError, ModelError
from headwater.weights import documents
from headwater.weights.base import ResolvedModel
from headwater.weights.resolve import resolve


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """What frontends need of a model."""

    name: str
    tokenizer_json: bytes
    tokenizer_config: bytes | None
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]
    fingerprint: str

    @classmethod
    def of(cls, model: ResolvedModel) -> Self:
        """As resolved."""
        return cls(
            model.name,
            model.tokenizer_json,
            model.tokenizer_config,
            model.chat_template,
            model.bos_token_id,
            model.eos_token_ids,
            model.default_sampling,
            model.fingerprint,
        )


def model_texts(config: EngineConfig, progress: ProgressSink) -> ModelTexts:
    """From the tokenizer's folder when one is given, else from the resolved model. Raises `ModelError`."""
    if config.tokenizer is not None:
        return _beside_tokenizer(config, Path(config.tokenizer).expanduser())
    model = resolve(config.model, revision=config.revision, chat_template=config.chat_template, progress=progress)
    return ModelTexts.of(model)


def texts_and_weights(config: EngineConfig, engine: str, progress: ProgressSink) -> tuple[ModelTexts, str]:
    """The texts that frontends need, and the folder or name of what a stock engine is to load.

    Raises `ConfigError`, `ModelError`."""
    if config.model is None:
        raise ConfigError(f"--engine {engine} needs a MODEL", hint="a folder with safetensors or a hub id")
    if config.tokenizer is not None:
        return model_texts(config, progress), config.model
    model = resolve(config.model, revision=config.revision, chat_template=config.chat_template, progress=progress)
    if model.kind != "safetensors":
        raise ModelError(f"{model.origin} is a GGUF file, served by --engine native; {engine} wants safetensors")
    return ModelTexts.of(model), str(model.weight_files[0].parent)


def _beside_tokenizer(config: EngineConfig, path: Path) -> ModelTexts:
    tokenizer_json = documents.tokenizer_file(config.tokenizer, None)
    if tokenizer_json is None:
        raise ModelError(f"no tokenizer at {path}")
    folder = path if path.is_dir() else path.parent
    tokenizer_config = documents.read_json_if_there(folder / "tokenizer_config.json")
    own = documents.read_json_if_there(folder / "config.json")
    generation = documents.read_json_if_there(folder / "generation_config.json")
    bos = documents.token_ids(generation.get("bos_token_id", own.get("bos_token_id")))
    eos = documents.token_ids(generation.get("eos_token_id", own.get("eos_token_id")))
    config_file = folder / "tokenizer_config.json"
    return ModelTexts(
        name=(Path(config.model).name if config.model else folder.resolve().name).lower(),
        tokenizer_json=tokenizer_json,
        tokenizer_config=config_file.read_bytes() if tokenizer_config else None,
        chat_template=documents.chat_template(config.chat_template, folder, tokenizer_config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        default_sampling=documents.sampling_defaults(generation),
        fingerprint=hashlib.sha256(tokenizer_json).hexdigest(),
    )
