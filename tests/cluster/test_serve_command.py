"""`headwater serve` and the verbs around it as a person runs them, with the mocker engine."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HEADWATER = [sys.executable, "-m", "headwater"]
DEADLINE_S = 60.0
JSON = {"content-type": "application/json"}
FAST = ["--engine", "mocker", "--mocker-speedup", "0", "--port", "0"]


class Running:
    """One `headwater serve` process and what it has written so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out, self.err = "", ""
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in ("out", "err")]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        pipe = self.process.stdout if name == "out" else self.process.stderr
        assert pipe is not None
        with pipe:
            for line in pipe:
                setattr(self, name, getattr(self, name) + line)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None or condition(), self.err
            assert time.monotonic() < deadline, self.err
            time.sleep(0.02)

    @property
    def url(self) -> str:
        self.until(lambda: "try it:" in self.out and "curl" in self.out)
        return re.findall(r"http://[\w.:\[\]]+", self.out)[0]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join()
        return code


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """No configuration from outside, and a place for cluster folders that no other test looks into."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    return {**kept, "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("t"))}


@contextlib.contextmanager
def serve(environment: dict[str, str], *flags: str) -> Iterator[Running]:
    process = subprocess.Popen(
        [*HEADWATER, "serve", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    running = Running(process)
    try:
        yield running
    finally:
        if process.poll() is None:
            running.end(signal.SIGKILL)


def headwater(environment: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HEADWATER, *argv], capture_output=True, text=True, env=environment, timeout=DEADLINE_S)


def worker_pids(environment: dict[str, str]) -> dict[str, int]:
    document = json.loads(headwater(environment, "status", "--json").stdout)
    return {worker["worker_id"]: worker["pid"] for worker in document["workers"] if worker["state"] == "ready"}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cluster_folders(environment: dict[str, str]) -> list[Path]:
    return list(Path(environment["XDG_RUNTIME_DIR"]).glob("headwater-*/serve-*"))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_serve_answers_survives_a_killed_worker_and_drains(environment: dict[str, str]) -> None:
    with serve(environment, *FAST, "--workers", "2", "--frontends", "2", "--api-key", "the-key") as running:
        url = running.url
        assert re.search(r"workers +│ 2", running.out)
        assert "Bearer $API_KEY" in running.out
        assert "the-key" not in running.out + running.err
        keyed = {**environment, "HEADWATER_API_KEY": "the-key"}

        status = headwater(keyed, "status")
        assert status.returncode == 0, status.stderr
        assert "2 workers" in status.stdout
        assert headwater(environment, "status").returncode == 0, "its own user finds the operator's key"
        assert headwater(environment, "status", "--url", url).returncode == 1, "without a key"

        chat = headwater(keyed, "chat", "--url", url, "--once", "hello", "--max-tokens", "7")
        assert chat.returncode == 0, chat.stderr
        assert "7 tokens" in chat.stderr

        before = worker_pids(keyed)
        killed = min(before)
        os.kill(before[killed], signal.SIGKILL)
        running.until(lambda: len(set(worker_pids(keyed)) - set(before)) == 1)
        after = worker_pids(keyed)
        assert killed not in after
        assert len(after) == 2
        assert "died: killed by SIGKILL; starting it again in 0.5 s" in running.err
        assert headwater(keyed, "chat", "--once", "hello", "--max-tokens", "3").returncode == 0

        pids = children(running.process.pid)
        assert len(pids) == 4
        assert running.end() == 0
        assert not any(alive(pid) for pid in pids)
        assert re.search(r"^worker-0 +\| ", running.err, re.MULTILINE)
    assert cluster_folders(environment) == []


def test_a_worker_that_hangs_for_long_is_replaced(environment: dict[str, str]) -> None:
    with serve(environment, *FAST, "--workers", "2", "--hang-restart", "1s") as running:
        before = worker_pids(environment) if running.url else {}
        stopped = min(before)
        steps = rf'worker_steps_total{{worker_id="{stopped}"}}'
        running.until(lambda: headwater(environment, "chat", "--once", "hello") and _total(running.url, steps))
        os.kill(before[stopped], signal.SIGSTOP)
        running.until(lambda: stopped not in worker_pids(environment) and len(worker_pids(environment)) == 2)
        assert not alive(before[stopped])
        assert re.search(r"died: it has answered nothing for \d+ s; starting it again in 0.5 s", running.err)
        assert headwater(environment, "chat", "--once", "hello", "--max-tokens", "3").returncode == 0
        assert running.end() == 0


def test_a_taken_port_is_refused_before_anything_starts(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = headwater(environment, "serve", "--engine", "mocker", "--port", str(port))
    assert done.returncode == 2
    assert f"127.0.0.1:{port} is in use" in done.stderr
    assert "worker-0" not in done.stderr


def test_two_clusters_cannot_share_a_port_by_accident(environment: dict[str, str]) -> None:
    with serve(environment, *FAST, "--frontends", "2") as running:
        port = running.url.rpartition(":")[2]
        done = headwater(environment, "serve", "--engine", "mocker", "--frontends", "2", "--port", port)
        assert done.returncode == 2
        assert "is in use" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["./no-such-model"], "there is no file or folder ./no-such-model"),
        (["--engine", "mokker"], "mocker"),
        (["--router-policy", "cheapest"], "least_loaded"),
        (["--registry", "memory://here"], "would not see each other"),
        (["--workers", "900000"], "--workers 900000 and --frontends 1 take at least 34.3 TiB"),
    ],
)
def test_what_cannot_work_ends_at_once_with_the_reason(
    environment: dict[str, str], flags: list[str], says: str
) -> None:
    done = headwater(environment, "serve", "--engine", "mocker", "--port", "0", *flags)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "starting it again" not in done.stderr


def test_nothing_is_left_when_serve_is_killed(environment: dict[str, str]) -> None:
    with serve(environment, *FAST, "--workers", "2") as running:
        running.until(lambda: "try it:" in running.out)
        pids = children(running.process.pid)
        assert len(pids) == 3
        running.end(signal.SIGKILL)
        deadline = time.monotonic() + 2.0
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "orphans are left"
            time.sleep(0.01)
    with serve(environment, *FAST) as again:
        again.until(lambda: "try it:" in again.out)
        assert len(cluster_folders(environment)) == 1, "the dead one's folder is gone"
        assert again.end(signal.SIGINT) == 0


def test_a_killed_frontend_comes_back_on_its_port(environment: dict[str, str]) -> None:
    with serve(environment, *FAST, "--host", "0.0.0.0", "--insecure") as running:
        url = running.url
        assert "without API keys" in running.err
        (pid,) = (
            pid for pid in children(running.process.pid) if b"frontend" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(pid, signal.SIGKILL)
        running.until(lambda: running.err.count("listening on") > 2)
        chat = headwater(environment, "chat", "--url", url, "--wait", "20s", "--once", "hi", "--max-tokens", "3")
        assert chat.returncode == 0, chat.stderr
        assert running.end() == 0


def test_json_logs_are_json_throughout(environment: dict[str, str]) -> None:
    with serve(environment, *FAST, "--log-format", "json") as running:
        running.until(lambda: "try it:" in running.out)
        assert running.end() == 0
    entries = [json.loads(line) for line in running.err.splitlines()]
    assert {"supervisor", "frontend-0"} <= {entry["part"] for entry in entries}


def test_parts_started_one_by_one_find_each_other(environment: dict[str, str], tmp_path: Path) -> None:
    registry = (tmp_path / "registry").as_uri()
    url = f"http://127.0.0.1:{free_port()}"
    parts = [
        ["frontend", "--registry", registry, "--port", url.rpartition(":")[2]],
        ["worker", "--registry", registry, "--engine", "mocker", "--mocker-speedup", "0"],
    ]
    with contextlib.ExitStack() as stack:
        running = []
        for part in parts:
            process = subprocess.Popen([*HEADWATER, *part], env=environment, stderr=subprocess.DEVNULL)
            stack.callback(process.kill)
            running.append(process)
        chat = headwater(environment, "chat", "--url", url, "--wait", "30s", "--once", "hi", "--max-tokens", "5")
        assert chat.returncode == 0, chat.stderr
        running[0].send_signal(signal.SIGTERM)
        assert running[0].wait(DEADLINE_S) == 0
        seen = headwater(environment, "status", "--registry", registry, "--port", "1", "--json")
        assert seen.returncode == 1, "no frontend answers"
        assert [worker["state"] for worker in json.loads(seen.stdout)["workers"]] == ["ready"]
        running[1].send_signal(signal.SIGTERM)
        assert running[1].wait(DEADLINE_S) == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--attach", "http://[::1"], "--attach http://[::1: expected something like http://"),
        (
            ["--attach", "http://host:1", "--attach", "ftp://host"],
            "--attach ftp://host: expected something like http://",
        ),
        (["--attach", "https:///v1"], "--attach https:///v1: expected something like http://"),
        (["--keys", "/no/such/keys.json"], "--keys: cannot read the keyring /no/such/keys.json: No such file"),
        (["--keys", "env:EMPTY_RING"], "--keys: env:EMPTY_RING: not a keyring: "),
        (["--keys", "command:no-such-program x"], "--keys: there is no program no-such-program to print the keyring"),
        (["--workers", "5", "--prefill", "1", "--decode", "1"], "--workers 5 does not go with --prefill 1 --decode 1"),
    ],
)
def test_what_no_process_could_use_is_refused_before_any_starts(
    environment: dict[str, str], flags: list[str], says: str
) -> None:
    done = headwater({**environment, "EMPTY_RING": "{}"}, "serve", "--port", "0", *flags)
    assert done.returncode == 2
    assert f"headwater: error: {says}" in done.stderr
    assert "-0 " not in done.stderr, "no part has said anything"


def test_a_program_that_prints_keys_is_run_once(environment: dict[str, str], tmp_path: Path) -> None:
    runs, ring = tmp_path / "runs", tmp_path / "keys.json"
    assert headwater(environment, "keys", "create", "--keys", str(ring), "--tenant", "acme").returncode == 0
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho run >> {runs}\ncat {ring}\n")
    program.chmod(0o700)
    with serve(environment, *FAST, "--keys", f"command:{program}") as running:
        running.until(lambda: "try it:" in running.out)
        assert runs.read_text() == "run\n"
        assert running.end() == 0
    failed = headwater(environment, "serve", *FAST, "--keys", "command:false")
    assert (failed.returncode, "--keys: command:false gives no keyring" in failed.stderr) == (2, True), failed.stderr


@pytest.mark.parametrize("part", ["frontend", "worker"])
def test_a_part_on_its_own_asks_for_a_registry(environment: dict[str, str], part: str) -> None:
    done = headwater(environment, part)
    assert done.returncode == 2
    assert "needs --registry" in done.stderr


def test_status_says_when_there_is_nothing(environment: dict[str, str]) -> None:
    done = headwater(environment, "status", "--port", "1")
    assert done.returncode == 1
    assert "start one with `headwater serve`" in done.stderr


def test_serve_with_pools_hands_prompts_over(environment: dict[str, str]) -> None:
    flags = ("--prefill", "1", "--decode", "2", "--disagg", "always", "--num-kv-blocks", "500")
    with serve(environment, *FAST, *flags) as running:
        url = running.url
        assert re.search(r"workers +│ 3 \(2 decode, 1 prefill\)", running.out)
        document = json.loads(headwater(environment, "status", "--json").stdout)
        assert sorted(worker["role"] for worker in document["workers"]) == ["decode", "decode", "prefill"]
        model = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=DEADLINE_S))["data"][0]["id"]
        for number in range(3):
            body = {"model": model, "prompt": f"{number} " + "a long story " * 60, "max_tokens": 5}
            asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), JSON)
            answer = json.load(urllib.request.urlopen(asked, timeout=DEADLINE_S))
            assert answer["usage"]["completion_tokens"] == 5
        running.until(lambda: _total(url, "worker_handoffs_total{.*}") == 3)
        assert running.end() == 0
    refused = headwater(environment, "serve", *FAST, "--prefill", "1")
    assert refused.returncode == 2
    assert "--decode" in refused.stderr


def _total(url: str, metric: str) -> float:
    page = urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_S).read().decode()
    return sum(float(number) for number in re.findall(rf"^headwater_{metric} (\S+)", page, re.MULTILINE))
