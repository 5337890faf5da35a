"""Writes docs/engines.md: which checks of the engine suite each engine passes.

python tests/engines_page.py > docs/engines.md                                    from what is recorded
python tests/engines_page.py --record VLLM_PYTHON MODEL_FOLDER > docs/engines.md   runs vLLM's rows first

A cell of the first tables is a check that runs in the class of tests named here, as that class has it (`remarks`), or
what real vLLM was recorded to do. Rows of the last table name the tests that would fail if they were not so.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from headwater.engines.conformance import EngineConformance

TESTS = Path(__file__).parent
RECORD = TESTS / "vllm_results.json"
SUITE = TESTS / "vllm_suite.py"
HANDOFFS = TESTS / "vllm_handoff_life.py"
BENCH = TESTS.parent / "bench"
FORMS = ("in-worker", "attached")

OWN = {
    "native": "test_engine_conformance.py::TestNative",
    "mocker": "test_engine_conformance.py::TestMockerInModelledTime",
    "attached (double)": "test_attached_conformance.py::TestAttachedVllm",
}
DOUBLES = {
    "SGLang in the worker": "test_sglang_conformance.py::TestSglangInTheWorker",
    "SGLang attached": "test_sglang_conformance.py::TestAttachedSglang",
    "TensorRT-LLM in the worker": "test_trtllm_conformance.py::TestTrtllmInTheWorker",
    "TensorRT-LLM attached": "test_trtllm_conformance.py::TestAttachedTrtllm",
}
"""Engines that do not run on the machines of the tests: the suite speaks to doubles of their interfaces."""
REAL = "vllm_suite.py::SharedEngine"

KINDS = ("", "native", "mocker", "vLLM in the worker", "vLLM attached", "SGLang", "TensorRT-LLM", "relayed")
KINDS_SHOWN_BY = (OWN["native"], OWN["mocker"], REAL, OWN["attached (double)"], *list(DOUBLES.values())[1::2])


@dataclass(frozen=True, slots=True)
class Row:
    """Of what an engine need not do."""

    name: str
    cells: Sequence[str]
    tests: Sequence[str]
    """Each fails if its part of the row is not so."""


SUITE_OF_ALL = "../src/headwater/engines/conformance.py::EngineConformance::"
RELAYED = "api/test_attached_serve.py::test_requests_and_answers_pass_as_they_are"
PREFIXES = SUITE_OF_ALL + "test_a_prefix_is_found_again_and_told"


ROWS = (
    Row(
        "log probabilities",
        ["yes", "made up", "yes", "yes", "yes", "yes", "the server's"],
        (
            SUITE_OF_ALL + "test_logprobs_come_with_every_token",
            "unit/test_mocker.py::test_logprobs_are_a_distribution_and_only_for_those_who_ask",
            RELAYED,
        ),
    ),
    Row(
        "KV events",
        ["yes", "yes", "yes", "if the server sends them", *["attached: if the server sends them"] * 2, "no"],
        (
            SUITE_OF_ALL + "test_events_add_up_to_the_snapshot_and_to_the_pool",
            "unit/test_attached_engine.py::test_without_events_nothing_is_claimed",
            "unit/test_sglang_attached.py::test_without_events_the_log_says_how_to_have_them",
            "unit/test_trtllm_attached.py::test_a_server_without_events_is_served_all_the_same",
        ),
    ),
    Row(
        "cached tokens of an answer",
        [*["counted"] * 3, "by its events", *["counted"] * 2, "the server's"],
        (
            PREFIXES,
            "unit/test_attached_engine.py::test_of_a_prompt_that_is_all_there_the_last_block_is_computed",
            RELAYED,
        ),
    ),
    Row(
        "step times",
        [
            "measured",
            "modelled",
            "vLLM's own",
            *["judged by its tokens"] * 2,
            "in the worker: its own; attached: judged by its tokens",
            "judged by its events",
        ],
        (
            SUITE_OF_ALL + "test_load_reports_count_everything_and_beat_when_idle",
            "unit/test_mocker.py::test_step_times_add_up",
            "unit/test_engine_pace.py::test_a_burst_of_decodes_took_the_time_since_the_one_before",
            "unit/test_trtllm_engine.py::test_steps_are_timed_by_what_it_says_of_them",
        ),
    ),
    Row(
        "exchange of KV blocks",
        ["yes", "modelled", "through host memory", "vLLM's own", "SGLang's own", "TensorRT-LLM's own", "no"],
        (
            "../src/headwater/engines/kv_conformance.py::KvPortConformance::test_blocks_of_one_engine_serve_another",
            "unit/test_vllm_handoff_parts.py::test_a_prompt_of_one_engine_is_the_others_context",
            "cluster/test_handoff_tickets.py::test_the_ticket_reaches_the_decode_as_it_is",
            "cluster/test_sglang_pairs.py::test_both_servers_get_a_request_at_once_and_the_roles_are_the_servers_own",
            "cluster/test_trtllm_handoff.py::test_context_there_generation_here_and_the_opaque_state_as_it_is",
        ),
    ),
    Row(
        "caches of tenants kept apart",
        ["yes", "yes", "yes", "yes", "yes", "in the worker; attached: refused", "no"],
        (
            SUITE_OF_ALL + "test_tenants_share_no_block",
            "unit/test_trtllm_engine.py::test_tenants_share_no_block_and_are_told_of_their_own",
            RELAYED,
        ),
    ),
    Row(
        "KV store of the node",
        [*["yes"] * 3, "refused", *["in the worker; attached: refused"] * 2, "refused"],
        (
            "cluster/test_tiers_model.py::test_tokens_are_the_same_and_prefixes_come_from_the_host_tier",
            "cluster/test_kv_object_served.py::test_the_next_life_of_a_graph_loads_from_the_bucket",
            "unit/test_vllm_naming.py::test_blocks_have_the_ids_and_the_tenant_of_the_request",
            "cluster/test_store_below_sglang.py::test_tenants_share_nothing_and_their_limits_reach_the_store",
            "cluster/test_store_below_trtllm.py::test_tenants_share_nothing_and_their_limits_reach_the_store",
            "unit/test_store_refusals.py::test_no_store_for_servers_that_run_already",
        ),
    ),
    Row(
        "images and audio",
        [*["refused by name"] * 6, "the server's"],
        ("unit/test_openai_bad_input.py::test_media_are_refused_by_name", RELAYED),
    ),
)


def need_not() -> list[Row]:
    invariant = [conformance(where).batch_invariant for where in KINDS_SHOWN_BY]
    valid = [recorded()["forms"][form]["test_structured_output_is_valid"][0] for form in FORMS]
    return [
        Row(
            "same output whatever else runs",
            [*["yes" if each else "no" for each in invariant], "no"],
            (
                SUITE_OF_ALL + "test_start_says_what_it_is",
                SUITE_OF_ALL + "test_neighbours_chunks_and_cache_do_not_change_the_output",
            ),
        ),
        Row(
            "a stream that moves goes on token for token",
            [*["yes" if each else "from its text" for each in invariant], "no"],
            (
                SUITE_OF_ALL + "test_a_moved_sequence_goes_on_where_it_was",
                "unit/test_attached_engine.py::test_a_relayed_answer_is_not_taken_up_in_its_middle",
            ),
        ),
        Row(
            "structured output",
            ["yes", "no", *["yes" if each == "passed" else "no" for each in valid], "yes", "yes", "the server's"],
            (
                "unit/test_native_engine.py::test_structured_output_end_to_end",
                "unit/test_mocker.py::test_structured_output_is_refused",
                "unit/test_sglang_wire.py::test_structured_output_in_its_words",
                "unit/test_trtllm_attached.py::test_structured_output",
                "unit/test_trtllm_engine.py::test_structured_output",
                RELAYED,
            ),
        ),
        *ROWS,
    ]


def conformance(where: str) -> type[EngineConformance]:
    """The class of tests, from the file that it is in."""
    file, name = where.split("::")
    path = TESTS / file if (TESTS / file).exists() else TESTS / "conformance" / file
    spec = spec_from_file_location(f"page_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name)
    assert issubclass(found, EngineConformance)
    return found


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


def recorded_cell(form: str, name: str, found: dict[str, Any], remarks: dict[str, str]) -> str:
    result, reason = found["forms"][form].get(name, ["not run", ""])
    return remarks.get(name, "yes") if result == "passed" else f"{result}: {reason}".rstrip(": ")


def suite_table(columns: dict[str, str]) -> list[list[str]]:
    """A row per check, a cell per class."""
    remarks = [conformance(where).remarks() for where in columns.values()]
    return [[spelled(name), *[own.get(name, "yes") for own in remarks]] for name in checks()]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def spelled(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def page() -> str:
    found, real = recorded(), conformance(REAL).remarks()
    only_real = sorted({name for form in FORMS for name in found["forms"][form]} - set(checks()))
    all_checks = [
        [*row, *[recorded_cell(form, name, found, real) for form in FORMS]]
        for name, row in zip(checks(), suite_table(OWN), strict=True)
    ]
    lines = [
        "# Engines side by side",
        "",
        "<!-- Written by tests/engines_page.py; a test keeps it current. -->",
        "",
        "One suite holds for every engine (`headwater.engines.conformance`). The first three columns run in every run",
        "of the tests: the native engine on a CPU with a tiny model, the mocker on both kinds of loop, and an attached",
        "server over a double that speaks vLLM's wire formats and refuses fields it does not know. The last two are",
        f"real vLLM {found['vllm']} on a CPU, as last recorded, one engine start each. `not asked`: the check wants",
        "something that the engine does not promise, or that one shared engine cannot give. Where `VLLM_PYTHON` names",
        "an interpreter with vLLM, `scripts/test` runs them again; so does continuous integration.",
        "",
        *table(("check", *OWN, "vLLM in the worker", "vLLM attached"), all_checks),
        "",
        "Of real vLLM alone:",
        "",
        *table(
            ("check", "vLLM in the worker", "vLLM attached"),
            [[spelled(name), *[recorded_cell(form, name, found, {}) for form in FORMS]] for name in only_real],
        ),
        "",
        "## Over doubles",
        "",
        "These engines want GPU libraries that the machines of the tests do not have. The same suite runs on them in",
        "every run, but what answers is a double of their published interface, as strict about unknown words as they",
        "are, around the mocker: it shows that we speak as they expect, not what they do. **None of it has run on the",
        "engines.**",
        "",
        *table(("check", *DOUBLES), suite_table(DOUBLES)),
        "",
        "## What an engine need not do",
        "",
        *table(KINDS, [(row.name, *row.cells) for row in need_not()]),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(*sys.argv[2:4])
    sys.stdout.write(page())
