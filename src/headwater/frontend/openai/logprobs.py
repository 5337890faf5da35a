"""Log probabilities in the two shapes of the OpenAI API."""

from collections.abc import Sequence

from headwater.frontend.openai.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from headwater.frontend.openai.model import ServedModel
from headwater.frontend.postprocess.sequence import LoggedToken

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class LogprobWriter:
    """Spells tokens for one request."""

    def __init__(self, model: ServedModel, *, as_token_ids: bool) -> None:
        self._model = model
        self._as_token_ids = as_token_ids

    def chat(self, logged: Sequence[LoggedToken]) -> ChatLogprobs:
        return ChatLogprobs([self._entry(token) for token in logged])

    def completion(self, logged: Sequence[LoggedToken], num_top: int) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[self._spell(token.token_id) for token in logged],
            token_logprobs=[_finite(token.logprobs.logprob) for token in logged],
            top_logprobs=[self._top_by_text(token) for token in logged] if num_top else None,
            text_offset=[token.offset for token in logged],
        )

    def _entry(self, token: LoggedToken) -> TokenLogprob:
        return TokenLogprob(
            token=self._spell(token.token_id),
            logprob=_finite(token.logprobs.logprob),
            bytes=list(self._model.token_bytes(token.token_id)),
            top_logprobs=[
                TopLogprob(self._spell(token_id), _finite(logprob), list(self._model.token_bytes(token_id)))
                for token_id, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
            ],
        )

    def _top_by_text(self, token: LoggedToken) -> dict[str, float]:
        top = {
            self._spell(token_id): _finite(logprob)
            for token_id, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
        }
        top.setdefault(self._spell(token.token_id), _finite(token.logprobs.logprob))
        return top

    def _spell(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._model.token_text(token_id)


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST
