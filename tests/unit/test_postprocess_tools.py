"""Tool calls out of text: the same for any split, nothing lost."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.frontend.postprocess.tools import (
    CallArguments,
    CallStart,
    HermesParser,
    NamedFunctionParser,
    ToolEvent,
    ToolParser,
    Words,
    detect_tool_format,
)

ARGUMENTS = {"city": 'Kö"ln }{', "days": [1, {"a": "</tool_call>"}], "note": "a\\b\nc"}
CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS}, ensure_ascii=False)
TEXTS = [
    "just words with < and <tool and <tool_cal at the end",
    f"<tool_call>\n{CALL}\n</tool_call>",
    f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>",
    f"<tool_call>{CALL}</tool_call> and then words",
    '<tool_call>{"arguments": {"x": 1}, "name": "late"}</tool_call>',
    '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}',
    "<tool_call>not json</tool_call> rest",
    '<tool_call>{"name": "cut", "arguments": {"x": "unfin',
    '<tool_call>{"na',
    "",
]


def collect(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    events: list[ToolEvent] = [event for piece in pieces for event in parser.push(piece)]
    events += parser.flush()
    words = "".join(event.text for event in events if isinstance(event, Words))
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return words, calls


@settings(deadline=None)
@given(text=st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 300), max_size=12), forced=st.booleans())
def test_any_split_gives_what_the_whole_text_gives(text: str, cuts: list[int], forced: bool) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    assert collect(HermesParser(forced=forced), pieces) == collect(HermesParser(forced=forced), [text])
    assert collect(HermesParser(forced=forced), list(text)) == collect(HermesParser(forced=forced), [text])


def test_a_call() -> None:
    words, calls = collect(HermesParser(), [TEXTS[1]])
    assert words == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", ARGUMENTS)]


def test_words_and_two_calls() -> None:
    words, calls = collect(HermesParser(), list(TEXTS[2]))
    assert words == "Let me look.\n"
    assert [json.loads(arguments) for _, arguments in calls] == [ARGUMENTS, ARGUMENTS]


@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[8], TEXTS[10]])
def test_what_is_no_call_is_given_back(text: str) -> None:
    assert collect(HermesParser(), list(text)) == (text, [])


@pytest.mark.parametrize(("text", "name"), [(TEXTS[4], "late"), (TEXTS[5], "f"), (TEXTS[6], "f")])
def test_unusual_calls(text: str, name: str) -> None:
    words, calls = collect(HermesParser(), list(text))
    assert words == ""
    assert [(called, json.loads(arguments)) for called, arguments in calls] == [(name, {"x": 1})]


def test_arguments_come_before_the_call_is_complete() -> None:
    parser = HermesParser()
    assert parser.push('<tool_call>{"name": "f", "arguments": {"x": "lo') == [
        CallStart("f"),
        CallArguments('{"x": "lo'),
    ]
    assert parser.push("ng") == [CallArguments("ng")]


def test_a_call_that_was_cut_off_keeps_what_came() -> None:
    assert collect(HermesParser(), [TEXTS[9]]) == ("", [("cut", '{"x": "unfin')])


def test_only_the_first_call_counts_on_request() -> None:
    words, calls = collect(HermesParser(single=True), list(TEXTS[2] + " more words"))
    assert words == "Let me look.\n"
    assert len(calls) == 1


def test_forced_call_has_no_tags() -> None:
    assert collect(HermesParser(forced=True), list(CALL))[1][0][0] == "get_weather"


def test_named_function_takes_all_text() -> None:
    assert collect(NamedFunctionParser("f"), ['{"x"', ": 1}"]) == ("", [("f", '{"x": 1}')])


@pytest.mark.parametrize(
    ("template", "form"),
    [("{{ '<tool_call>' }}", "hermes"), ("<tool_call>\n<function=", None), ("[TOOL_CALLS]", None), ("", None)],
)
def test_format_is_read_from_the_template(template: str, form: str | None) -> None:
    assert detect_tool_format(template) == form
