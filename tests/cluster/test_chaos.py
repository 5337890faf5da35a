"""Faults at random under load, the short version of `bench/chaos.py`: the demo model, every answer compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("demo_model")
def test_nothing_is_lost_nothing_differs_and_nothing_leaks() -> None:
    command = [sys.executable, "chaos.py", "--json", "--minutes", "0.3", "--workers", "2", "--streams", "6"]
    command += ["--cases", "9", "--tokens", "20", "--pause", "1.5", "--faults", "kill,stop,drain,registry"]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=550, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["streams"] > 0
    assert sum(report["faults"].values()) >= 2
    assert (report["lost"], report["differing"], report["invalid_json"]) == (0, 0, 0), report
    assert report["leaked_blocks"] == 0
    assert done.returncode == 0
