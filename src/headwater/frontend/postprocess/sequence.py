"""One sequence's output: token ids in, text deltas out, with stop strings and aligned log probabilities.

Entries of log probabilities leave together with the text they belong to, and those cut off by a stop string never
leave. After `finish_reason` is set nothing more is produced.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from headwater.frontend.postprocess.detokenize import Detokenizer
from headwater.frontend.postprocess.stop import StopMatcher
from headwater.protocol.request import SequenceOutput, TokenLogprobs


@dataclass(slots=True)
class LoggedToken:
    """One generated token with its log probabilities."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int
    """Characters of generated text before it."""


@dataclass(slots=True)
class Delta:
    """What one step added to a sequence."""

    text: str
    token_ids: list[int]
    logged: list[LoggedToken] = field(default_factory=list[LoggedToken])
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or the id of the stop token that ended the sequence; None for the model's own end."""


class TextOptions(msgspec.Struct, frozen=True):
    """What decides how tokens become text."""

    min_tokens: int = 0
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    """Those that the client named: they are reported as `stop_reason`."""


class SequenceText:
    """The text of one sequence as it grows."""

    __slots__ = ("_decoded", "_detokenizer", "_matcher", "_options", "_shown", "_waiting", "num_tokens", "stopped")

    def __init__(self, options: TextOptions, detokenizer: Detokenizer, matcher: StopMatcher | None) -> None:
        self._options = options
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._waiting: deque[LoggedToken] = deque()
        self._decoded = 0
        """Characters decoded, shown or held back."""
        self._shown = 0
        self.num_tokens = 0
        """Generated tokens, the end token included, tokens after a stop string not."""
        self.stopped = False
        """Ended by a stop string, of which the engine knows nothing."""

    def push(self, output: SequenceOutput) -> Delta:
        """The delta of one step."""
        if self._matcher is None and output.logprobs is None:
            delta = self._push_plain(output)
        else:
            delta = self._push_each(output)
        if output.finish_reason is not None and not self.stopped:
            self._finish(delta, output)
        return delta

    def _push_plain(self, output: SequenceOutput) -> Delta:
        ids = output.token_ids
        self.num_tokens += len(ids)
        return Delta(self._detokenizer.push(ids) if ids else "", ids)

    def _push_each(self, output: SequenceOutput) -> Delta:
        parts: list[str] = []
        delta = Delta("", output.token_ids)
        for number, token_id in enumerate(output.token_ids):
            if output.logprobs is not None:
                self._waiting.append(LoggedToken(token_id, output.logprobs[number], self._decoded))
            self.num_tokens += 1
            parts.append(self._show(self._detokenizer.push((token_id,)), delta))
            if self.stopped:
                delta.token_ids = output.token_ids[: number + 1]
                break
        delta.text = "".join(parts)
        self._release(delta)
        return delta

    def _show(self, text: str, delta: Delta) -> str:
        """Pass decoded text through the stop matcher."""
        self._decoded += len(text)
        stop: str | None = None
        if text and self._matcher is not None and self.num_tokens > self._options.min_tokens:
            text, stop = self._matcher.push(text)
        self._shown += len(text)
        if stop is not None:
            self.stopped = True
            delta.finish_reason, delta.stop_reason = "stop", stop
        return text

    def _finish(self, delta: Delta, output: SequenceOutput) -> None:
        tail = ""
        stop_token = output.stop_token_id
        if stop_token is not None:
            self.num_tokens += 1
            if self._options.include_stop:
                tail = self._detokenizer.push((stop_token,))
        delta.text += self._show(tail + self._detokenizer.flush(), delta)
        if not self.stopped:
            if self._matcher is not None:
                held = self._matcher.flush()
                self._shown += len(held)
                delta.text += held
            delta.finish_reason = output.finish_reason
            delta.stop_reason = stop_token if stop_token in self._options.stop_token_ids else None
        self._release(delta)

    def _release(self, delta: Delta) -> None:
        """Hand out the log entries whose text is out; at the natural end, all."""
        ended = delta.finish_reason is not None and not self.stopped
        while self._waiting and (ended or self._waiting[0].offset < self._shown):
            delta.logged.append(self._waiting.popleft())
