"""Command lines of `vllm serve`, translated; and the page of names, current."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headwater.cli.engine_flags import config_from, parse_arguments, take_engine_words
from headwater.cli.main import main
from headwater.cli.verbs import parser_of
from headwater.compat.sglang import command as sglang
from headwater.compat.trtllm import command as trtllm
from headwater.compat.vllm import command as vllm
from headwater.compat.vllm.command import translate
from headwater.compat.vllm.engine_flags import ENGINE_FLAGS
from headwater.errors import ConfigError
from vllm_page import NAMES, page

PAGE = Path(__file__).parents[2] / "docs/reference/vllm.md"


def test_the_page_of_names_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python tests/vllm_page.py > docs/reference/vllm.md"


def test_every_flag_of_vllms_server_has_an_answer_and_every_answer_a_flag() -> None:
    assert set(vllm.TABLE.flags) - set(NAMES["flags"]) == set()
    of_the_engine = {flag for flag in NAMES["flags"] if vllm.TABLE.verdict_of(flag)[0] == "passed"}
    assert of_the_engine.isdisjoint(NAMES["server_flags"])
    assert of_the_engine == {flag for flag in ENGINE_FLAGS if flag.startswith("--")}, "no more and no less"
    unknown = {flag for flag in NAMES["flags"] if vllm.TABLE.verdict_of(flag)[0] == "unknown"}
    assert unknown == {"--model", "--help"}, "which is the line's own, and which serves nothing"


@pytest.mark.parametrize("command", [vllm, sglang, trtllm])
def test_flags_that_stand_for_others_are_there(command: Any) -> None:
    """Also those that notes speak of."""
    known = parser_of("serve")._option_string_actions.keys() | parser_of("worker")._option_string_actions.keys()
    of_the_engine = {"--lora-modules", "--extra-llm-api-options", "--telemetry-config.disabled"}
    for flag in command.TABLE.flags:
        verdict, note = command.TABLE.verdict_of(flag)
        if verdict == "renamed":
            assert note in known | of_the_engine, flag
        elif verdict == "same":
            assert flag in known | of_the_engine, flag
        else:
            assert set(re.findall(r"--[a-z][a-z-]+", note)) <= known, flag


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ("vllm serve M", "headwater serve M --engine vllm"),
        ("vllm serve --model M --port 1", "headwater serve M --engine vllm --port 1"),
        ("vllm serve M --dtype=half -tp 2", "headwater serve M --engine vllm --dtype float16 -tp 2"),
        (
            "python -m vllm.entrypoints.openai.api_server --model M --served-model-name a b --api_key k",
            "headwater serve M --engine vllm --served-model-name a --served-model-name b --api-key k",
        ),
        (
            "vllm serve M --api-server-count 2 --enforce_eager",
            "headwater serve M --engine vllm --frontends 2 --enforce-eager",
        ),
        ("vllm serve M --seed -1 --max-logprobs -1", "headwater serve M --engine vllm --seed -1 --max-logprobs -1"),
        ("vllm serve M --tool-call-parser hermes", "headwater serve M --engine vllm"),
    ],
)
def test_lines(given: str, command: str) -> None:
    found = translate(given.split())
    assert found.command == command
    assert found.complete


def test_numbers_below_zero_are_values() -> None:
    found = translate(["vllm", "serve", "M", "--seed", "-1", "--root-path", "-1"])
    assert [flag.given for flag in found.flags] == [["--seed", "-1"], ["--root-path", "-1"]]
    assert found.command == "headwater serve M --engine vllm --seed -1"


def test_what_has_no_equivalent_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "check", "--json", "--", "vllm", "serve", "M", "--root-path", "/x"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["complete"] is False
    assert document["flags"][0] == {
        "given": ["--root-path", "/x"],
        "verdict": "none",
        "words": [],
        "note": "strip the prefix in the proxy",
    }
    assert main(["compat", "check", "--", "vllm", "serve", "M", "--enable-prefix-caching"]) == 0
    assert "headwater serve M --engine vllm --enable-prefix-caching" in capsys.readouterr().out


@pytest.mark.parametrize("slip", ["--enforce-eagr", "--max-model-length 8", "-x", "--no-such.member 1"])
def test_a_flag_that_vllm_does_not_have_is_unknown(slip: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "check", "--json", "--", "vllm", "serve", "M", *slip.split()]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["complete"], document["flags"][0]["verdict"]) == (False, "unknown")
    assert document["command"].endswith(slip), "another release may have it"
    assert main(["compat", "check", "--", "vllm", "serve", "M", *slip.split()]) == 1
    assert "unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag", ["--enforce_eager", "--no-enable-chunked-prefill", "-dp 2", "-O3", "-O 3", "--compilation-config.mode 3"]
)
def test_flags_of_vllms_engine_are_known_in_all_their_spellings(flag: str) -> None:
    (found,) = translate(["vllm", "serve", "M", *flag.split()]).flags
    assert found.verdict == "passed"


def test_a_line_may_be_quoted_as_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "check", "--", "vllm serve M --dtype half"]) == 0
    assert capsys.readouterr().out.startswith("headwater serve M --engine vllm --dtype float16\n")
    assert main(["compat", "check", "--", "vllm serve 'M"]) == 2
    assert "No closing quotation" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        "vllm bench x",
        "vllm serve",
        "vllm serve A B",
        "vllm serve A --model B",
        "vllm serve --model",
        "python -m another.server --model M",
    ],
)
def test_lines_that_serve_nothing(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        translate(given.split())
    assert "vllm serve MODEL" in str(refused.value.hint) or "--model wants one value" in refused.value.message


def test_flags_that_are_not_ours_go_to_the_engine() -> None:
    parser = parser_of("serve")
    words = ["M", "--engine", "vllm", "--enforce-eager", "--port", "1", "--kv-events-config", '{"a": 1}', "-tp", "2"]
    own, engine = take_engine_words(parser, words, {})
    assert own == ["M", "--engine", "vllm", "--port", "1"]
    assert engine == ["--enforce-eager", "--kv-events-config", '{"a": 1}', "-tp", "2"]
    args = parse_arguments(parser, [*words, "--served-model-name", "a", "b", "--block-size", "16"])
    config = config_from(args).config.engine
    assert config.served_model_name == ("a", "b")
    assert config.engine_args == (*engine, "--block-size", "16"), "what equals our default is said all the same"


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["M", "--engine=vllm", "--seed", "-1", "--port", "-1"], {}),
        (["M", "--seed", "-1", "--port", "-1"], {"HEADWATER_ENGINE": "vllm"}),
    ],
)
def test_the_engine_is_named_in_any_way_and_numbers_below_zero_are_values(
    words: list[str], environ: dict[str, str]
) -> None:
    own, engine = take_engine_words(parser_of("serve"), words, environ)
    assert engine == ["--seed", "-1"]
    assert own == [word for word in words if word.startswith(("M", "--engine"))] + ["--port", "-1"]


def test_other_engines_take_no_flags_of_others() -> None:
    assert take_engine_words(parser_of("serve"), ["M", "--enforce-eager"], {}) == (["M", "--enforce-eager"], [])
    assert take_engine_words(parser_of("serve"), ["M", "--x"], {"HEADWATER_ENGINE": "vllm"}) == (["M"], ["--x"])
    assert take_engine_words(parser_of("serve"), [], {}) == ([], [])
    with pytest.raises(ConfigError, match="unknown flag --enforce-eager"):
        parse_arguments(parser_of("serve"), ["M", "--engine", "native", "--enforce-eager"])
