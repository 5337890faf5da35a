"""Writes docs/engines.md: which checks of the engine suite each engine passes.

python tests/engines_page.py > docs/engines.md                                    from what is recorded
python tests/engines_page.py --record VLLM_PYTHON MODEL_FOLDER > docs/engines.md   runs vLLM's rows first
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.engines.conformance import EngineConformance

RECORD = Path(__file__).parent / "vllm_results.json"
SUITE = Path(__file__).parent / "vllm_suite.py"
HANDOFFS = Path(__file__).parent / "vllm_handoff_life.py"
BENCH = Path(__file__).parent.parent / "bench"
FORMS = ("in-worker", "attached")
DOUBLES = ("SGLang in the worker", "SGLang attached", "TensorRT-LLM in the worker", "TensorRT-LLM attached")
"""Engines that do not run on the machines of the tests: the suite speaks to doubles of their interfaces."""

EXCEPTIONS = {
    ("test_stored_blocks_have_the_ids_of_the_contract", "TensorRT-LLM attached"): "yes; other salts refused by name",
    ("test_preemption_does_not_show", "TensorRT-LLM attached"): "yes; not counted",
    ("test_tenants_share_no_block", "TensorRT-LLM attached"): "refused by name",
}

TRTLLM_STEPS = "in the worker: its own; attached: judged by its tokens"
KINDS = ("", "native", "mocker", "vLLM in the worker", "vLLM attached", "SGLang", "TensorRT-LLM", "relayed")
NEED_NOT = (
    ("same output whatever else runs", "yes", "yes", "no", "no", "no", "no", "no"),
    ("a stream that moves goes on token for token", "yes", "yes", *["from its text"] * 4, "no"),
    ("structured output", "yes", "no", "yes", "yes", "yes", "yes", "the server's"),
    ("log probabilities", "yes", "made up", "yes", "yes", "yes", "yes", "the server's"),
    ("KV events", "yes", "yes", "yes", "if the server sends them", *["attached: if the server sends them"] * 2, "no"),
    ("cached tokens of an answer", *["counted"] * 3, "by its events", *["counted"] * 2, "the server's"),
    (
        "step times",
        "measured",
        "modelled",
        "vLLM's own",
        *["judged by its tokens"] * 2,
        TRTLLM_STEPS,
        "judged by its events",
    ),
    (
        "exchange of KV blocks",
        "yes",
        "modelled",
        "through host memory",
        "vLLM's own",
        "SGLang's own",
        "TensorRT-LLM's own",
        "no",
    ),
    ("caches of tenants kept apart", "yes", "yes", "yes", "yes", "yes", "in the worker; attached: refused", "no"),
)


def checks() -> list[str]:
    return [name for name in dir(EngineConformance) if name.startswith("test_")]


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def record(python: str, folder: str) -> None:
    forms: dict[str, dict[str, list[str]]] = {}
    for form in FORMS:
        done = subprocess.run([python, str(SUITE), form, folder], stdout=subprocess.PIPE, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"check"')]
        asked = {line["check"]: line for line in lines}
        forms[form] = {
            name: [line["result"], line["detail"] if line["result"] == "not asked" else ""]
            for name, line in sorted(asked.items())
        }
    forms["in-worker"] |= handoffs(python, folder)
    RECORD.write_text(json.dumps({"vllm": "0.32.0", "forms": forms}, indent=1) + "\n")


def handoffs(python: str, folder: str) -> dict[str, list[str]]:
    """Of two vLLM workers."""
    environment = {**os.environ, "PYTHONPATH": str(BENCH)}
    done = subprocess.run([python, str(HANDOFFS), folder], stdout=subprocess.PIPE, check=False, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"check"')]
    return {line["check"].replace("check_", "test_handoff_", 1): [line["result"], ""] for line in lines}


def cell(form: str, name: str, found: dict[str, Any]) -> str:
    result, reason = found["forms"][form].get(name, ["not run", ""])
    return "yes" if result == "passed" else f"{result}: {reason}".rstrip(": ")


def double_cell(name: str, engine: str) -> str:
    if "failing_executor" in name:
        return "not asked: breaks an executor of ours"
    return EXCEPTIONS.get((name, engine), "yes")


def doubles() -> list[str]:
    lines = [
        "",
        "## Over doubles",
        "",
        "These engines want GPU libraries that the machines of the tests do not have. The same suite runs on them in",
        "every run, but what answers is a double of their published interface, as strict about unknown words as they",
        "are, around the mocker: it shows that we speak as they expect, not what they do. **None of it has run on the",
        "engines.**",
        "",
        *table(
            ("check", *DOUBLES),
            [(spelled(name), *[double_cell(name, engine) for engine in DOUBLES]) for name in checks()],
        ),
    ]
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def spelled(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def page() -> str:
    found = recorded()
    own = sorted({name for form in FORMS for name in found["forms"][form]} - set(checks()))
    lines = [
        "# Engines side by side",
        "",
        "<!-- Written by tests/engines_page.py; a test keeps it current. -->",
        "",
        "One suite holds for every engine (`headwater.engines.conformance`). The first three columns run in every run",
        "of the tests: the native engine on a CPU with a tiny model, the mocker on both kinds of loop, and an attached",
        "server over a double that speaks vLLM's wire formats and refuses fields it does not know. The last two are",
        f"real vLLM {found['vllm']} on a CPU, as last recorded, one engine start each. `not asked`: the check wants",
        "something that one shared engine cannot give. With an interpreter that has vLLM they run again:",
        "`VLLM_PYTHON=... scripts/test -m vllm`.",
        "",
        "| check | native | mocker | attached (double) | vLLM in the worker | vLLM attached |",
        "|---|---|---|---|---|---|",
    ]
    for name in checks():
        spelled = name.removeprefix("test_").replace("_", " ")
        lines.append(f"| {spelled} | yes | yes | yes | {cell(FORMS[0], name, found)} | {cell(FORMS[1], name, found)} |")
    lines += ["", "Of real vLLM alone:", "", "| check | vLLM in the worker | vLLM attached |", "|---|---|---|"]
    for name in own:
        spelled = name.removeprefix("test_").replace("_", " ")
        lines.append(f"| {spelled} | {cell(FORMS[0], name, found)} | {cell(FORMS[1], name, found)} |")
    lines += doubles()
    lines += [
        "",
        "## What an engine need not do",
        "",
        *table(KINDS, NEED_NOT),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(*sys.argv[2:4])
    sys.stdout.write(page())
