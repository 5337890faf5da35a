"""What SGLang is to load, and what it turned out to be once it has."""

import hashlib
import platform

import msgspec

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo, ProgressSink
from headwater.engines.card import served_names, text_artifacts
from headwater.engines.sglang.host import Started
from headwater.engines.sglang_wire.settings import SglangSettings
from headwater.engines.texts import ModelTexts, model_texts
from headwater.errors import ConfigError, EngineFailed, ModelError
from headwater.protocol.cluster import ModelCard
from headwater.weights.resolve import resolve

_CHUNK_TOKENS = 8192
"""Where prompts are not cut."""


def resolved(config: EngineConfig, progress: ProgressSink) -> tuple[ModelTexts, str]:
    """The texts that frontends need, and what SGLang is to load."""
    if config.model is None:
        raise ConfigError("--engine sglang needs a MODEL", hint="a folder with safetensors or a hub id")
    if config.tokenizer is not None:
        return model_texts(config, progress), config.model
    model = resolve(config.model, revision=config.revision, chat_template=config.chat_template, progress=progress)
    if model.kind != "safetensors":
        raise ModelError(f"{model.origin} is a GGUF file, which is served by --engine native; SGLang wants safetensors")
    return ModelTexts.of(model), str(model.weight_files[0].parent)


def settings_of(started: Started) -> SglangSettings:
    """Raises `EngineFailed`."""
    try:
        return SglangSettings.read(started.server_info, started.context_len)
    except msgspec.ValidationError as error:
        raise EngineFailed(f"what SGLang says of itself is not understood: {error}") from error


def engine_info(
    config: EngineConfig, texts: ModelTexts, started: Started, settings: SglangSettings, adapters: list[str]
) -> EngineInfo:
    artifacts, contents = text_artifacts(texts.tokenizer_json, texts.tokenizer_config, texts.chat_template)
    names = served_names(config, texts.name)
    block_size = settings.page_size or config.block_size
    card = ModelCard(
        name=names[0],
        served_names=[*names, *adapters],
        fingerprint=hashlib.sha256(f"sglang {texts.fingerprint} {started.dtype} {block_size}".encode()).hexdigest(),
        architecture=started.architecture,
        dtype=started.dtype,
        kv_layout=f"sglang.{started.dtype}.b{block_size}",
        max_model_len=started.context_len,
        block_size=block_size,
        vocab_size=started.vocab_size,
        bos_token_id=texts.bos_token_id,
        eos_token_ids=list(texts.eos_token_ids),
        artifacts=artifacts,
        adapters=adapters,
        default_sampling=texts.default_sampling,
    )
    chunk = settings.chunked_prefill_size or 0
    return EngineInfo(
        engine="sglang",
        card=card,
        artifacts=contents,
        kv_blocks=max(1, settings.max_total_num_tokens // block_size * settings.dp_size),
        max_num_seqs=settings.max_running_requests or config.max_num_seqs,
        max_num_batched_tokens=chunk if chunk > 0 else _CHUNK_TOKENS,
        hardware=f"sglang-{platform.machine()}x{config.tensor_parallel_size}",
        batch_invariant=False,
    )
