"""What vLLM's `LLM` returns."""

from dataclasses import dataclass, field

from headwater.frontend.openai.model import ServedModel
from headwater.frontend.postprocess.sequence import LoggedToken


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt and its sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int | None = None


def logged_position(token: LoggedToken, model: ServedModel) -> dict[int, Logprob]:
    """The chosen token and the most likely ones, by id."""
    found = token.logprobs
    position = {
        other: Logprob(value, rank, model.token_text(other))
        for rank, (other, value) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1)
    }
    position[token.token_id] = Logprob(found.logprob, found.rank, model.token_text(token.token_id))
    return position
