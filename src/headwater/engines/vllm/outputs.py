"""What vLLM's engine core says of one step, in our words."""

from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason

from headwater.errors import WorkerLost
from headwater.protocol.request import SequenceOutput, TokenLogprobs

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.REPETITION: "stop"}


def sequence_output(stream: int, output: EngineCoreOutput, *, first: bool, logprobs: bool) -> SequenceOutput:
    """The stop token is not part of the output; vLLM sends it along."""
    token_ids = list(output.new_token_ids)
    told = _logprobs(output.new_logprobs) if logprobs else None
    reason = output.finish_reason
    if reason in (FinishReason.ABORT, FinishReason.ERROR):
        error = WorkerLost(f"vLLM gave up on this sequence ({reason})")
        return SequenceOutput.failed(stream, error)
    stop_token_id = None
    if reason == FinishReason.STOP and token_ids:
        stop_token_id = token_ids.pop()
        told = told[: len(token_ids)] if told is not None else None
    stats = output.prefill_stats
    return SequenceOutput(
        stream,
        token_ids,
        None if reason is None else _REASONS.get(reason, "stop"),
        stop_token_id,
        stats.num_cached_tokens if first and stats is not None else None,
        told,
    )


def _logprobs(lists: Any) -> list[TokenLogprobs]:
    """Each row: the chosen token, then the most likely ones."""
    if lists is None:
        return []
    ids, values, ranks = lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), lists.sampled_token_ranks.tolist()
    return [
        TokenLogprobs(row[0], rank, row_ids[1:], row[1:]) for row_ids, row, rank in zip(ids, values, ranks, strict=True)
    ]
