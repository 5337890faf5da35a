"""Command lines that start SGLang's server, translated."""

import json

import pytest

from headwater.cli.engine_flags import config_from, parse_arguments
from headwater.cli.main import main
from headwater.cli.verbs import parser_of
from headwater.compat.sglang.command import TABLE, is_sglang, translate
from headwater.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ("python -m sglang.launch_server --model-path M", "headwater serve M --engine sglang"),
        ("python3 -m sglang.launch_server --model M --port 1", "headwater serve M --engine sglang --port 1"),
        ("sglang serve --model-path=M --tp 2", "headwater serve M --engine sglang --tensor-parallel-size 2"),
        (
            "python -m sglang.launch_server --model-path M --context-length 4096 --page_size 32 --disable-radix-cache",
            "headwater serve M --engine sglang --max-model-len 4096 --block-size 32 --no-enable-prefix-caching",
        ),
        (
            "sglang serve --model-path M --mem-fraction-static 0.8 --enable-metrics --attention-backend fa3",
            "headwater serve M --engine sglang --mem-fraction-static 0.8 --attention-backend fa3",
        ),
    ],
)
def test_lines(given: str, command: str) -> None:
    assert is_sglang(given.split())
    found = translate(given.split())
    assert found.command == command
    assert found.complete


def test_what_is_printed_is_what_headwater_takes() -> None:
    line = "sglang serve --model-path M --tp 2 --context-length 4096 --max-running-requests 9 --mem-fraction-static 0.8"
    _, verb, *arguments = translate(line.split()).command.split()
    config = config_from(parse_arguments(parser_of(verb), arguments)).config.engine
    assert (config.model, config.engine, config.tensor_parallel_size) == ("M", "sglang", 2)
    assert (config.max_model_len, config.max_num_seqs) == (4096, 9)
    assert config.engine_args == ("--mem-fraction-static", "0.8", "--max-running-requests", "9")


def test_what_has_no_equivalent_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["python", "-m", "sglang.launch_server", "--model-path", "M", "--grpc-mode", "--dp-size", "2"]
    assert main(["compat", "check", "--json", "--", *words]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "headwater serve M --engine sglang --dp-size 2"
    assert [flag["verdict"] for flag in document["flags"]] == ["none", "passed"]
    assert document["flags"][0]["note"] == "the API is HTTP"


def test_every_answer_is_one() -> None:
    assert all(TABLE.verdict_of(flag)[1] for flag in TABLE.flags if TABLE.verdict_of(flag)[0] != "same")


@pytest.mark.parametrize("given", ["sglang serve --port 1", "sglang serve M", "python -m sglang.launch_server"])
def test_lines_without_a_model_are_refused(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(given.split())
    assert "--model-path MODEL" in str(caught.value.hint)


def test_others_are_not_its() -> None:
    assert not is_sglang(["vllm", "serve", "M"])
