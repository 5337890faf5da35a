"""`headwater transfer bench`: rows for what works, reasons for what does not."""

import json
import re
from pathlib import Path

import pytest

from headwater.cli.main import main
from headwater.errors import DataCorrupted
from headwater.transfer.benchmark import Case, measure, running

SMALL = ["--block", "4KiB", "--batch", "8", "--seconds", "20ms", "--region", "1MiB"]


def test_a_table_with_the_columns_of_nixlbench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "bench", "--backend", "shm", "tcp", *SMALL]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "back-end",
        "op",
        "block",
        "batch",
        "GB/s",
        "best",
        "lat",
        "us",
        "p99",
        "us",
        "prep",
        "us",
        "CPU",
        "s/GB",
    ]
    assert [row.split()[:4] for row in rows] == [["shm", "read", "4KiB", "8"], ["tcp", "read", "4KiB", "8"]]


def test_json_and_what_does_not_work_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "bench", "--backend", "nixl", "file", "--json", "--op", "write", *SMALL]) == 0
    broken, row = map(json.loads, capsys.readouterr().out.splitlines())
    assert (broken["backend"], row["backend"], row["op"]) == ("nixl", "file", "write")
    assert re.fullmatch("nothing moves memory <-> memory of target: .*nixl.+", broken["error"])
    assert row["num_transfers"] > 0


@pytest.mark.parametrize(("flag", "value"), [("--block", "0"), ("--batch", "0"), ("--region", "0"), ("--seconds", "0")])
def test_nothing_to_move_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "bench", flag, value]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_sealing_without_its_library_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["transfer", "bench", "--backend", "tcp", "--encrypt", *SMALL]) == 2
    assert "pip install headwater[secure]" in capsys.readouterr().err


def test_a_target_that_is_killed_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running(Case("file", 4096, 4, region_bytes=1 << 20)) as (agent, target):
        mine = agent.register(bytearray(4096), block_bytes=4096)
        agent.read(mine.blocks([0]), target.blocks([3])).run()
        target.process.kill()
        target.process.wait(10)
        assert list(tmp_path.iterdir()) == []


def test_a_batch_that_does_not_fit_gets_a_larger_region() -> None:
    case = Case("shm", 4096, 64, seconds=0.01, region_bytes=4096)
    row = measure(case)
    assert row.gb_s > 0
    assert row.cpu_s_per_gb >= 0


def test_wrong_bytes_are_noticed() -> None:
    from headwater.transfer.benchmark import Bench

    case = Case("shm", 4096, 4, seconds=0.01, region_bytes=1 << 20)
    with running(case) as (agent, target):
        bench = Bench(case, agent, target)
        bench.run(0.01)
        bench._region.view[bench._here[1] * 4096] ^= 1
        with pytest.raises(DataCorrupted):
            bench.row()
