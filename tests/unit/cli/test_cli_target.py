"""Which server the client verbs choose."""

import argparse
import os
from pathlib import Path

import pytest

from headwater.cli.main import main
from headwater.cli.target import add_target, server_of
from headwater.deploy.clusters import ClusterRecord, cluster_folder
from headwater.errors import Unavailable


def asked(*words: str) -> str:
    parser = argparse.ArgumentParser()
    add_target(parser)
    return server_of(parser.parse_args(words), 1.0).url


def test_a_pid_names_one_of_several_clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with cluster_folder() as mine, cluster_folder() as other:
        mine.publish(ClusterRecord(os.getpid(), "http://127.0.0.1:1", "", 1.0))
        other.publish(ClusterRecord(os.getppid(), "http://127.0.0.1:2", "", 2.0))
        assert asked() == "http://127.0.0.1:2", "the newest"
        assert asked("--pid", str(os.getpid())) == "http://127.0.0.1:1"
        assert asked("--url", "http://127.0.0.1:3") == "http://127.0.0.1:3"
        assert asked("--port", "1") == "http://127.0.0.1:1", "not the newest"
        assert asked("--port", "4") == "http://127.0.0.1:4", "none that runs here"
        other.publish(ClusterRecord(os.getppid(), "https://127.0.0.1:5", "", 2.0, cert="its certificate"))
        assert asked("--port", "5") == "https://127.0.0.1:5", "as the graph speaks, not as a port sounds"
    with pytest.raises(Unavailable, match="no `headwater serve` with process id"):
        asked("--pid", str(os.getpid()))


@pytest.mark.parametrize(
    "words",
    [
        "status --port 1",
        "explain r1 --port 1",
        "drain w --port 1",
        "sleep w --port 1",
        "wake w --port 1",
        "chat --once hello --port 1",
        "advise --running --port 1",
        "advise --measure --rate 1 --port 1",
        "kv warm --prompts /dev/null --port 1",
        "bench serve --url http://127.0.0.1:1",
        "restart",
        "restart --pid 1",
        "drain w --pid 1",
    ],
)
def test_whoever_finds_no_cluster_is_told_how_to_get_one(
    words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(words.split()) == 1
    assert "headwater: hint: start one with `headwater serve`" in capsys.readouterr().err


def test_a_wrong_pid_is_answered_with_the_right_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with cluster_folder() as mine:
        mine.publish(ClusterRecord(os.getpid(), "http://127.0.0.1:1", "", 1.0))
        with pytest.raises(Unavailable) as caught:
            asked("--pid", "1")
    assert caught.value.hint == f"those that run here have {os.getpid()}"
