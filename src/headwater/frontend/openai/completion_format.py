"""How plain completions look on the wire, whole and streamed."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headwater.frontend.openai.answers import CompletionAnswer, CompletionChoice, CompletionLogprobs, Usage
from headwater.frontend.openai.chat_format import Head
from headwater.frontend.openai.generation import Extension
from headwater.frontend.openai.logprobs import LogprobWriter
from headwater.frontend.postprocess.sequence import Delta

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """What the client wants to see."""

    choices_per_prompt: int = 1
    usage_in_events: bool = False
    token_ids: bool = False
    prompt_token_ids: list[list[int]] | None = None
    """Per prompt."""
    echo: list[str] | None = None
    """Texts of the prompts, to be repeated before the answers."""
    num_top_logprobs: int = 0
    plain: bool = True
    """Events carry nothing but text."""


class CompletionFormat:
    def __init__(self, head: Head, options: CompletionOptions, logprobs: LogprobWriter | None) -> None:
        self._head = head
        self._options = options
        self._logprobs = logprobs

    def opening(self, choice: int) -> bytes:
        echo = self._echo(choice)
        entry = CompletionChoice(choice, echo, None, None)
        self._add_prompt_ids(entry)
        if not echo and entry.prompt_token_ids is msgspec.UNSET:
            return b""
        return _event(self._answer([entry], None, None))

    def frame(self, choice: int) -> tuple[bytes, bytes] | None:
        if not self._options.plain or self._logprobs is not None:
            return None
        mark = "\u27e8text\u27e9"
        event = _event(self._answer([CompletionChoice(choice, mark, None, None)], None, None))
        prefix, _, suffix = event.rpartition(mark.encode())
        return prefix, suffix

    def event(self, choice: int, delta: Delta, usage: Usage | None, extension: Extension | None) -> bytes:
        finish = delta.finish_reason
        if not delta.text and finish is None and not delta.logged and not (self._options.token_ids and delta.token_ids):
            return b""
        entry = CompletionChoice(choice, delta.text, self._completion_logprobs(delta), finish)
        if finish is not None:
            entry.stop_reason = delta.stop_reason
        if self._options.token_ids:
            entry.token_ids = delta.token_ids
        return _event(self._answer([entry], usage, extension))

    def usage_event(self, usage: Usage, extension: Extension | None) -> bytes:
        return _event(self._answer([], usage, extension))

    def whole(self, choices: Sequence[Delta], usage: Usage, extension: Extension | None) -> bytes:
        entries = [self._whole_choice(index, delta) for index, delta in enumerate(choices)]
        answer = self._answer(entries, usage, extension)
        answer.system_fingerprint = self._head.fingerprint
        return _encode(answer)

    def _whole_choice(self, index: int, delta: Delta) -> CompletionChoice:
        entry = CompletionChoice(
            index=index,
            text=self._echo(index) + delta.text,
            logprobs=self._completion_logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._options.token_ids:
            entry.token_ids = delta.token_ids
        self._add_prompt_ids(entry)
        return entry

    def _echo(self, choice: int) -> str:
        echo = self._options.echo
        return echo[choice // self._options.choices_per_prompt] if echo is not None else ""

    def _add_prompt_ids(self, entry: CompletionChoice) -> None:
        ids = self._options.prompt_token_ids
        if ids is not None:
            entry.prompt_token_ids = ids[entry.index // self._options.choices_per_prompt]

    def _completion_logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        return self._logprobs.completion(delta.logged, self._options.num_top_logprobs)

    def _answer(
        self, choices: list[CompletionChoice], usage: Usage | None, extension: Extension | None
    ) -> CompletionAnswer:
        head = self._head
        shown: Usage | msgspec.UnsetType | None = usage
        if usage is None and not self._options.usage_in_events:
            shown = msgspec.UNSET
        return CompletionAnswer(
            head.id, "text_completion", head.created, head.model, choices, shown, nvext=extension or msgspec.UNSET
        )


def _event(answer: CompletionAnswer) -> bytes:
    return b"data: " + _encode(answer) + b"\n\n"
