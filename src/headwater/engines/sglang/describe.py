"""What SGLang turned out to be once it has loaded its model."""

import hashlib
import platform
import socket

import msgspec

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo
from headwater.engines.card import served_names, stored_layout, text_artifacts
from headwater.engines.sglang.host import Started
from headwater.engines.sglang_wire.settings import SglangSettings
from headwater.engines.texts import ModelTexts
from headwater.errors import EngineFailed
from headwater.protocol.cluster import ModelCard

_CHUNK_TOKENS = 8192
"""Where prompts are not cut."""
_ANY_HOST = ("0.0.0.0", "::", "*")


def settings_of(started: Started) -> SglangSettings:
    """Raises `EngineFailed`."""
    try:
        return SglangSettings.read(started.server_info, started.context_len)
    except msgspec.ValidationError as error:
        raise EngineFailed(f"what SGLang says of itself is not understood: {error}") from error


def engine_info(
    config: EngineConfig,
    texts: ModelTexts,
    started: Started,
    settings: SglangSettings,
    adapters: list[str],
    *,
    stored: bool,
) -> EngineInfo:
    """`stored`: whether it goes to the store of the host."""
    artifacts, contents = text_artifacts(texts.tokenizer_json, texts.tokenizer_config, texts.chat_template)
    names = served_names(config, texts.name)
    block_size = settings.page_size or config.block_size
    card = ModelCard(
        name=names[0],
        served_names=[*names, *adapters],
        fingerprint=hashlib.sha256(f"sglang {texts.fingerprint} {started.dtype} {block_size}".encode()).hexdigest(),
        architecture=started.architecture,
        dtype=started.dtype,
        kv_layout=_layout(started, settings, block_size, stored=stored),
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
        hardware=f"sglang-{platform.machine()}x{settings.tp_size * settings.pp_size}",
        batch_invariant=False,
        role=settings.role,
        paired=settings.role is not None,
        bootstrap=f"{_own_host(started)}:{settings.bootstrap_port}" if settings.bootstrap_port else "",
        store=stored,
        num_ranks=settings.tp_size * settings.pp_size,
    )


def _layout(started: Started, settings: SglangSettings, block_size: int, *, stored: bool) -> str:
    """A store keeps the blocks of each number of ranks apart."""
    name = f"sglang.{started.dtype}.b{block_size}"
    if not stored:
        return name
    said = started.server_info
    ranks = settings.tp_size, settings.pp_size, settings.dp_size, said.get("enable_dp_attention")
    return stored_layout(name, (settings.version, said.get("kv_cache_dtype"), said.get("quantization"), ranks))


def _own_host(started: Started) -> str:
    """Where engines that decode reach this one: what SGLang listens on, or this host if that is everywhere."""
    host = str(started.server_info.get("host") or "127.0.0.1")
    return socket.gethostname() if host in _ANY_HOST else host
