"""What TensorRT-LLM says of one step of a sequence, in our words."""

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.errors import WorkerLost
from headwater.protocol.request import SequenceOutput, TokenLogprobs


class OutputReader:
    """Reads one sequence's results as they come. `num_logprobs`: how many beside the chosen one; None: none at all."""

    def __init__(self, stream: int, num_logprobs: int | None, ends: frozenset[int]) -> None:
        self._stream = stream
        self._num_logprobs = num_logprobs
        self._ends = ends
        self._first = True

    def read(self, result: Any) -> SequenceOutput | None:
        """None when it says nothing. Raises `WorkerLost` when TensorRT-LLM has given up."""
        output = result.outputs[0]
        token_ids, reason = list(output.token_ids_diff), output.finish_reason
        if reason not in (None, "stop", "length"):
            raise WorkerLost(f"TensorRT-LLM gave up on this sequence ({reason})")
        told = self._logprobs(token_ids, output.logprobs_diff) if self._num_logprobs is not None else None
        stop_token_id = None
        if reason == "stop":
            stop_token_id = output.stop_reason if isinstance(output.stop_reason, int) else None
            if token_ids and (token_ids[-1] == stop_token_id or token_ids[-1] in self._ends):
                stop_token_id = token_ids.pop()
                told = told[: len(token_ids)] if told is not None else None
        if not token_ids and reason is None:
            return None
        cached = int(result.cached_tokens) if self._first else None
        self._first = False
        return SequenceOutput(self._stream, token_ids, reason, stop_token_id, cached, told)

    def _logprobs(self, token_ids: Sequence[int], found: Sequence[Mapping[int, Any]]) -> list[TokenLogprobs]:
        return [self._one(token, row) for token, row in zip(token_ids, found, strict=True)]

    def _one(self, chosen: int, row: Mapping[int, Any]) -> TokenLogprobs:
        ranked = sorted(row.items(), key=lambda pair: -pair[1].logprob)
        place = next((number for number, (token, _) in enumerate(ranked, 1) if token == chosen), len(ranked) + 1)
        own = row.get(chosen)
        top = ranked[: self._num_logprobs]
        return TokenLogprobs(
            float(own.logprob) if own is not None else 0.0,
            int(own.rank or place) if own is not None else place,
            [token for token, _ in top],
            [float(one.logprob) for _, one in top],
        )
