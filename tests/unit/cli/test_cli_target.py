"""Which server the client verbs choose."""

import argparse
import os
from pathlib import Path

import pytest

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
