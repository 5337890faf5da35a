"""Writes docs/reference/vllm.md from the code: python tests/vllm_page.py > docs/reference/vllm.md"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.compat.translation import VERDICTS
from headwater.compat.vllm.command import TABLE
from headwater.compat.vllm.params import NOT_OFFERED, SAME_NAME, SamplingParams
from headwater.frontend.openai.chat import CHAT
from headwater.frontend.openai.completions import COMPLETION
from headwater.frontend.openai.fields import IGNORED
from headwater.frontend.openai.parse import Shape

NAMES: dict[str, Any] = json.loads((Path(__file__).parent / "vllm_names.json").read_text())
SHAPES: dict[str, Shape[Any]] = {"chat": CHAT, "completions": COMPLETION}

ENGINES = {
    "seed": "native, mocker: the same draw whatever else runs; vLLM: its own generator per sequence",
    "logprobs": "native: after penalties; vLLM: of the model, before penalties",
    "top_logprobs": "as `logprobs`",
    "structured_outputs": "native, vLLM (a moved one is not taken up); mocker refuses",
    "response_format": "as `structured_outputs`",
    "priority": "vLLM heeds it with its scheduling policy `priority`",
    "cache_salt": "all; on vLLM it travels as vLLM's salt",
    "ignore_eos": "all; a complete structured output ends all the same",
    "user": "a session, for routing",
    "tools": "recognised by the chat template, whatever the engine",
    "messages": "texts; media only where requests are relayed",
}
"""Where engines differ."""
_ATTACHED = "unit/test_attached_engine.py::"
_SUITE = "../src/headwater/engines/conformance.py::EngineConformance::"
_STRUCTURED = (
    "unit/test_native_engine.py::test_structured_output_end_to_end",
    "unit/test_mocker.py::test_structured_output_is_refused",
    _ATTACHED + "test_structured_output_in_vllms_words",
)
_LOGPROBS = ("unit/test_sampler.py::test_logprobs_are_of_the_adjusted_logits_before_temperature_and_cuts",)
SHOWN_BY: dict[str, Sequence[str]] = {
    "seed": (_SUITE + "test_a_seed_draws_the_same_again", _ATTACHED + "test_every_sampling_field_reaches_the_server"),
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "structured_outputs": _STRUCTURED,
    "response_format": _STRUCTURED,
    "priority": (_ATTACHED + "test_every_sampling_field_reaches_the_server",),
    "cache_salt": (_SUITE + "test_tenants_share_no_block", _ATTACHED + "test_every_sampling_field_reaches_the_server"),
    "ignore_eos": _STRUCTURED,
    "user": ("unit/test_vllm_page.py::test_a_field_that_is_said_to_be_the_same_makes_a_difference",),
    "tools": ("unit/test_openai_chat.py::test_tools_reach_the_template_and_calls_come_back",),
    "messages": (
        "unit/test_openai_bad_input.py::test_media_are_refused_by_name",
        "api/test_attached_serve.py::test_requests_and_answers_pass_as_they_are",
    ),
}
"""Tests that would fail if it were not so. What vLLM makes of its own fields is vLLM's word."""
OTHERS = ("logprobs", "logit_bias", "structured_outputs")
"""Sampling parameters that are spelled otherwise in a request."""


def handling(shape: Shape[Any], name: str) -> str:
    """What becomes of a field that vLLM's server takes."""
    if name in shape.known:
        return "same"
    if name in IGNORED:
        return "accepted, without effect"
    if name in shape.unsupported:
        return f"refused unless harmless: {shape.unsupported[name].hint}"
    return "ignored with a warning; refused with `--strict`"


def page() -> str:
    fields = sorted({name for names in NAMES["fields"].values() for name in names})
    lines = [
        "# vLLM, name by name",
        "",
        "<!-- Written by tests/vllm_page.py from the code; a test keeps it current. -->",
        "",
        f"Against vLLM {NAMES['version']}. Where a server is attached as `openai`, requests pass as they are, and",
        "every field means what that server makes of it.",
        "",
        "## Fields of requests",
        "",
        "`same`: the field of the same name, checked by the frontend, so it does the same on every engine but for what",
        "the last column says. `-`: the endpoint has no such field.",
        "",
        "| field | chat completions | completions | engines |",
        "|---|---|---|---|",
    ]
    for name in fields:
        cells = [handling(SHAPES[kind], name) if name in NAMES["fields"][kind] else "-" for kind in SHAPES]
        lines.append(f"| `{name}` | {cells[0]} | {cells[1]} | {ENGINES.get(name, '')} |")
    lines += [
        "",
        "## Flags of the server",
        "",
        "Flags of vLLM's HTTP server, which does not run inside Headwater's worker. All other flags are passed on, and",
        "vLLM's own parser judges them. `headwater compat check -- vllm serve MODEL ...` applies this to a whole line,",
        "and says which flags are of neither.",
        "",
        "| flag of vLLM | what becomes of it | |",
        "|---|---|---|",
    ]
    for flag in NAMES["server_flags"]:
        verdict, note = TABLE.verdict_of(flag)
        lines.append(f"| `{flag[2:]}` | {VERDICTS[verdict]} | {note.replace('--', '')} |")
    lines += [
        "",
        "## `SamplingParams` of the offline interface",
        "",
        f"The same: {spelled(sorted([*SAME_NAME, *OTHERS]))}.",
        "",
        f"Refused unless left alone: {spelled(NOT_OFFERED)}.",
        "",
    ]
    assert {*SAME_NAME, *NOT_OFFERED, *OTHERS} == set(SamplingParams.__dataclass_fields__)
    return "\n".join(lines)


def spelled(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(page())
