"""Conversations on which two template engines are compared before the faster one is trusted."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SampleChat:
    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True


_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather in a city, <now> & "later" - it\'s ünïcode',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "default": 1.5},
            },
            "required": ["city"],
        },
    },
}

_SYSTEM = {"role": "system", "content": "Be brief.\n  Answer in <b>English</b> & 'well'."}
_USER = {"role": "user", "content": " What is 2 + 2?\n"}
_ASSISTANT = {"role": "assistant", "content": "It is 4. \n\n"}
_THINKING = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nIt is 4."}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_abc12",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Köln", "unit": "C", "days": 2}},
        }
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call_abc12", "name": "get_weather", "content": '{"temp": 7.5}'}


def sample_chats() -> tuple[SampleChat, ...]:
    """One per feature that templates branch on."""
    tools = [_WEATHER]
    return (
        SampleChat("one question", [_USER]),
        SampleChat("a system message", [_SYSTEM, _USER]),
        SampleChat("several turns", [_SYSTEM, _USER, _ASSISTANT, _USER]),
        SampleChat("turns without a system message", [_USER, _ASSISTANT, _USER, _THINKING, _USER]),
        SampleChat("an ending answer", [_USER, _THINKING], add_generation_prompt=False),
        SampleChat("text parts", [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]),
        SampleChat("two questions in a row", [_USER, _USER]),
        SampleChat("tools", [_SYSTEM, _USER], tools),
        SampleChat("tools without a system message", [_USER], tools),
        SampleChat("a tool call and its result", [_USER, _CALL, _RESULT], tools),
        SampleChat("tool results in a row", [_SYSTEM, _USER, _CALL, _RESULT, _RESULT, _ASSISTANT, _USER], tools),
        SampleChat("a tool call without tools", [_USER, _CALL, _RESULT, _ASSISTANT, _USER]),
    )
