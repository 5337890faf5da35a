"""The local supervisor with real child processes (that load nothing)."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headwater.config.schema import EngineConfig, FrontendConfig, RuntimeConfig, ServeConfig
from headwater.deploy.actions import Finish, Part
from headwater.deploy.local import LocalSupervisor
from headwater.deploy.ports import Listeners
from headwater.deploy.reports import ProgressReport

FAKE = Path(__file__).with_name("supervised_fake.py")
COMMAND = (sys.executable, str(FAKE))
DEADLINE_S = 30.0

F0, W0, W1 = Part("frontend", 0), Part("worker", 0), Part("worker", 1)


class Recorder:
    """Remembers what the supervisor says."""

    def __init__(self) -> None:
        self.logs: dict[Part, list[str]] = {}
        self.phases: dict[Part, list[str]] = {}
        self.restarts: list[tuple[Part, str, float]] = []
        self.given_up: list[tuple[Part, str]] = []
        self.stopping: list[str] = []
        self.rolls: list[str] = []
        self.serving = asyncio.Event()

    def on_log(self, part: Part, lines: Sequence[bytes]) -> None:
        self.logs.setdefault(part, []).extend(line.decode() for line in lines)

    def on_progress(self, part: Part, report: ProgressReport) -> None:
        self.phases.setdefault(part, []).append(report.phase)

    def on_restarting(self, part: Part, reason: str, delay_s: float) -> None:
        self.restarts.append((part, reason, delay_s))

    def on_gave_up(self, part: Part, reason: str) -> None:
        self.given_up.append((part, reason))

    def on_serving(self) -> None:
        self.serving.set()

    def on_rolling(self) -> None:
        self.rolls.append("begun")

    def on_rolled(self, failure: str | None) -> None:
        self.rolls.append(failure or "done")

    def on_stopping(self, reason: str) -> None:
        self.stopping.append(reason)


def config(behaviour: str = "", *, workers: int = 1, **changes: object) -> ServeConfig:
    return ServeConfig(
        engine=EngineConfig(model=behaviour),
        frontend=FrontendConfig(port=0, api_key=("very-secret",)),
        runtime=RuntimeConfig(drain_timeout=float(changes.pop("drain_timeout", 5.0))),  # type: ignore[arg-type]
        workers=workers,
        **changes,  # type: ignore[arg-type]
    )


class Running:
    """A supervisor under test, on this loop."""

    def __init__(self, serve: ServeConfig) -> None:
        self.seen = Recorder()
        self.supervisor = LocalSupervisor(serve, self.seen, check_serving=self._check, command=COMMAND)
        self.result: asyncio.Task[Finish] = asyncio.ensure_future(self.supervisor.run())

    async def _check(self) -> None:
        return None

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                assert not self.result.done() or condition(), self.result
                await asyncio.sleep(0.01)

    async def finish(self) -> Finish:
        return await asyncio.wait_for(self.result, DEADLINE_S)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def visible(pid: int) -> bytes:
    """What other users' tools can see of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()


def test_serves_and_stops_in_order() -> None:
    async def scenario() -> None:
        graph = Running(config("worker-0=drains,worker-1=drains,frontend-0=drains", workers=2))
        await graph.until(graph.seen.serving.is_set)
        pids = graph.supervisor.pids()
        assert set(pids) == {F0, W0, W1}
        graph.supervisor.stop()
        assert await graph.finish() == Finish(0, "asked to stop")
        assert not any(alive(pid) for pid in pids.values())
        for part in (F0, W0, W1):
            assert graph.seen.phases[part] == ["load", "ready"]
            assert graph.seen.logs[part][-1] == f"{part} drained"

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_replaces_one_process_after_the_other(number: signal.Signals) -> None:
    async def scenario() -> None:
        graph = Running(config("worker-0=drains,worker-1=drains,frontend-0=drains", workers=2))
        await graph.until(graph.seen.serving.is_set)
        before = graph.supervisor.pids()
        os.kill(os.getpid(), number)
        await graph.until(lambda: graph.seen.rolls == ["begun", "done"])
        await graph.until(lambda: set(graph.supervisor.pids()) == {part.successor for part in before})
        assert not any(alive(pid) for pid in before.values())
        assert not graph.seen.restarts
        graph.supervisor.stop()
        assert (await graph.finish()).code == 0

    asyncio.run(scenario())


def test_connections_wait_for_the_next_process_of_a_frontend() -> None:
    listeners = Listeners("127.0.0.1", 0)
    (fd,) = listeners.of(0)
    assert listeners.of(0) == (fd,)
    with socket.socket(fileno=os.dup(fd)) as same:
        port = same.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client, socket.socket(fileno=os.dup(fd)) as heir:
        accepted, _ = heir.accept()
        with accepted:
            accepted.sendall(b"here")
            assert client.recv(4) == b"here"
    listeners.drop(0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    listeners.close()


def test_a_killed_worker_is_restarted_with_another_pid() -> None:
    async def scenario() -> None:
        graph = Running(config(workers=2))
        await graph.until(graph.seen.serving.is_set)
        before = graph.supervisor.pids()
        os.kill(before[W0], signal.SIGKILL)
        await graph.until(lambda: graph.seen.phases[W0].count("ready") == 2)
        after = graph.supervisor.pids()
        assert graph.seen.restarts == [(W0, "killed by SIGKILL", 0.5)]
        assert after[W0] != before[W0]
        assert (after[W1], after[F0]) == (before[W1], before[F0])
        graph.supervisor.stop()
        assert (await graph.finish()).code == 0

    asyncio.run(scenario())


def test_a_crash_loop_is_given_up_and_the_others_go_on() -> None:
    async def scenario() -> None:
        graph = Running(config("worker-0=crash", workers=2, max_restarts=2))
        await graph.until(lambda: graph.seen.given_up)
        assert graph.seen.given_up == [(W0, "exit code 7 (failed 3 times in a row)")]
        assert [delay for _, _, delay in graph.seen.restarts] == [0.5, 1.0]
        await graph.until(graph.seen.serving.is_set)
        assert set(graph.supervisor.pids()) == {F0, W1}
        graph.supervisor.stop()
        assert (await graph.finish()).code == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("behaviour", "code", "reason"),
    [
        ("worker-0=config-error", 2, "no worker is left; worker-0: no such model (name another)"),
        ("worker-0=failed", 1, "worker-0: the device is on fire (failed 1 times in a row)"),
        ("worker-0=crash-after-ready", 1, "worker-0: exit code 9 (failed 1 times in a row)"),
        ("frontend-0=config-error", 2, "no frontend is left; frontend-0: no such model (name another)"),
    ],
)
def test_it_ends_with_the_reason_when_nothing_is_left(behaviour: str, code: int, reason: str) -> None:
    async def scenario() -> None:
        graph = Running(config(behaviour, max_restarts=0))
        finish = await graph.finish()
        assert finish.code == code
        assert reason in finish.reason

    asyncio.run(scenario())


@pytest.mark.parametrize(("behaviour", "missing"), [("slow", "worker-0"), ("waits", "worker-0: there is no server")])
def test_no_progress_in_time_is_exit_3(behaviour: str, missing: str) -> None:
    async def scenario() -> None:
        graph = Running(config(f"worker-0={behaviour}", ready_timeout=3.0))
        finish = await graph.finish()
        assert finish.code == 3
        assert missing in finish.reason

    asyncio.run(scenario())


def test_a_process_that_ignores_sigterm_is_killed_by_the_second_request() -> None:
    async def scenario() -> None:
        graph = Running(config("frontend-0=stuck", drain_timeout=60.0))
        await graph.until(graph.seen.serving.is_set)
        pids = graph.supervisor.pids()
        graph.supervisor.stop()
        await asyncio.sleep(0.1)
        assert alive(pids[F0])
        assert alive(pids[W0]), "workers serve on while the frontend drains"
        graph.supervisor.stop()
        await graph.finish()
        assert not any(alive(pid) for pid in pids.values())

    asyncio.run(scenario())


def test_what_a_child_started_dies_with_it() -> None:
    async def scenario() -> None:
        graph = Running(config("worker-0=grandchild"))
        await graph.until(graph.seen.serving.is_set)
        await graph.until(lambda: any("grandchild" in line for line in graph.seen.logs[W0]))
        grandchild = int(re.findall(r"grandchild (\d+)", "\n".join(graph.seen.logs[W0]))[0])
        os.kill(graph.supervisor.pids()[W0], signal.SIGKILL)
        await graph.until(lambda: not alive(grandchild))
        graph.supervisor.stop()
        await graph.finish()

    asyncio.run(scenario())


def test_mad_output_costs_no_memory_and_no_reports() -> None:
    async def scenario() -> None:
        graph = Running(config("worker-0=long-line,frontend-0=babble"))
        await graph.until(graph.seen.serving.is_set)
        await graph.until(lambda: any(line.startswith("xxx") for line in graph.seen.logs[W0]))
        assert max(map(len, graph.seen.logs[W0])) <= 64 * 1024
        assert graph.seen.phases[F0] == ["load", "ready"]
        graph.supervisor.stop()
        await graph.finish()

    asyncio.run(scenario())


def test_secrets_are_neither_on_command_lines_nor_in_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_API_KEY", "very-secret")

    async def scenario() -> None:
        graph = Running(config())
        await graph.until(graph.seen.serving.is_set)
        for pid in graph.supervisor.pids().values():
            assert b"very-secret" not in visible(pid)
        assert any("keys 1" in line for line in graph.seen.logs[W0]), "the child must have got the key"
        assert any("has the key ***" in line for line in graph.seen.logs[W0]), "and not log it"
        graph.supervisor.stop()
        await graph.finish()

    asyncio.run(scenario())


SUPERVISOR_SCRIPT = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from test_serve_supervisor import Running, config

async def main():
    graph = Running(config("frontend-0=stuck,worker-0=stuck"))
    await graph.until(graph.seen.serving.is_set)
    print(*graph.supervisor.pids().values(), flush=True)
    await graph.finish()

asyncio.run(main())
"""


def start_supervisor() -> tuple[subprocess.Popen[str], list[int]]:
    script = textwrap.dedent(SUPERVISOR_SCRIPT).format(folder=str(FAKE.parent))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


def wait_gone(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "orphans are left"
        time.sleep(0.01)


def test_children_die_with_a_supervisor_that_is_killed() -> None:
    process, pids = start_supervisor()
    with process:
        assert len(pids) == 2
        process.kill()
        wait_gone(pids, 2.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_a_second_one_kills(number: signal.Signals) -> None:
    process, pids = start_supervisor()
    with process:
        process.send_signal(number)
        time.sleep(0.2)
        assert all(alive(pid) for pid in pids), "they ignore SIGTERM, so they are still draining"
        process.send_signal(number)
        wait_gone(pids, 30.0)
        assert process.wait(30) == 0
