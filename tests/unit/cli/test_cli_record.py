import json
from pathlib import Path

import pytest

from headwater.cli.main import main
from headwater.clock import RealClock
from headwater.frontend.request_log import EndedRequest, RequestLog
from headwater.kv.identity import chain_block_ids


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    """Two frontends' logs of an hour, every second request in each."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for half, path in enumerate(paths):
        log = RequestLog(path, RealClock(), max_bytes=1 << 30, kept_files=1)
        for number in range(half, 40, 2):
            prompt = bytes(4 * 128) + bytes([number, 0, 0, 0]) * 72
            log.note(
                EndedRequest(
                    at=1e9 + 90 * number,
                    model="big" if number < 30 else "small",
                    prompt_tokens=200,
                    output_tokens=0 if number == 7 else 20,
                    max_tokens=50,
                    block_size=16,
                    block_ids=chain_block_ids(b"", prompt, 16),
                    outcome="refused" if number == 7 else "finished",
                    tenant=f"t{number % 3}",
                    cached_tokens=64,
                    ttft_ms=100.0,
                )
            )
        log.close()
    return paths


def test_summary(logs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", *map(str, logs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["logged"] == 40
    assert found["outcomes"] == {"finished": 39, "refused": 1}
    assert found["models"] == {"big": 30, "small": 10}
    assert (found["tenants"], found["sessions"]) == (2 * 3, 0), "each file has a key of its own"
    assert found["hours"] == pytest.approx(39 * 90 / 3600)
    assert (found["prompt_tokens_mean"], found["output_tokens_mean"], found["ttft_ms_mean"]) == (200, 20, 100)
    assert found["hit_rate"] == pytest.approx(0.32)


def test_summary_as_a_table(logs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", str(logs[0]), "--model", "big"]) == 0
    text = capsys.readouterr().out
    assert "15 in 0.70 h" in text
    assert "prefix reuse" in text


def test_merged_logs_can_be_simulated(logs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = tmp_path / "all.jsonl.gz"
    assert main(["record", *map(str, logs), "--output", str(merged)]) == 0
    capsys.readouterr()
    assert main(["simulate", "--trace", str(merged), "--policy", "delay", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["trace"], found["requests"]) == ("all", 39)
    assert found["hit_rate"] > 0.4, "the first 128 tokens are the same in half of them, by either key"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["/no/such/log"], "cannot read /no/such/log"),
        (["{log}", "--model", "huge"], "no requests in these files for huge"),
        (["{log}", "--output", "/no/such/folder/x"], "cannot write"),
    ],
)
def test_mistakes(logs: list[Path], argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", *[word.format(log=logs[0]) for word in argv]]) == 2
    assert says in capsys.readouterr().err
