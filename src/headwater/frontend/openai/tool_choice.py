"""What `tools` and `tool_choice` ask for: what the template shows, what the sampler is forced to, how text is read."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from headwater.errors import InvalidRequest
from headwater.frontend.openai.model import ServedModel
from headwater.frontend.openai.parse import short_json
from headwater.frontend.openai.schema import ChatRequest, FunctionDefinition, NamedToolChoice
from headwater.frontend.postprocess.tools import HermesParser, NamedFunctionParser, ToolParser
from headwater.protocol.request import StructuredSpec

_CHOICES = ("auto", "none", "required")


class ToolUse(msgspec.Struct, frozen=True):
    shown: bool = False
    """Whether the template gets the tools."""
    structured: StructuredSpec | None = None
    reading: Literal["text", "calls", "forced", "named"] = "text"
    function: str = ""
    single: bool = False
    """At most one call."""

    def parsers(self, choices: int) -> Sequence[ToolParser]:
        """One per choice; none when the output is just text."""
        return [] if self.reading == "text" else [self._parser() for _ in range(choices)]

    def _parser(self) -> ToolParser:
        if self.reading == "named":
            return NamedFunctionParser(self.function)
        return HermesParser(forced=self.reading == "forced", single=self.single)


def tool_use(fields: ChatRequest, model: ServedModel, structured: StructuredSpec | None) -> ToolUse:
    """Raises `InvalidRequest` for choices that cannot be met."""
    choice = fields.tool_choice
    if not fields.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(
                f"tool_choice is {_given(choice)} and tools is empty, expected tools, or none or auto as tool_choice",
                param="tool_choice",
            )
        return ToolUse(structured=structured)
    _check_tools(fields, model)
    if choice == "none":
        return ToolUse(structured=structured)
    if choice is None or choice == "auto":
        if model.tool_format is None:
            raise InvalidRequest(
                "tools is given, and this server cannot read tool calls in the format of this model: "
                'use tool_choice "required" or a named function',
                param="tools",
            )
        single = fields.parallel_tool_calls is False
        return ToolUse(shown=True, structured=structured, reading="calls", single=single)
    if structured is not None:
        raise InvalidRequest(
            f"tool_choice is {_given(choice)} and {structured.param} is given, expected one constraint on the output",
            param="tool_choice",
        )
    functions = [tool.function for tool in fields.tools]
    if isinstance(choice, NamedToolChoice):
        if choice.type != "function":
            message = f"tool_choice.type is {short_json(choice.type)}, expected function"
            raise InvalidRequest(message, param="tool_choice.type")
        return _named(choice.function.name, functions)
    if choice == "required":
        return ToolUse(shown=True, structured=_any_call(functions), reading="forced")
    raise InvalidRequest(
        f"tool_choice is {short_json(choice)}, expected one of {', '.join(_CHOICES)} or a named function",
        param="tool_choice",
    )


def _check_tools(fields: ChatRequest, model: ServedModel) -> None:
    for number, tool in enumerate(fields.tools or ()):
        if tool.type != "function":
            at = f"tools[{number}].type"
            raise InvalidRequest(f"{at} is {short_json(tool.type)}, expected function", param=at)
    if fields.tool_choice != "none" and (model.template is None or not model.template.takes_tools):
        raise InvalidRequest(
            f"model {model.card.name} does not take tools: its chat template has no place for them", param="tools"
        )


def _given(choice: str | NamedToolChoice | None) -> str:
    return short_json(choice) if isinstance(choice, str) else "a named function"


def _named(name: str, functions: Sequence[FunctionDefinition]) -> ToolUse:
    for number, function in enumerate(functions):
        if function.name == name:
            text = msgspec.json.encode(_parameters(function)).decode()
            spec = StructuredSpec("json_schema", text, f"tools[{number}].function.parameters")
            return ToolUse(shown=True, structured=spec, reading="named", function=name)
    names = ", ".join(function.name for function in functions[:8])
    raise InvalidRequest(f"tool_choice names {short_json(name)}, tools has {names}", param="tool_choice")


def _any_call(functions: Sequence[FunctionDefinition]) -> StructuredSpec:
    """One call of any function, name first, so that it can be passed on before it is complete."""
    places = ["#"] if len(functions) == 1 else [f"#/anyOf/{number}" for number in range(len(functions))]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": _moved(_parameters(function), f"{place}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function, place in zip(functions, places, strict=True)
    ]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return StructuredSpec("json_schema", msgspec.json.encode(schema).decode(), "tools")


def _moved(value: Any, place: str) -> Any:
    """A schema that becomes part of another one: its references to places in itself lead there again."""
    if isinstance(value, list):
        return [_moved(item, place) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {name: _moved(item, place) for name, item in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}
