"""How chat completions look on the wire, whole and streamed."""

from collections.abc import Sequence

import msgspec

from headwater.frontend.openai.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageAnswer,
    FunctionCallAnswer,
    ToolCallAnswer,
    ToolCallDelta,
    Usage,
)
from headwater.frontend.openai.generation import Extension
from headwater.frontend.openai.logprobs import LogprobWriter
from headwater.frontend.postprocess.sequence import Delta
from headwater.frontend.postprocess.tools import CallArguments, CallStart, ToolEvent, ToolParser, Words

_encode = msgspec.json.Encoder().encode


class Head(msgspec.Struct, frozen=True):
    """What every event of an answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str


class ChatOptions(msgspec.Struct, frozen=True):
    """What the client wants to see."""

    usage_in_events: bool = False
    """`stream_options.include_usage`: the member is there, null until the end."""
    token_ids: bool = False
    prompt_token_ids: list[int] | None = None
    plain: bool = True
    """Events carry nothing but text."""


class ChatFormat:
    def __init__(
        self, head: Head, options: ChatOptions, logprobs: LogprobWriter | None, parsers: Sequence[ToolParser]
    ) -> None:
        """`parsers`: one per choice, or none when there are no tools."""
        self._head = head
        self._options = options
        self._logprobs = logprobs
        self._tools = [_ToolState(head.id, choice, parser) for choice, parser in enumerate(parsers)]

    def opening(self, choice: int) -> bytes:
        delta = ChatDelta(role="assistant", content="")
        chunk = self._chunk([ChatChunkChoice(choice, delta, None, None)], None, None)
        if self._options.prompt_token_ids is not None:
            chunk.prompt_token_ids = self._options.prompt_token_ids
        return _event(chunk)

    def frame(self, choice: int) -> tuple[bytes, bytes] | None:
        if not self._options.plain or self._logprobs is not None or self._tools:
            return None
        mark = "\u27e8text\u27e9"
        event = _event(self._chunk([ChatChunkChoice(choice, ChatDelta(content=mark), None, None)], None, None))
        prefix, _, suffix = event.rpartition(mark.encode())
        return prefix, suffix

    def event(self, choice: int, delta: Delta, usage: Usage | None, extension: Extension | None) -> bytes:
        deltas = self._tools[choice].deltas(delta) if self._tools else _text_deltas(delta)
        finish = self._finish_reason(choice, delta)
        if not deltas and (finish is not None or delta.logged or (self._options.token_ids and delta.token_ids)):
            deltas = [ChatDelta()]
        events: list[bytes] = []
        for number, piece in enumerate(deltas, start=1):
            entry = ChatChunkChoice(choice, piece, None, None)
            if number == len(deltas):
                self._complete(entry, delta, finish)
            events.append(_event(self._chunk([entry], usage, extension)))
        return b"".join(events)

    def usage_event(self, usage: Usage, extension: Extension | None) -> bytes:
        return _event(self._chunk([], usage, extension))

    def whole(self, choices: Sequence[Delta], usage: Usage, extension: Extension | None) -> bytes:
        head = self._head
        answer = ChatAnswer(
            id=head.id,
            object="chat.completion",
            created=head.created,
            model=head.model,
            choices=[self._whole_choice(index, delta) for index, delta in enumerate(choices)],
            usage=usage,
            system_fingerprint=head.fingerprint,
            nvext=extension or msgspec.UNSET,
        )
        if self._options.prompt_token_ids is not None:
            answer.prompt_token_ids = self._options.prompt_token_ids
        return _encode(answer)

    def _finish_reason(self, choice: int, delta: Delta) -> str | None:
        if delta.finish_reason == "stop" and self._tools and self._tools[choice].called:
            return "tool_calls"
        return delta.finish_reason

    def _complete(self, entry: ChatChunkChoice, delta: Delta, finish: str | None) -> None:
        """The last event of a step carries what belongs to the step as a whole."""
        if delta.logged:
            entry.logprobs = self._chat_logprobs(delta)
        if finish is not None:
            entry.finish_reason = finish
            entry.stop_reason = delta.stop_reason
        if self._options.token_ids:
            entry.token_ids = delta.token_ids

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None, extension: Extension | None) -> ChatChunk:
        head = self._head
        shown: Usage | msgspec.UnsetType | None = usage
        if usage is None and not self._options.usage_in_events:
            shown = msgspec.UNSET
        return ChatChunk(
            head.id, "chat.completion.chunk", head.created, head.model, choices, shown, nvext=extension or msgspec.UNSET
        )

    def _whole_choice(self, index: int, delta: Delta) -> ChatChoice:
        message = ChatMessageAnswer("assistant", delta.text)
        if self._tools:
            message = self._tools[index].message(delta)
        choice = ChatChoice(
            index=index,
            message=message,
            logprobs=self._chat_logprobs(delta),
            finish_reason=self._finish_reason(index, delta),
            stop_reason=delta.stop_reason,
        )
        if self._options.token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _chat_logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return self._logprobs.chat(delta.logged) if self._logprobs is not None else None


class _ToolState:
    """One choice's tool calls."""

    def __init__(self, answer_id: str, choice: int, parser: ToolParser) -> None:
        self._id_stem = f"call_{answer_id.removeprefix('chatcmpl-')}_{choice}_"
        self._parser = parser
        self._num_calls = 0

    @property
    def called(self) -> bool:
        return self._num_calls > 0

    def deltas(self, delta: Delta) -> list[ChatDelta]:
        return [self._delta(event) for event in self._events(delta)]

    def message(self, delta: Delta) -> ChatMessageAnswer:
        words: list[str] = []
        calls: list[ToolCallAnswer] = []
        for event in self._events(delta):
            if isinstance(event, Words):
                words.append(event.text)
            elif isinstance(event, CallStart):
                calls.append(ToolCallAnswer(self._next_id(), FunctionCallAnswer(event.name, "")))
            else:
                function = calls[-1].function
                function.arguments = (function.arguments or "") + event.text
        content = "".join(words)
        if not calls:
            return ChatMessageAnswer("assistant", content)
        return ChatMessageAnswer("assistant", content.strip() or None, tool_calls=calls)

    def _events(self, delta: Delta) -> list[ToolEvent]:
        events = self._parser.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events += self._parser.flush()
        return events

    def _delta(self, event: ToolEvent) -> ChatDelta:
        if isinstance(event, Words):
            return ChatDelta(content=event.text)
        if isinstance(event, CallArguments):
            arguments = FunctionCallAnswer(arguments=event.text)
            return ChatDelta(tool_calls=[ToolCallDelta(self._num_calls - 1, function=arguments)])
        start = FunctionCallAnswer(event.name, "")
        return ChatDelta(tool_calls=[ToolCallDelta(self._num_calls, self._next_id(), "function", start)])

    def _next_id(self) -> str:
        self._num_calls += 1
        return f"{self._id_stem}{self._num_calls - 1}"


def _text_deltas(delta: Delta) -> list[ChatDelta]:
    return [ChatDelta(content=delta.text)] if delta.text else []


def _event(chunk: ChatChunk) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"
