"""CPU time and memory of process trees, read from /proc: what a server cost, whoever wrote it."""

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    cpu_s: float
    """User and system time of all threads of all processes of the tree, reaped children included."""
    rss_bytes: int


def tree_usage(root_pid: int) -> ProcessUsage:
    """Sum over a process and its living descendants; processes that vanish meanwhile are left out."""
    cpu_s = 0.0
    rss_bytes = 0
    for pid in [root_pid, *_descendants(root_pid)]:
        try:
            usage = process_usage(pid)
        except (OSError, IndexError):
            continue
        cpu_s += usage.cpu_s
        rss_bytes += usage.rss_bytes
    return ProcessUsage(cpu_s, rss_bytes)


def process_usage(pid: int) -> ProcessUsage:
    """One process: its threads, and the children it has reaped. Raises `OSError` when it is gone."""
    cpu_ticks = sum(int(field) for field in _stat_fields(pid)[11:15])
    resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return ProcessUsage(cpu_ticks / _TICKS_PER_S, resident_pages * os.sysconf("SC_PAGE_SIZE"))


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command name, which may itself hold blanks: [0] is the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _descendants(root_pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children.setdefault(int(_stat_fields(int(entry.name))[1]), []).append(int(entry.name))
            except (OSError, IndexError):
                continue
    found: list[int] = []
    pending = [root_pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found
