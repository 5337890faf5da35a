"""The documentation against the code: what it names exists, and what exists is named."""

import argparse
import re
import tomllib
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater.cli.verbs import VERBS, parser_of
from headwater.clock import RealClock
from headwater.config.fields import ENVIRONMENT_PREFIX, fields_of
from headwater.config.show import reference_markdown
from headwater.frontend.metrics import FrontendMetrics, MetricsPage
from headwater.frontend.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NvExt,
    StreamOptions,
    TokenizeRequest,
)
from headwater.frontend.tenants.keyring import TenantSpec
from headwater.frontend.tenants.meter import Meter
from headwater.router.view import ClusterView

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
OTHERS_FLAGS = {
    "--dp-size",
    "--enable-hierarchical-cache",
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
    "--model-path",
    "--no-deps",
    "--pid",
    "--shm-size",
    "--enable-auto-tool-choice",
    "--enforce-eager",
    "--disable-hybrid-kv-cache-manager",
    "--enable-sleep-mode",
    "--kv-events-config",
    "--kv-transfer-config",
    "--scheduling-policy",
    "--speedup-ratio",
    "--swap-spce",
    "--tool-call-parser",
    "--tokenizer",
    "--base-gpu-id",
    "--chunked-prefill-size",
    "--context-length",
    "--disable-radix-cache",
    "--disaggregation-bootstrap-port",
    "--disaggregation-mode",
    "--enable-deterministic-inference",
    "--enable-lora",
    "--enable-priority-scheduling",
    "--enable-unified-cache-external-linker",
    "--hicache-host-memory-mode",
    "--hicache-ratio",
    "--hicache-size",
    "--nnodes",
    "--speculative-algorithm",
    "--incremental-streaming-output",
    "--lora-paths",
    "--max-running-requests",
    "--max-total-tokens",
    "--mem-fraction-static",
    "--page-size",
    "--tp",
    "--tp-size",
    "--cache-transceiver-config",
    "--extra-llm-api-options",
    "--kv-cache-config",
    "--kv-connector-config",
    "--lora-modules",
}
"""Flags of other programs: docker, pip, py-spy, engines to attach to, and the peers of the benchmarks."""


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_configuration_reference_is_current() -> None:
    assert text("docs/reference/configuration.md") == reference_markdown(), (
        "run: headwater config docs > docs/reference/configuration.md"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_extras_that_are_named_exist_and_users_find_all_of_them() -> None:
    extras = set(tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"])
    for path in [*PAGES, *ROOT.glob("src/**/*.py")]:
        named = {name for names in re.findall(r"headwater\[([a-z,]+)\]", path.read_text()) for name in names.split(",")}
        assert named <= extras, f"{path.name} names {named - extras}"
    in_table = {
        name for row in re.findall(r"(?m)^\| (`.*?) \|", text("docs/install.md")) for name in re.findall("[a-z]+", row)
    }
    assert in_table >= extras - {"test", "dev"}


def all_flags() -> set[str]:
    flags = {"--version"}
    for verb in VERBS:
        parsers = [parser_of(verb)]
        while parsers:
            for action in parsers.pop()._actions:
                flags.update(action.option_strings)
                if isinstance(action, argparse._SubParsersAction):
                    parsers += list(action.choices.values())
    return flags


def test_flags_variables_and_verbs_in_the_pages_exist() -> None:
    flags, variables = all_flags(), {field.variable for field in fields_of().values()} | {"HEADWATER_CONFIG"}
    for page in PAGES:
        content = page.read_text()
        for flag in re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+[a-z0-9])(?![\w-]*\.\.\.)", content):
            assert flag in flags or flag in OTHERS_FLAGS, f"{page.name} names {flag}"
        for variable in re.findall(rf"\b{ENVIRONMENT_PREFIX}[A-Z_]+[A-Z]\b", content):
            assert variable in variables | {"HEADWATER_SERVICE_HOST", "HEADWATER_KV_SOCKET"}, (
                f"{page.name} names {variable}"
            )
        for verb in re.findall(r"(?:`|^|\$ )headwater ([a-z]+)", content, re.MULTILINE):
            assert verb in VERBS, f"{page.name} names `headwater {verb}`"


def test_every_request_field_is_documented_and_no_other() -> None:
    page = text("docs/api.md")
    structs = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, StreamOptions, NvExt)
    fields = {name for struct in structs for name in struct.__struct_fields__}
    named = set(re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", page))
    assert fields - named - {"agent_hints"} == set()
    tables = page[page.index("## Fields of both completions") : page.index("## Tokenize")]
    first_columns = re.findall(r"^\| (`[^|]+) \|", tables, re.MULTILINE)
    in_first_column = set(re.findall(r"`(\w+)`", " ".join(first_columns)))
    assert in_first_column - fields == set()


def test_every_metric_is_documented_and_no_other() -> None:
    metrics = FrontendMetrics()
    metrics.model("m").submitted(1, 1, 0.1)
    metrics.answered("/v1/models", 200, True)
    meter = Meter("fe", lambda name: TenantSpec(), RealClock())
    exposed = MetricsPage(metrics, ClusterView(), lambda: 0, meter).render().decode()
    families = {f"{f.name}_total" if f.type == "counter" else f.name for f in text_string_to_metric_families(exposed)}
    ours = {name for name in families if name.startswith("headwater_")}
    named = set(re.findall(r"`(headwater_[a-z0-9_]+)`", text("docs/observe.md")))
    assert ours - named == set()
    assert named - ours - {"headwater_"} == set()
