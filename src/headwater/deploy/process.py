"""One child process: its pipes, its process group and its end.

Each child leads a process group of its own: Ctrl-C in a terminal reaches only the supervisor, which drains in order,
and what a child leaves behind can be killed as a group. Log lines and reports are bounded in length, so a child that
goes mad costs no memory.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from headwater.deploy.reports import MAX_REPORT_BYTES, Report, decode_report

MAX_LINE_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024
_PIPES_LINGER_S = 1.0
_KILL_WAIT_S = 5.0

OnLines = Callable[[Sequence[bytes]], None]
OnReport = Callable[[Report], None]


class Child:
    """A running process. `wait` must be awaited; it owns all that belongs to the process."""

    def __init__(self, process: subprocess.Popen[bytes], reports: IO[bytes]) -> None:
        self._process = process
        self._reports = reports
        self._reaped = False

    @classmethod
    def start(
        cls, command: Sequence[str], report_fds: tuple[int, int], passed_fds: Sequence[int], env: dict[str, str]
    ) -> "Child":
        """Raises OSError. Takes over both ends of the report pipe; the child inherits `passed_fds` besides."""
        read_fd, write_fd = report_fds
        reports = os.fdopen(read_fd, "rb", buffering=0)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(*passed_fds, write_fd),
                process_group=0,
                env=env,
                bufsize=0,
            )
        except BaseException:
            reports.close()
            raise
        finally:
            os.close(write_fd)
        return cls(process, reports)

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Only the process itself: it knows how to end what it started."""
        if not self._reaped:
            # Not `Popen.send_signal`: that reaps a process that has just ended, and its end would go unnoticed.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """The whole group. The group id cannot be reused before the process is reaped."""
        if not self._reaped:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def wait(self, on_lines: OnLines, on_report: OnReport) -> int:
        """Forward output until the process has ended; the exit code, negative for a signal."""
        output = self._process.stdout
        assert output is not None
        pumps = [
            asyncio.ensure_future(_pump(output, MAX_LINE_BYTES, on_lines)),
            asyncio.ensure_future(_pump(self._reports, MAX_REPORT_BYTES, lambda lines: _report(lines, on_report))),
        ]
        try:
            await self._ended()
        finally:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_WAIT_S)
            self._reaped = True
            await asyncio.wait(pumps, timeout=_PIPES_LINGER_S)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        return -signal.SIGKILL if self._process.returncode is None else self._process.returncode

    async def _ended(self) -> None:
        """Wait without reaping, on a thread of its own: works on every kernel and in every container."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def watch() -> None:
            with contextlib.suppress(ChildProcessError):  # reaped already: it has ended
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=watch, name=f"wait-{self._process.pid}", daemon=True).start()
        await ended.wait()


def describe_exit(code: int) -> str:
    """`killed by SIGKILL`, `exit code 1`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


async def _pump(pipe: IO[bytes], max_line: int, on_lines: OnLines) -> None:
    """Lines without their ends, as many at a time as came together."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_READ_BYTES)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        rest = b""
        while data := await reader.read(_READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > max_line:
                lines.append(rest)
                rest = b""
            if lines:
                on_lines([line[:max_line] for line in lines])
        if rest:
            on_lines([rest])
    finally:
        transport.close()


def _report(lines: Sequence[bytes], on_report: OnReport) -> None:
    for line in lines:
        try:
            report = decode_report(line)
        except msgspec.MsgspecError:
            continue
        on_report(report)
