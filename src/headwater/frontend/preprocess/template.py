"""Chat templates: messages to the text that the model was trained on.

Templates are code that came with a model, so they run caged: MiniJinja (no access to Python, a budget of
instructions) where it does what Jinja2 does, else Jinja2 in a cage of ours (`template_cage`). Which one is
decided once per model by rendering sample conversations with both. Semantics are those of Hugging Face's
`apply_chat_template`. What a template refuses becomes an `InvalidRequest`.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Protocol

import jinja2
import jinja2.meta
import minijinja
from jinja2.ext import Extension, loopcontrols

from headwater.clock import Clock
from headwater.errors import InvalidRequest, ModelError
from headwater.frontend.preprocess.samples import SampleChat, sample_chats
from headwater.frontend.preprocess.template_cage import CagedEnvironment, budget

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Variables = dict[str, Any]

_FUEL = 20_000_000
"""Instructions MiniJinja may spend on one conversation."""
_MAX_GROWTH_CHARS = 1_000_000
"""Characters a template may add to what it was given."""
_CONTINUE_MARK = "\u27e8headwater:continue\u27e9 "


class TemplateRefusal(Exception):
    """The template called `raise_exception`."""


class Renderer(Protocol):
    """One compiled template."""

    def render(self, variables: Variables) -> str: ...


class MiniJinjaRenderer:
    """Fast, written in Rust. Lacks a few corners of Jinja2."""

    def __init__(self, source: str, strftime_now: Callable[[str], str]) -> None:
        self._environment = minijinja.Environment(
            templates={"chat": source},
            filters={"tojson": _tojson},
            globals={"raise_exception": _raise_exception, "strftime_now": strftime_now},
            trim_blocks=True,
            lstrip_blocks=True,
            auto_escape_callback=lambda _name: False,
            fuel=_FUEL,
        )

    def render(self, variables: Variables) -> str:
        text = str(self._environment.render_template("chat", **variables))
        if len(text) > _MAX_GROWTH_CHARS and len(text) > (limit := _MAX_GROWTH_CHARS + _num_chars(variables)):
            raise TemplateRefusal(f"the template wrote more than {limit:,} characters")
        return text


class Jinja2Renderer:
    """The original, caged."""

    def __init__(self, source: str, strftime_now: Callable[[str], str]) -> None:
        environment = CagedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime_now
        self._template = environment.from_string(source)

    def render(self, variables: Variables) -> str:
        limit = _MAX_GROWTH_CHARS + _num_chars(variables)
        parts: list[str] = []
        size = 0
        for part in self._template.generate(**variables, **budget()):
            size += len(part)
            if size > limit:
                raise TemplateRefusal(f"the template wrote more than {limit:,} characters")
            parts.append(part)
        return "".join(parts)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012  the attribute's name and type are Jinja2's

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_EXTENSIONS = (_GenerationTag, loopcontrols)
_CANNOT_RENDER = (
    minijinja.TemplateError,
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One model's template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock) -> None:
        """Raises `ModelError` when the template does not compile."""

        def strftime_now(form: str) -> str:
            return datetime.fromtimestamp(clock.epoch()).strftime(form)

        try:
            self._reference = Jinja2Renderer(source, strftime_now)
            names = jinja2.meta.find_undeclared_variables(CagedEnvironment(extensions=_EXTENSIONS).parse(source))
        except _CANNOT_RENDER as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.takes_tools = "tools" in names
        self.knows_developer = "developer" in source
        self._renderer: Renderer = self._choose(source, strftime_now)

    @property
    def backend(self) -> Literal["minijinja", "jinja2"]:
        return "minijinja" if isinstance(self._renderer, MiniJinjaRenderer) else "jinja2"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises `InvalidRequest`."""
        if continue_final_message:
            messages = _mark_final(messages)
        variables: Variables = {
            "documents": None,
            **self._special_tokens,
            **(extra or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _render(self, variables: Variables) -> str:
        try:
            return self._renderer.render(variables)
        except minijinja.TemplateError as error:
            if _out_of_fuel(error):
                raise _refused(error) from error
            logger.debug("minijinja cannot render this conversation, trying jinja2: %s", error)
        except TemplateRefusal as refusal:
            raise _refused(refusal) from refusal
        except _CANNOT_RENDER as error:
            raise _refused(error) from error
        try:
            return self._reference.render(variables)
        except (TemplateRefusal, *_CANNOT_RENDER) as error:
            raise _refused(error) from error

    def _choose(self, source: str, strftime_now: Callable[[str], str]) -> Renderer:
        try:
            fast = MiniJinjaRenderer(source, strftime_now)
            for chat in sample_chats():
                variables = self._sample_variables(chat)
                if _outcome(fast, variables) != _outcome(self._reference, variables):
                    logger.warning("using jinja2 for this chat template: minijinja renders %s differently", chat.name)
                    return self._reference
        except _CANNOT_RENDER as error:
            if _out_of_fuel(error):
                raise ModelError("the chat template does not come to an end") from error
            logger.warning("using jinja2 for this chat template: %s", error)
            return self._reference
        return fast

    def _sample_variables(self, chat: SampleChat) -> Variables:
        return {
            "documents": None,
            **self._special_tokens,
            "messages": chat.messages,
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt,
        }


def _out_of_fuel(error: Exception) -> bool:
    return "out of fuel" in str(error)


def _outcome(renderer: Renderer, variables: Variables) -> str | None:
    """The text, or None when the template refuses or fails. Lets out what never comes to an end."""
    try:
        return renderer.render(variables)
    except minijinja.TemplateError as error:
        if _out_of_fuel(error):
            raise
        return None
    except (TemplateRefusal, *_CANNOT_RENDER):
        return None


def _refused(error: Exception) -> InvalidRequest:
    reason = str(error).strip() or type(error).__name__
    return InvalidRequest(f"messages do not fit the model's chat template: {reason[:500]}", param="messages")


def _mark_final(messages: Sequence[Message]) -> list[Message]:
    final = messages[-1]
    content = final.get("content")
    if not isinstance(content, str):
        raise InvalidRequest("continue_final_message needs a text in the last message", param="messages")
    return [*messages[:-1], {**final, "content": content + _CONTINUE_MARK}]


def _cut_at_mark(text: str) -> str:
    """What comes before the mark; trailing space that the template trimmed after it is trimmed before it too."""
    position = text.rfind(_CONTINUE_MARK.rstrip())
    if position < 0:
        raise InvalidRequest(
            "continue_final_message is not possible: the model's chat template drops the last message",
            param="continue_final_message",
        )
    kept = text[:position]
    return kept if text.startswith(_CONTINUE_MARK, position) else kept.rstrip()


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _num_chars(value: object) -> int:
    """Characters of all strings inside."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_num_chars, value))
    return 0
