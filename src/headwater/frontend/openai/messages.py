"""Chat messages as the chat template wants them.

The template gets the client's own objects, so members that only a certain template knows reach it. Changed on the way:
lists of text parts become one text, a missing assistant text becomes empty, arguments of tool calls become objects,
`developer` becomes `system` for templates that do not know it. Parts that are not text are refused.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.errors import InvalidRequest
from headwater.frontend.openai.parse import Plain, short_json
from headwater.frontend.openai.schema import ChatMessage, ContentPart

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def template_messages(messages: Sequence[ChatMessage], plain: Sequence[Plain], *, knows_developer: bool) -> list[Plain]:
    """Raises `InvalidRequest`. Objects are shared with `plain` where nothing has to change."""
    return [
        _template_message(message, given, f"messages[{number}]", knows_developer)
        for number, (message, given) in enumerate(zip(messages, plain, strict=True))
    ]


def num_content_chars(messages: Sequence[ChatMessage]) -> int:
    """Characters of all texts."""
    total = 0
    for message in messages:
        content = message.content
        if isinstance(content, str):
            total += len(content)
        elif content is not None:
            total += sum(len(part.text) for part in content if part.text is not None)
    return total


def _template_message(message: ChatMessage, plain: Plain, path: str, knows_developer: bool) -> Plain:
    role = message.role
    if role not in ROLES:
        raise InvalidRequest(
            f"{path}.role is {short_json(role)}, expected one of {', '.join(ROLES)}", param=f"{path}.role"
        )
    content = message.content
    if isinstance(content, str) and message.tool_calls is None and None not in plain.values() and role != "developer":
        return plain
    changed = {name: value for name, value in plain.items() if value is not None}
    changed["content"] = _text(message, plain, path)
    if role == "developer" and not knows_developer:
        changed["role"] = "system"
    if message.tool_calls:
        changed["tool_calls"] = _tool_calls(message, plain, path)
    else:
        changed.pop("tool_calls", None)
    return changed


def _text(message: ChatMessage, plain: Plain, path: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise _absent("content", plain, path, "a text or an array of text parts")
    return "\n".join(
        [
            _part_text(part, given, f"{path}.content[{number}]")
            for number, (part, given) in enumerate(zip(content, plain["content"], strict=True))
        ]
    )


def _part_text(part: ContentPart, plain: Plain, path: str) -> str:
    if part.type not in _TEXT_PARTS:
        raise InvalidRequest(
            f"{path}.type is {short_json(part.type)}: this model is served for text only, expected a part of type text",
            param=f"{path}.type",
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise _absent("refusal" if part.type == "refusal" else "text", plain, path, "a text")
    return text


def _absent(name: str, plain: Plain, path: str, expected: str) -> InvalidRequest:
    """For a member that may be left out elsewhere, and not here."""
    how = "null" if name in plain else "missing"
    return InvalidRequest(f"{path}.{name} is {how}, expected {expected}", param=f"{path}.{name}")


def _tool_calls(message: ChatMessage, plain: Plain, path: str) -> list[Plain]:
    calls: list[Plain] = []
    for number, call in enumerate(message.tool_calls or ()):
        at = f"{path}.tool_calls[{number}].function.arguments"
        given = plain["tool_calls"][number]
        calls.append({**given, "function": {**given["function"], "arguments": _arguments(call.function.arguments, at)}})
    return calls


def _arguments(arguments: str | dict[str, Any], path: str) -> Any:
    if isinstance(arguments, dict):
        return arguments
    try:
        decoded = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        raise InvalidRequest(f"{path} is {short_json(arguments)}, expected the JSON text of an object", param=path)
    return decoded
