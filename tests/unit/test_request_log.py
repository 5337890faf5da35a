"""The log of served requests: written beside the work, read back for a replay."""

import gzip
import json
import logging
import os
import time
from array import array
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.clock import RealClock, VirtualClock
from headwater.errors import ConfigError
from headwater.frontend import background_lines, request_log
from headwater.frontend.request_log import EndedRequest, RequestLog
from headwater.kv.identity import chain_block_ids, num_shared_blocks
from headwater.protocol.request_log import LoggedRequest
from headwater.sim.report import shared_lru_hit_rate
from headwater.sim.request_log import from_log, is_request_log, read_log
from headwater.sim.run import Load

BLOCK = 16


def tokens(*runs: tuple[int, int]) -> bytes:
    """Token ids from (token, how many)."""
    return b"".join([array("I", [token]).tobytes() * count for token, count in runs])


def ended(prompt: bytes = tokens((5, 100)), output_tokens: int = 30, **rest: object) -> EndedRequest:
    fields: dict[str, object] = {
        "at": 1000.0,
        "model": "m",
        "prompt_tokens": len(prompt) // 4,
        "output_tokens": output_tokens,
        "max_tokens": 64,
        "block_size": BLOCK,
        "block_ids": chain_block_ids(b"", prompt, BLOCK),
        "outcome": "finished",
    }
    return EndedRequest(**fields | rest)  # type: ignore[arg-type]


def opened(path: Path, *, max_bytes: int = 1 << 30, kept_files: int = 3) -> RequestLog:
    return RequestLog(path, RealClock(), max_bytes=max_bytes, kept_files=kept_files)


def written(path: Path, *rows: EndedRequest) -> list[LoggedRequest]:
    log = opened(path)
    for row in rows:
        log.note(row)
    log.close()
    log.close()
    return list(read_log(path))


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    row = ended(session="s", tenant="t", priority=2, worker="w1", cached_tokens=48, ttft_ms=12.5, e2e_ms=99.0)
    found, failed = written(path, row, replace(row, outcome="failed", output_tokens=0, ttft_ms=None))
    assert (found.at, found.model, found.prompt_tokens, found.output_tokens) == (1000.0, "m", 100, 30)
    assert (found.max_tokens, found.block_size, found.outcome, found.priority) == (64, BLOCK, "finished", 2)
    assert (found.worker, found.cached_tokens, found.ttft_ms, found.e2e_ms) == ("w1", 48, 12.5, 99.0)
    assert len(b64decode(found.blocks)) == 6 * 8
    assert (failed.outcome, failed.ttft_ms) == ("failed", None)
    assert is_request_log(path)


def test_names_are_hashes_that_stay_the_same_as_long_as_their_key(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    row = ended(session="alice@example.com", tenant="sk-very-secret")
    first, second = written(path, row, row)
    (third,) = written(path, row)[2:]
    assert first.blocks == second.blocks == third.blocks
    assert first.session == third.session != ""
    text = path.read_bytes()
    assert b"alice" not in text
    assert b"secret" not in text
    assert row.block_ids[:8] not in b64decode(first.blocks), "a guessed prompt cannot be looked up"
    assert (path.stat().st_mode & 0o777, (tmp_path / "requests.jsonl.key").stat().st_mode & 0o777) == (0o600, 0o600)
    (tmp_path / "requests.jsonl.key").unlink()
    assert written(path, row)[-1].blocks != first.blocks


def test_a_full_file_is_kept_under_a_number_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = opened(path, max_bytes=2000, kept_files=2)
    for number in range(60):
        log.note(ended(at=float(number)))
        if number % 10 == 9:
            wait_until_written(log)
    log.close()
    assert {file.name for file in tmp_path.iterdir()} == {
        "requests.jsonl",
        "requests.jsonl.1",
        "requests.jsonl.2",
        "requests.jsonl.key",
    }
    newest, older, oldest = (list(read_log(path.with_name(path.name + end))) for end in ("", ".1", ".2"))
    times = [row.at for row in oldest + older + newest]
    assert times == sorted(times)
    assert times[-1] == 59.0
    assert log.num_dropped == 0


def wait_until_written(log: RequestLog) -> None:
    lines = log._lines
    lines._wake.set()
    deadline = time.monotonic() + 10
    while lines._pending or lines._noted_bytes != lines._taken_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    lines._wake.clear()
    time.sleep(0.02)


def test_frontends_share_a_file_and_follow_its_rotation(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    logs = [opened(path, max_bytes=6000, kept_files=9) for _ in range(2)]
    for number in range(80):
        logs[number % 2].note(ended(at=float(number)))
        if number % 8 == 7:
            for log in logs:
                wait_until_written(log)
    for log in logs:
        log.close()
    files = [file for file in tmp_path.iterdir() if file.suffix != ".key"]
    assert len(files) > 1
    assert sorted(row.at for file in files for row in read_log(file)) == [float(number) for number in range(80)]
    assert len({row.blocks for file in files for row in read_log(file)}) == 1


def test_a_deleted_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = opened(path)
    path.unlink()
    log.note(ended())
    log.close()
    assert len(list(read_log(path))) == 1


def test_what_waits_is_bounded_and_losses_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_log, "_MAX_PENDING", 5)
    monkeypatch.setattr(background_lines, "_FLUSH_INTERVAL_S", 60.0)
    log = opened(tmp_path / "requests.jsonl")
    for _ in range(8):
        log.note(ended())
    assert log.num_dropped == 3
    with caplog.at_level(logging.WARNING):
        log.close()
    assert "3 requests could not be recorded" in caplog.text
    assert len(list(read_log(tmp_path / "requests.jsonl"))) == 5


def test_bytes_that_wait_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "_MAX_PENDING_BYTES", 250)
    monkeypatch.setattr(background_lines, "_FLUSH_INTERVAL_S", 60.0)
    log = opened(tmp_path / "requests.jsonl")
    for _ in range(4):
        log.note(ended())
    log.close()
    assert log.num_dropped == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full disk")
def test_a_full_disk_costs_rows_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "requests.jsonl"
    log = opened(path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._lines._file._descriptor)
    os.close(full)
    log._lines._file._is_stale = lambda: False  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        log.note(ended())
        log.close()
    assert log.num_dropped == 1
    assert "No space left" in caplog.text


def test_a_path_that_cannot_be_written_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot record requests in"):
        RequestLog(tmp_path / "no" / "folder", VirtualClock(), max_bytes=1, kept_files=1)


# -- reading


def test_larger_blocks_are_made_of_smaller_ones(tmp_path: Path) -> None:
    common = tokens((1, 128))
    rows = written(
        tmp_path / "log",
        ended(common + tokens((2, 100))),
        ended(common + tokens((3, 100))),
        ended(tokens((4, 70))),
    )
    for block_size in (16, 32, 64):
        first, second, third = from_log(rows, block_size)
        assert len(first.block_ids) == 228 // block_size * 16
        assert num_shared_blocks(first.block_ids, second.block_ids) == 128 // block_size
        assert num_shared_blocks(first.block_ids, third.block_ids) == 0
    with pytest.raises(ConfigError, match="blocks of 16 tokens, which do not make blocks of 40"):
        from_log(rows, 40)


@pytest.mark.parametrize("session", ["", "s"])
def test_a_next_turn_tells_what_the_answer_before_was(tmp_path: Path, session: str) -> None:
    prompt, answer = tokens((1, 64), (2, 40)), tokens((3, 50))
    rows = written(
        tmp_path / "log",
        ended(prompt, 50, session=session),
        ended(tokens((9, 64)), 20, at=1001.0, session=session and "other"),
        ended(prompt + answer + tokens((4, 30)), 10, at=1002.0, session=session),
    )
    first, other, second = from_log(rows, BLOCK)
    computed = (104 + 49) // BLOCK
    assert first.block_ids + first.answer_ids == second.block_ids[: computed * 16]
    assert len(first.answer_ids) == (computed - 104 // BLOCK) * 16
    assert other.answer_ids == second.answer_ids == b""
    assert [request.at_s for request in (first, other, second)] == [0.0, 1.0, 2.0]


def test_a_shared_system_prompt_is_nobodys_conversation(tmp_path: Path) -> None:
    """Prompts whose full blocks are the system prompt alone do not go on in those that begin with it."""
    system = tokens((1, 64))
    rows = written(
        tmp_path / "log",
        *[ended(system + tokens((2 + number, 5)), 40, at=1000.0 + number) for number in range(3)],
        ended(system + tokens((50, 200)), 40, at=1009.0),
    )
    assert [request.answer_ids for request in from_log(rows, BLOCK)] == [b""] * 4


def test_what_has_no_answer_is_left_out(tmp_path: Path) -> None:
    rows = written(tmp_path / "log", ended(output_tokens=0, outcome="refused"), ended(at=1005.0))
    (request,) = from_log(rows, BLOCK)
    assert request.at_s == 0.0


def test_requests_without_block_ids_share_nothing(tmp_path: Path) -> None:
    rows = written(tmp_path / "log", *[ended(block_ids=b"", at=1000.0 + number) for number in range(3)])
    requests = from_log(rows, BLOCK)
    assert all(len(request.block_ids) == 6 * 16 for request in requests)
    assert shared_lru_hit_rate(requests, 1000, BLOCK) == 0.0


def test_a_load_knows_a_log_from_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "monday.jsonl"
    rows = written(path, ended(at=5.0), ended(at=3.0))
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, packed):
        assert [request.at_s for request in Load(file, BLOCK).requests()] == [0.0, 2.0]
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"format": "headwater-requests", "version": 2}'], "version 2, not headwater-requests version 1"),
        (['{"format": "something", "version": 1}'], "something version 1"),
        (["hello"], "not a log of requests"),
        (['{"format": "headwater-requests", "version": 1}', '{"at": 3}'], ":2: not a logged request"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, lines: list[str], says: str) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=says):
        list(read_log(path))


def test_fields_of_later_versions_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, ended())
    header, line = path.read_text().splitlines()
    path.write_text("\n".join([header, json.dumps(json.loads(line) | {"mood": "good"})]) + "\n")
    assert len(list(read_log(path))) == 1


def test_blocks_that_are_not_base64_are_refused(tmp_path: Path) -> None:
    (row,) = written(tmp_path / "log", ended())
    broken = LoggedRequest(row.at, row.model, row.prompt_tokens, row.output_tokens, 1, BLOCK, "%%%")
    with pytest.raises(ConfigError, match="not base64"):
        from_log([broken], BLOCK)
