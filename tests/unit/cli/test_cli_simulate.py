import json
import re
from pathlib import Path
from random import Random

import msgspec
import pytest
from rich.cells import cell_len

from headwater.cli.main import main
from headwater.perf.model import PerfModel, StepShape
from headwater.sim.mixes import MIXES
from headwater.sim.scenarios import SCENARIOS

FIELDS = {
    "trace",
    "workers",
    "policy",
    "mode",
    "requests",
    "hit_rate",
    "ceiling",
    "ttft_ms_mean",
    "ttft_ms_p99",
    "itl_ms_mean",
    "e2e_ms_mean",
    "output_tok_s",
    "imbalance",
}
"""What scripts rely on."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    random = Random(3)
    path = tmp_path / "morning.jsonl"
    lines = []
    for number in range(60):
        topic = random.randrange(4)
        lines.append(
            {
                "timestamp": number * 150,
                "input_length": 1400,
                "output_length": random.randrange(1, 30),
                "hash_ids": [topic, 100 + topic, 1000 + number],
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def objects(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, object]]:
    assert main(["simulate", *argv, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["simulate", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_json_has_one_object_per_policy_worker_count_and_mode(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(
        capsys,
        *("--trace", str(trace), "--policy", "delay", "--policy", "round_robin", "--workers", "2", "--workers", "4"),
        *("--speed", "2", "--closed", "3"),
    )
    assert [(one["policy"], one["workers"], one["mode"]) for one in found] == [
        (policy, workers, mode)
        for workers in (2, 4)
        for mode in ("x2", "closed3")
        for policy in ("delay", "round_robin")
    ]
    for one in found:
        assert set(one) >= FIELDS
        assert (one["trace"], one["requests"]) == ("morning", 60)
        assert 0 < one["hit_rate"] <= one["ceiling"] + 0.02 < 1
        assert one["ttft_ms_mean"] <= one["ttft_ms_p99"]
    assert found[0]["hit_rate"] > found[1]["hit_rate"]


def test_pools_are_sizes_like_others(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = (
        "--trace",
        str(trace),
        "--workers",
        "4",
        "--prefill",
        "1",
        "--decode",
        "3",
        "--prefill",
        "2",
        "--decode",
        "1",
    )
    whole, apart, small = objects(capsys, *argv, "--closed", "3")
    assert [one["mode"] for one in (whole, apart, small)] == ["closed3", "1P+3D closed3", "2P+1D closed3"]
    assert [one["workers"] for one in (whole, apart, small)] == [4, 4, 3]
    assert (whole["remote_rate"], whole["moved_bytes"], whole["pool_utilisation"]) == (0.0, 0, {})
    assert apart["remote_rate"] > 0.5
    assert apart["moved_bytes"] > 0
    assert set(apart["pool_utilisation"]) == {"prefill", "decode"}
    (never,) = objects(capsys, *argv[:2], *argv[4:8], "--disagg", "never")
    assert (never["remote_rate"], never["moved_bytes"]) == (0.0, 0)
    (far,) = objects(capsys, *argv[:2], *argv[4:8], "--link-gb-per-s", "0.5", "--link-latency", "20ms")
    (near,) = objects(capsys, *argv[:2], *argv[4:8], "--link-gb-per-s", "0", "--link-latency", "0")
    assert far["ttft_ms_mean"] > near["ttft_ms_mean"] + 100
    page = tmp_path / "pools.html"
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["simulate", *argv, "--html", str(page)]) == 0
    table = capsys.readouterr().out
    assert "morning, 4 workers, 1P+3D x1" in table
    assert "remote" in table
    assert "computed remotely" in page.read_text()


def test_processes_share_runs_and_change_nothing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--trace", str(trace), "--policy", "delay", "--policy", "random", "--policy", "preble")
    alone, shared = objects(capsys, *argv), objects(capsys, *argv, "--jobs", "2")
    for one in alone + shared:
        del one["sim_requests_per_min"]
    assert alone == shared


def test_the_table_fits_100_columns(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", str(trace), "--policy", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 100
    text = "\n".join(lines)
    assert "morning, 8 workers, x1" in text
    for name in ("delay", "delay+queue", "sglang_cache_aware", "TTFT ms", "E2E ms", "imbal."):
        assert name in text
    assert "…" not in text


def test_the_report_is_written(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    assert main(["simulate", "--trace", str(trace), "--speed", "1", "--speed", "4", "--html", str(path)]) == 0
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    assert "Throughput against interactivity" in text
    assert main(["simulate", "--trace", str(trace), "--html", str(tmp_path / "no" / "folder.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_named_hardware_gives_its_own_times_and_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--mix", "chat", "--limit", "60", "--model", "llama-3.1-70b-fp8", "--tensor-parallel-size", "2")
    (h100,), (b200,) = (objects(capsys, *argv, "--device", device) for device in ("h100-sxm", "b200-sxm"))
    assert h100["itl_ms_mean"] > 1.5 * b200["itl_ms_mean"]


def test_fitted_times_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    perf = PerfModel()
    shapes = [StepShape(100 * n, 0, n, 1000 * n) for n in range(1, 20)] + [StepShape(0, 0, n, 0) for n in range(1, 9)]
    perf.steps("a class").believe([(shape, 20.0 + 0.1 * shape.prefill_tokens) for shape in shapes], 100)
    path = tmp_path / "times.json"
    path.write_bytes(msgspec.json.encode(perf.state()))
    (found,) = objects(capsys, "--mix", "unique", "--limit", "40", "--fitted", str(path))
    assert found["itl_ms_mean"] == pytest.approx(20.0, rel=0.2)
    assert "cannot read step times" in complaint(capsys, "--fitted", str(tmp_path / "missing"))
    path.write_text('{"steps": {}, "links": {}}')
    assert "0 classes" in complaint(capsys, "--fitted", str(path))


def test_disturbances_reach_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--mix", "rag", "--limit", "150", "--workers", "2")
    (plain,), (slow,) = objects(capsys, *argv), objects(capsys, *argv, "--speed-gap", "0.5")
    assert slow["e2e_ms_mean"] != plain["e2e_ms_mean"]
    (known,) = objects(capsys, *argv, "--known-times", "--prefill-error", "0.3", "--event-delay", "50ms", "--late", "1")
    assert known["requests"] == 150


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--mix", "raag"], "no mix is called 'raag'"),
        (["--policy", "delai"], "did you mean delay?"),
        (["--policy", "delay@7"], "no policy is written 'delay@7'"),
        (["--device", "h100"], "did you mean 'h100-sxm'?"),
        (["--device", "l4"], "does not fit on 1 x l4"),
        (["--workers", "0"], "at least 1"),
        (["--speed", "0"], "more than 0"),
        (["--closed", "0"], "at least 1"),
        (["--trace", "/no/such.jsonl"], "cannot read /no/such.jsonl"),
        (["--prefill-error", "0.3"], "--known-times"),
        (["--max-num-batched-tokens", "10"], "leaves no room"),
        (["--late", "8"], "--late 8"),
        (["--late", "-1"], "--late -1: 0 or more"),
        (["--boasting", "-1"], "--boasting -1: 0 or more"),
        (["--limit", "-1"], "--limit -1: at least 1"),
        (["--num-kv-blocks", "0"], "--num-kv-blocks 0: at least 1"),
        (["--workers-per-node", "0"], "--workers-per-node 0: at least 1"),
        (["--speed", "nan"], "expected a number such as 2 or 0.5, not 'nan'"),
        (
            ["--prefill", "1", "--decode", "1", "--link-gb-per-s", "inf"],
            "expected a number such as 2 or 0.5, not 'inf'",
        ),
        (["--speed-gap", "1"], "from 0 to less than 1"),
        (["--known-times", "--decode-error", "-1"], "more than -1"),
        (["--policy", "nosuch"], "no routing policy is called 'nosuch'"),
        (["--scenario", "headline", "--workers", "4"], "brings its own load"),
        (["--jobs", "0"], "at least 1"),
        (["--prefill", "2"], "come in pairs"),
        (["--prefill", "0", "--decode", "4"], "at least 1 of each"),
        (["--prefill", "1", "--decode", "1", "--transfer-gb-per-s", "0"], "more than 0"),
        (["--prefill", "1", "--decode", "1", "--disagg", "maybe"], "invalid choice"),
        (["--scenario", "headline", "--prefill", "1", "--decode", "1"], "brings its own load"),
    ],
)
def test_mistakes_are_explained(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in complaint(capsys, *argv)


def test_every_mix_can_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [part for name in MIXES for part in ("--mix", name)]
    assert [one["trace"] for one in objects(capsys, *argv, "--limit", "30")] == list(MIXES)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_end_with_ours_against_the_baseline(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--scenario", name, "--limit", "120"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    scenario = SCENARIOS[name]
    for mode in [*[f"x{speed:g}" for speed in scenario.speeds], *[f"closed{number}" for number in scenario.closed]]:
        assert re.search(rf"{mode}: [\d.]+x throughput, TTFT [\d.]+x shorter, reuse \d+% -> \d+%", out)
    assert scenario.published in out
