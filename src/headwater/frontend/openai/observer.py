"""What the API layer tells whoever measures it. Calls are on the event loop and must be cheap."""

from dataclasses import dataclass
from typing import Literal, Protocol

from headwater.errors import HeadwaterError

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """The end of one generation request."""

    outcome: str
    """`stop`, `length`, `tool_calls`, `disconnected`, or the code of an error. Of several choices, the first."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    duration_s: float
    """Since the request began to arrive."""
    error: HeadwaterError | None = None


class RequestObserver(Protocol):
    """One accepted generation request."""

    def first_token(self, ttft_s: float) -> None:
        """Once per choice."""
        ...

    def tokens(self, count: int, gap_s: float) -> None:
        """A later step of one choice brought `count` tokens, `gap_s` after the step before."""
        ...

    def finished(self, summary: RequestSummary) -> None:
        """Exactly once."""
        ...


class ServingObserver(Protocol):
    def accepted(self, endpoint: Endpoint, model: str, prompt_tokens: int, choices: int) -> RequestObserver:
        """A request was understood and is about to be sent to a worker."""
        ...

    def refused(self, endpoint: Endpoint, model: str, error: HeadwaterError) -> None:
        """A request ended before that. `model` is empty where unknown."""
        ...


class NullObserver:
    """Measures nothing."""

    def accepted(self, endpoint: Endpoint, model: str, prompt_tokens: int, choices: int) -> RequestObserver:
        return _NullRequest()

    def refused(self, endpoint: Endpoint, model: str, error: HeadwaterError) -> None:
        pass


class _NullRequest:
    def first_token(self, ttft_s: float) -> None:
        pass

    def tokens(self, count: int, gap_s: float) -> None:
        pass

    def finished(self, summary: RequestSummary) -> None:
        pass
