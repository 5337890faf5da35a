"""Graphs on one host: each has a store of its own, and nobody uses another's without being told to."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from test_kv_object_served import complete
from test_serve_command import FAST, serve

STORE = ["--kv-host", "16MiB"]


@pytest.fixture
def environment(run_folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    return {**kept, "XDG_RUNTIME_DIR": str(run_folder)}


def headwater(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwater", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def stored(environment: dict[str, str], *which: str) -> int:
    done = headwater(environment, "kv", "stat", "--json", *which)
    assert done.returncode == 0, done.stderr
    (host,) = json.loads(done.stdout)["tiers"]
    return int(host["num_stored"])


def assert_models_are_named(environment: dict[str, str], url: str) -> None:
    """Beside the fingerprint, for people and for machines."""
    name = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=60))["data"][0]["id"]
    (row,) = json.loads(headwater(environment, "kv", "ls", "--json").stdout)
    assert row["names"] == [name]
    assert len(row["model"]) == 64
    (block, *_) = json.loads(headwater(environment, "kv", "ls", "--tier", "host", "--json").stdout)
    assert (block["model"], block["names"]) == (row["model"], [name])
    shown = headwater(environment, "kv", "ls").stdout
    assert name in shown
    assert row["model"] in shown


def assert_a_model_is_cleared_by_its_name(environment: dict[str, str], url: str) -> None:
    name = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=60))["data"][0]["id"]
    wrong = headwater(environment, "kv", "clear", "--model", f"{name}x")
    assert (wrong.returncode, f" ({name})" in wrong.stderr) == (2, True), "it says which names there are"
    done = headwater(environment, "kv", "clear", "--model", name)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0
    assert headwater(environment, "kv", "clear", "--model", name).stdout == "0 blocks forgotten\n"


def test_two_graphs_have_a_store_each(environment: dict[str, str]) -> None:
    with serve(environment, *FAST, *STORE) as first:
        complete(first.url)
        first.until(lambda: stored(environment) > 0)
        assert_models_are_named(environment, first.url)
        (socket,) = Path(environment["XDG_RUNTIME_DIR"]).glob("headwater-*/serve-*/kv.sock")

        taken = headwater(environment, "serve", *FAST, *STORE, "--kv-socket", str(socket))
        assert (taken.returncode, f"another store serves {socket}" in taken.stderr) == (2, True)

        with serve(environment, *FAST, *STORE) as second:
            second.until(lambda: "try it:" in second.out)
            which = headwater(environment, "kv", "stat")
            assert (which.returncode, "2 KV stores run here" in which.stderr) == (2, True)
            sockets = sorted(Path(environment["XDG_RUNTIME_DIR"]).glob("headwater-*/serve-*/kv.sock"))
            counts = {one: stored(environment, "--socket", str(one)) for one in sockets}
            assert counts.pop(socket) > 0
            assert list(counts.values()) == [0], "the second graph uses the first one's store"
            assert second.end() == 0
        assert stored(environment) > 0, "the first one is found again by itself"
        assert_a_model_is_cleared_by_its_name(environment, first.url)
        assert first.end() == 0
