"""Reading a streamed OpenAI answer: which bytes carry a token, when they came, and what the usage says."""

import msgspec

_DATA = b"data:"
_DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class StreamReader:
    """Sink of one answer. `token_times_s` holds the arrival of every event that carries text."""

    def __init__(self) -> None:
        self.token_times_s: list[float] = []
        self.text_parts: list[str] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.error: str | None = None
        self.saw_done = False
        self.reads = 0
        self._rest = b""
        self._decoder = msgspec.json.Decoder(_Event)

    def on_data(self, data: bytes, at_s: float) -> None:
        self.reads += 1
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._on_event(line[len(_DATA) :].strip(), at_s)

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    @property
    def plain_body(self) -> bytes:
        """What came when it was not an event stream (an error answer)."""
        return self._rest

    def _on_event(self, payload: bytes, at_s: float) -> None:
        if payload == _DONE:
            self.saw_done = True
            return
        try:
            event = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            self.error = f"an event that is not JSON: {error}"
            return
        if event.error is not None:
            self.error = str(event.error)[:500]
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.completion_tokens = event.usage.completion_tokens
        for choice in event.choices:
            text = choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning_content))
            if text:
                self.token_times_s.append(at_s)
                self.text_parts.append(text)
