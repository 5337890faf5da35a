"""What is needed to run one request once it has been understood."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from headwater.frontend.hints import NO_HINTS, RoutingHints
from headwater.frontend.openai.answers import Usage
from headwater.frontend.openai.model import ServedModel
from headwater.frontend.openai.sampling import with_choice_seed
from headwater.frontend.openai.schema import NvExt, StreamOptions
from headwater.frontend.postprocess.sequence import Delta, SequenceText, TextOptions
from headwater.frontend.postprocess.stop import StopMatcher, StopStrings
from headwater.frontend.preprocess.prompt import Prompt
from headwater.protocol.request import EngineRequest, SamplingParams

Extension = dict[str, Any]
"""The `nvext` member of an answer."""


class Format(Protocol):
    """How answers of one endpoint look. One per request: it may keep state per choice."""

    def opening(self, choice: int) -> bytes:
        """Events that come before the first text of a choice."""
        ...

    def frame(self, choice: int) -> tuple[bytes, bytes] | None:
        """What stands before and after the escaped text of a plain event; None when no event is plain."""
        ...

    def event(self, choice: int, delta: Delta, usage: Usage | None, extension: Extension | None) -> bytes:
        """Events for a delta; empty when there is nothing to say."""
        ...

    def usage_event(self, usage: Usage, extension: Extension | None) -> bytes: ...

    def whole(self, choices: Sequence[Delta], usage: Usage, extension: Extension | None) -> bytes:
        """The body of an answer that is not streamed; one complete delta per choice."""
        ...


class Generation(msgspec.Struct, frozen=True):
    """One request, ready to be sent."""

    request_id: str
    model: ServedModel
    prompts: list[Prompt]
    choices_per_prompt: int
    sampling: list[SamplingParams]
    """Of the first choice of each prompt."""
    text: TextOptions
    stops: StopStrings | None
    skip_special_tokens: bool
    format: Format
    stream: bool
    stream_options: StreamOptions
    nvext: NvExt
    prompt_param: str = "prompt"
    """The field with the prompts."""
    adapter: str | None = None
    priority: int = 0
    hints: RoutingHints = NO_HINTS
    formatted_prompt: str | None = None
    warnings: tuple[str, ...] = ()
    """Notes about fields that were ignored."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.choices_per_prompt

    @property
    def num_prompt_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    def sequence_text(self, choice: int) -> SequenceText:
        prompt = self.prompts[choice // self.choices_per_prompt]
        detokenizer = self.model.detokenizer(prompt.ids, skip_special_tokens=self.skip_special_tokens)
        matcher = StopMatcher(self.stops, include=self.text.include_stop) if self.stops is not None else None
        return SequenceText(self.text, detokenizer, matcher)

    def engine_requests(self, number: int, arrival: float, deadline: float | None) -> list[EngineRequest]:
        """Of one prompt, a request per choice."""
        prompt = self.prompts[number]
        return [
            EngineRequest(
                stream=0,
                request_id=self.request_id,
                model=self.model.card.name,
                prompt=prompt.ids,
                sampling=with_choice_seed(self.sampling[number], choice),
                block_ids=prompt.block_ids,
                namespace=prompt.namespace,
                priority=self.priority,
                deadline=deadline,
                arrival=arrival,
                adapter=self.adapter,
            )
            for choice in range(self.choices_per_prompt)
        ]
