"""Flags that speak of the same thing: refused where they differ, whatever order or layer they come in."""

from pathlib import Path

import pytest

from headwater.cli.engine_flags import config_from, parse_arguments
from headwater.cli.verbs import parser_of
from headwater.config.conflicts import check_graph, check_worker
from headwater.errors import ConfigError
from headwater.frontend.routing import queue_limits

TWO = ["--attach", "http://a:1", "--attach", "http://b:1"]


def graph(*flags: str) -> None:
    check_graph(config_from(parse_arguments(parser_of("serve"), flags)))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--workers", "5", "--prefill", "1", "--decode", "1"], "--workers 5 does not go with --prefill 1 --decode 1"),
        (["--workers", "1", "--decode", "2"], "--workers 1 does not go with --decode 2, which makes 2"),
        (["--workers", "3", *TWO], "--workers 3 does not go with --attach http://a:1,http://b:1, which makes 2"),
        (["--prefill", "1", "--decode", "2", *TWO], "--prefill 1 --decode 2 are 3 workers"),
        (["--role", "both", "--prefill", "1", "--decode", "1"], "--role both does not go with --prefill 1 --decode 1"),
        (["--num-kv-blocks", "9", "--kv-cache-memory", "1GiB"], "--num-kv-blocks 9 does not go with --kv-cache-memory"),
        ([*TWO, "--attach-api-key", "a,b,c"], "--attach-api-key says 3 keys for 2 servers"),
        ([*TWO, "--attach-kv-events", "tcp://a:1"], "--attach-kv-events says 1 places for 2 servers"),
        ([*TWO, "--attach", "http://a:1/v1/"], "--attach names http://a:1 2 times"),
        (["--engine", "native", *TWO], "--engine native does not go with --attach"),
        (["--engine", "sglang", "--page-size", "16", "--block-size", "32"], "--block-size 32 and --page-size, which"),
        (["--engine", "vllm", "-tp", "2", "--tensor-parallel-size", "4"], "--tensor-parallel-size 4 and -tp, which"),
        (["--engine", "trtllm", "--max_seq_len=4", "--max-model-len", "8"], "--max-model-len 8 and --max_seq_len=4"),
    ],
)
def test_of_two_flags_none_wins_silently(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        graph(*flags)
    assert says in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers", "2", "--prefill", "1", "--decode", "1"],
        ["--workers", "2", *TWO, "--engine", "attached", "--attach-api-key", "one"],
        [*TWO, "--attach-api-key", "a,b", "--attach-kv-events", "tcp://a:1,tcp://b:1"],
        ["--role", "adaptive", "--prefill", "1", "--decode", "1"],
        ["--role", "decode", "--prefill", "1", *TWO],
        ["--num-kv-blocks", "9", "--kv-cache-memory", "none"],
        ["--engine", "sglang", "--page-size", "16"],
        ["--role", "both", "--workers", "3"],
    ],
)
def test_what_agrees_goes_together(flags: list[str]) -> None:
    graph(*flags)


def test_a_file_counts_like_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text("workers: 4\nengine:\n  attach: [http://a:1, http://b:1]\n")
    with pytest.raises(ConfigError, match=r"--workers 4 \(file .*graph.yaml:1\) does not go with --attach"):
        graph("--config", str(file))


def test_a_class_has_one_limit() -> None:
    config = config_from(parse_arguments(parser_of("frontend"), ["--router-class-limit", "low=1,low=2"])).config
    with pytest.raises(ConfigError, match="--router-class-limit low=2: low has 1 already"):
        queue_limits(config.router, {})


def test_a_worker_by_itself_attaches_to_one_server() -> None:
    def worker(*flags: str) -> None:
        check_worker(config_from(parse_arguments(parser_of("worker"), flags)))

    worker(*TWO[:2], "--role", "prefill")
    with pytest.raises(ConfigError, match="one worker attaches to one server, not to 2"):
        worker(*TWO)
    with pytest.raises(ConfigError, match="--engine mocker does not go with --attach"):
        worker(*TWO[:2], "--engine", "mocker")
