"""What an engine's sizes, what its configuration says of the line before it, and what is there already allow."""

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo
from headwater.errors import InvalidRequest
from headwater.kv.identity import namespace
from headwater.protocol.request import EngineRequest, SamplingParams
from headwater.scheduler.limits import SchedulerLimits
from headwater.types import TOKEN_ID_BYTES


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


def num_resumed(request: EngineRequest) -> int:
    """Tokens generated elsewhere, which an engine gets as prompt. Raises `InvalidRequest` when they are all of them."""
    count = len(request.resumed_tokens) // TOKEN_ID_BYTES
    if count >= request.sampling.max_tokens:
        raise InvalidRequest(f"{count} tokens are there already of {request.sampling.max_tokens}")
    return count


def check_resumable(params: SamplingParams, num_resumed: int, engine: str) -> None:
    """For engines to which what was generated elsewhere is prompt: their grammars would begin anew behind it.

    Raises `InvalidRequest`."""
    if num_resumed and params.structured is not None:
        message = f"{engine} cannot go on in the middle of a structured output"
        raise InvalidRequest(message, param=params.structured.param)
