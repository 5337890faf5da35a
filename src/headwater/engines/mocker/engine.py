"""`MockerEngine`: everything of a worker but the model. Boots in a fraction of a second.

Texts (tokenizer, chat template) come from `tokenizer` alone when it is given, so that no weights are fetched; else
from the model, by default the demo model. Sizes that are not configured are those of a mid-sized GPU worker.
"""

import hashlib
from functools import partial
from pathlib import Path

from headwater.config.schema import EngineConfig
from headwater.engines.base import ALONE, EngineInfo, Placement, Progress, ProgressSink
from headwater.engines.card import served_names, text_artifacts
from headwater.engines.core import BuiltEngine
from headwater.engines.engine import CoreEngine
from headwater.engines.loop import InlineLoop
from headwater.engines.mocker.executor import MockerExecutor, StepTimes
from headwater.engines.mocker.marks import KvMarks
from headwater.engines.mocker.words import Vocabulary, read_vocabulary
from headwater.engines.texts import ModelTexts, model_texts
from headwater.protocol.cluster import ModelCard

_KV_BYTES_PER_TOKEN = 65_536
_NUM_BLOCKS = 16_384
_MAX_MODEL_LEN = 131_072
_MAX_NUM_BATCHED_TOKENS = 8_192


class MockerEngine(CoreEngine):
    """See `headwater.engines.base.Engine`."""

    def __init__(self, config: EngineConfig, placement: Placement = ALONE) -> None:
        super().__init__(config, partial(_build, config), InlineLoop(config.mocker_speedup))


def _build(config: EngineConfig, progress: ProgressSink) -> BuiltEngine:
    texts = model_texts(config, progress)
    vocabulary = read_vocabulary(texts.tokenizer_json)
    times = StepTimes.of(config)
    num_blocks = _num_blocks(config)
    card, contents = _card(config, texts, vocabulary, num_blocks)
    info = EngineInfo(
        engine="mocker",
        card=card,
        artifacts=contents,
        kv_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens
        or max(_MAX_NUM_BATCHED_TOKENS, config.max_num_seqs + config.block_size),
        hardware=f"mocker-{times.prefill_per_token:g}-{times.decode_base:g}-{times.decode_per_sequence:g}"
        f"-{times.decode_per_kv_token:g}",
        batch_invariant=True,
    )
    progress(Progress("ready", detail=card.name))
    marks = KvMarks(num_blocks, config.block_size)
    return BuiltEngine(
        MockerExecutor(times, vocabulary.words, marks, config.block_size),
        info,
        kv=marks.memory(
            _KV_BYTES_PER_TOKEN * config.block_size, 1e9 * config.mocker_transfer_gb_per_s * config.mocker_speedup
        ),
    )


def _num_blocks(config: EngineConfig) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory // (_KV_BYTES_PER_TOKEN * config.block_size)
    return _NUM_BLOCKS


def _card(
    config: EngineConfig, texts: ModelTexts, vocabulary: Vocabulary, num_blocks: int
) -> tuple[ModelCard, dict[str, Path | bytes]]:
    artifacts, contents = text_artifacts(texts.tokenizer_json, texts.tokenizer_config, texts.chat_template)
    names = served_names(config, texts.name)
    card = ModelCard(
        name=names[0],
        served_names=names,
        fingerprint=hashlib.sha256(f"mocker {texts.fingerprint}".encode()).hexdigest(),
        architecture="Mocker",
        dtype="none",
        kv_layout=f"mocker.b{config.block_size}",
        max_model_len=min(config.max_model_len or _MAX_MODEL_LEN, num_blocks * config.block_size),
        block_size=config.block_size,
        vocab_size=vocabulary.size,
        bos_token_id=texts.bos_token_id,
        eos_token_ids=list(texts.eos_token_ids),
        artifacts=artifacts,
        default_sampling=texts.default_sampling,
        kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
    )
    return card, contents
