"""What an engine's sizes, and what its configuration says of the line before it, allow."""

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo
from headwater.kv.identity import namespace
from headwater.scheduler.limits import SchedulerLimits


def limits_of(config: EngineConfig, info: EngineInfo) -> SchedulerLimits:
    """Raises `ConfigError` for sizes that do not fit together."""
    card = info.card
    return SchedulerLimits(
        num_blocks=info.kv_blocks,
        block_size=card.block_size,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        prefix_caching=config.enable_prefix_caching,
        eos_token_ids=frozenset(card.eos_token_ids),
        namespace=namespace(card.fingerprint, card.kv_layout),
    )
