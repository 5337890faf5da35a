"""What the host and its control groups leave to this process: cores, CPU quota, memory. Linux; both cgroup versions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import ConfigError

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class HostCores:
    """What this process may compute on."""

    cores: tuple[tuple[int, ...], ...]
    """Logical CPUs grouped by physical core."""
    quota: float | None = None
    """CPU seconds per second granted by the container; None: no limit."""


def host_cores(cpus: Sequence[int], root: Path = _ROOT) -> HostCores:
    """The cores behind `cpus`. Where the topology is unknown each CPU counts as a core."""
    cores: dict[tuple[int, ...], tuple[int, ...]] = {}
    allowed = set(cpus)
    for cpu in sorted(cpus):
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        text = _read(path)
        siblings = _cpu_list(text) if text else (cpu,)
        cores[siblings] = tuple(sorted(allowed.intersection(siblings)))
    return HostCores(tuple(cores.values()), min(_quotas(root), default=None))


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Memory this process may still take: the least of what the host and each control group above it leave."""
    meminfo = root / "proc/meminfo"
    for line in (_read(meminfo) or "").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            return max(min([available, *_group_leaves(root)]), 0)
    raise ConfigError(f"{meminfo} does not tell the free memory: give --kv-cache-memory")


def cpu_model(root: Path = _ROOT) -> str:
    """Name of the processor, empty if unknown."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def _group_leaves(root: Path) -> Iterator[int]:
    """What each group leaves, where it has a limit. Page cache that can be dropped counts as free."""
    for folder in _groups(root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None:
                yield limit - usage + _inactive_file(folder / "memory.stat")


def _inactive_file(stat: Path) -> int:
    for line in (_read(stat) or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        unified = (_read(folder / "cpu.max") or "").split()
        if len(unified) == 2 and unified[0].isdigit():
            yield int(unified[0]) / int(unified[1])
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period:
            yield quota / period


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """This process' group and those above it. In a container the path may not be visible, but its root is."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            mount = mount if mount.is_dir() else root / "sys/fs/cgroup" / controller
        else:
            continue
        group = mount / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _cpu_list(text: str) -> tuple[int, ...]:
    """`0-1,8` -> (0, 1, 8)."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def _number(path: Path) -> int | None:
    """None for an absent file, `max`, and version 1's -1."""
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
