import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headwater
from headwater.cli.completion import SHELLS, script_for
from headwater.cli.main import main
from headwater.cli.verbs import VERBS, parser_of, runner_of
from headwater.config.fields import fields_of


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HEADWATER_"):
            monkeypatch.delenv(name)


def complaint(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--version") == f"headwater {headwater.__version__}\n"


def test_help_lists_every_verb_and_no_verb_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--help")
    assert all(f"  {name} " in text for name in VERBS)
    assert main([]) == 2


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help_and_a_runner(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"usage: headwater {verb}" in output(capsys, verb, "--help")
    assert callable(runner_of(verb))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["sevre"], "unknown command 'sevre'\nheadwater: hint: did you mean `headwater serve`?"),
        (["serve", "--max-num-seq", "4"], "unknown flag --max-num-seq\nheadwater: hint: did you mean --max-num-seqs?"),
        (["serve", "--prot=8"], "did you mean --port?"),
        (
            ["kv", "clear", "--model", "m", "--url", "x"],
            "unknown flag --url\nheadwater: hint: `headwater kv clear --help=all`",
        ),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["serve", "one", "two"], "unexpected argument 'two'"),
        (["serve", "one", "--model", "two"], "two models: one and --model two"),
        (["serve", "--port", "1e9"], "--port: frontend.port = '1e9': expected a whole number from 0 to 65535"),
        (["serve", "--dtype", "int3"], "expected one of auto, "),
        (["serve", "--config", "/nowhere.yaml"], "cannot read the configuration file /nowhere.yaml"),
        (["serve", "--help=nosuchword"], "no flag of `headwater serve` is about 'nosuchword'"),
        (["config", "show", "--orign"], "did you mean --origin?"),
        (["config"], "required: ACTION"),
        (["completion", "fsh"], "invalid choice: 'fsh'"),
        (["chat", "--url", "ftp://x"], "--url ftp://x: expected something like http://"),
        (["chat", "--url", "http://127.0.0.1:99999"], "expected something like http://"),
    ],
)
def test_wrong_usage_is_one_line_with_a_hint(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in complaint(capsys, *argv)


def test_a_wrong_variable_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWATER_PROT", "1")
    assert "did you mean HEADWATER_PORT?" in complaint(capsys, "config", "show")


def test_nobody_there_is_a_failure_not_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no answer from http://127.0.0.1:1" in complaint(capsys, "chat", "--url", "http://127.0.0.1:1", code=1)


def test_waiting_in_vain_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["chat", "--url", "http://127.0.0.1:1", "--wait", "100ms"]
    assert "not ready in time: no answer" in complaint(capsys, *argv, code=3)
    assert "--wait: expected a time such as 30s or 5m, not 'soon'" in complaint(
        capsys, "chat", "--url", "http://127.0.0.1:1", "--wait", "soon"
    )


def test_the_short_help_is_short_and_says_where_the_rest_is(capsys: pytest.CaptureFixture[str]) -> None:
    short, everything = output(capsys, "serve", "--help"), output(capsys, "serve", "--help=all")
    assert "--max-model-len" in short
    assert "--keepalive-timeout" not in short
    assert "--help=frontend" in short
    assert all(field.flag in everything for field in fields_of().values())
    assert len(short.splitlines()) < 70


def test_help_can_be_searched(capsys: pytest.CaptureFixture[str]) -> None:
    found = output(capsys, "serve", "--help=KV")
    assert "--kv-cache-memory" in found
    assert "--block-size" in found
    assert "--port" not in found
    section = output(capsys, "serve", "--help", "router")
    assert "--router-policy" in section
    assert "--max-num-seqs" not in section


def test_flags_reach_the_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text("workers: 2\n")
    argv = ["--config", str(file), "--no-enable-prefix-caching", "--strict", "--api-key", "a,b", "--port=0"]
    shown = json.loads(output(capsys, "config", "show", "--json", "--origin", *argv))
    assert shown["workers"] == {"value": 2, "origin": {"layer": "file", "detail": f"{file}:1"}}
    assert shown["engine.enable_prefix_caching"]["value"] is False
    assert shown["frontend.strict"]["value"] is True
    assert shown["frontend.api_key"]["value"] == ["<redacted>", "<redacted>"]
    assert shown["frontend.port"]["value"] == 0


def test_config_validate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text("workers: 2\n")
    assert "fine" in output(capsys, "config", "validate", str(file))
    file.write_text("workrs: 2\n")
    assert f"{file}:1: unknown key workrs" in complaint(capsys, "config", "validate", str(file))


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output(capsys, "config", "schema"))["$defs"]


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_verbs_flags_and_values(shell: str) -> None:
    script = script_for(shell)
    for word in ("serve", "--max-num-seqs" if shell != "tcsh" else "doctor", "bfloat16" if shell != "tcsh" else "chat"):
        assert word in script


@pytest.mark.parametrize("shell", ["bash"])
def test_completion_scripts_are_valid(shell: str, tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(script_for(shell))
    subprocess.run([shell, "-n", str(script)], check=True)


def test_debug_level_shows_the_traceback() -> None:
    with pytest.raises(Exception, match="no answer"):
        main(["chat", "--url", "http://127.0.0.1:1", "--log-level", "debug"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "headwater", "config", "docs"], stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_python_minus_m() -> None:
    done = subprocess.run([sys.executable, "-m", "headwater", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("headwater ")


def test_every_parser_builds_alone() -> None:
    for verb in VERBS:
        assert parser_of(verb).prog == f"headwater {verb}"
