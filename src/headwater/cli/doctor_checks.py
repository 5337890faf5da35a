"""The checks of `headwater doctor`: each looks at one thing and says what to do. None loads a model, or torch here."""

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from headwater import __version__
from headwater.config.schema import ServeConfig
from headwater.config.units import about_bytes
from headwater.deploy.ports import reserved_port
from headwater.engines.native.cpu.build import COMPILERS, library_name
from headwater.engines.native.host import cpu_model, free_memory_bytes, host_cores
from headwater.errors import ConfigError
from headwater.weights.cache import default_cache_folder

GIB = 1024**3
MIB = 1024**2
MIN_PYTHON = (3, 11)
MIN_OPEN_FILES = 1024
GOOD_OPEN_FILES = 16_384
MIN_SHARED_BYTES = 256 * MIB
MIN_FREE_MEMORY_BYTES = GIB
MIN_FREE_CACHE_BYTES = 2 * GIB
MAX_SOCKET_FOLDER_CHARS = 60
PROBE_TIMEOUT_S = 30.0
CLOCK_TOLERANCE_S = 2.0

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at."""

    config: ServeConfig


def python(_: Subject) -> Iterator[Check]:
    fits = sys.version_info[:2] >= MIN_PYTHON
    detail = f"{platform.python_version()} at {sys.executable}, headwater {__version__}"
    yield Check("python", "ok" if fits else "fail", detail, "" if fits else "install Python 3.11 or newer")


def cpu(_: Subject) -> Iterator[Check]:
    host = host_cores(sorted(os.sched_getaffinity(0)))
    quota = f", container quota {host.quota:g} CPUs" if host.quota is not None else ""
    detail = f"{cpu_model() or platform.machine()}: {len(host.cores)} cores usable of {os.cpu_count()} CPUs{quota}"
    yield Check("cpu", "ok", detail)
    if platform.machine() == "x86_64":
        found = [flag for flag in ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "amx_tile") if flag in _cpu_flags()]
        fast = {"avx2", "fma", "f16c"} <= set(found)
        advice = "" if fast else "without AVX2 the CPU engine takes its slow portable path"
        yield Check("cpu features", "ok" if fast else "warn", " ".join(found) or "none known", advice)


def memory(_: Subject) -> Iterator[Check]:
    try:
        free = free_memory_bytes()
    except ConfigError as error:
        yield Check("memory", "warn", error.message, "set --kv-cache-memory")
        return
    few = free < MIN_FREE_MEMORY_BYTES
    advice = "free some, or raise the container's limit" if few else ""
    yield Check("memory", "warn" if few else "ok", f"{about_bytes(free)} free to this process", advice)


def shared_memory(_: Subject) -> Iterator[Check]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Check("shared memory", "warn", "there is no /dev/shm", "mount a tmpfs there")
        return
    free = shutil.disk_usage(folder).free
    few = free < MIN_SHARED_BYTES
    advice = "docker run --shm-size=2g, or an emptyDir with medium Memory on /dev/shm" if few else ""
    yield Check("shared memory", "warn" if few else "ok", f"{about_bytes(free)} free in /dev/shm", advice)


def open_files(_: Subject) -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status: Status = "fail" if soft < MIN_OPEN_FILES else "warn" if soft < GOOD_OPEN_FILES else "ok"
    advice = "" if status == "ok" else f"every stream takes one: ulimit -n {min(hard, 65_536) if hard > 0 else 65_536}"
    yield Check("open files", status, f"limit {soft} (at most {hard})", advice)


def compiler(_: Subject) -> Iterator[Check]:
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if _kernels() is not None:
        yield Check("kernels", "ok", f"built: {_kernels()}")
    elif found:
        yield Check("kernels", "ok", f"not built yet; {found} will build them at the first start")
    else:
        advice = "install g++ or clang++; without our kernels the CPU engine falls back to torch"
        yield Check("kernels", "warn", "not built, and there is no C++ compiler", advice)


def gpus(subject: Subject) -> Iterator[Check]:
    tool = shutil.which("nvidia-smi")
    wanted = subject.config.engine.device == "cuda"
    if tool is None:
        advice = "install the NVIDIA driver, or take --device cpu" if wanted else ""
        yield Check("gpus", "fail" if wanted else "ok", "none (no nvidia-smi)", advice)
        return
    query = "--query-gpu=name,memory.total,memory.used,driver_version"
    lines = _output([tool, query, "--format=csv,noheader"])
    if lines is None:
        yield Check(
            "gpus", "fail" if wanted else "warn", "nvidia-smi fails", "run nvidia-smi; the driver may need a reload"
        )
        return
    for index, line in enumerate(lines):
        yield Check(f"gpu {index}", "ok", line)
    yield from _torch_sees_gpus()


def packages(_: Subject) -> Iterator[Check]:
    lacking = sorted(name for name, version in _versions(_required("")).items() if version is None)
    if lacking:
        yield Check("packages", "fail", f"missing: {', '.join(lacking)}", "pip install --force-reinstall headwater")
    else:
        yield Check("packages", "ok", "everything headwater itself needs is installed")
    native = _versions(_required("native"))
    absent = sorted(name for name, version in native.items() if version is None)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(native.items()) if version)
    advice = "pip install 'headwater[native]' to run models here" if absent else ""
    yield Check("native engine", "warn" if absent else "ok", versions or "not installed", advice)


def port(subject: Subject) -> Iterator[Check]:
    frontend = subject.config.frontend
    try:
        with reserved_port(frontend.host, frontend.port):
            yield Check("port", "ok", f"{frontend.host}:{frontend.port} is free")
    except ConfigError as error:
        yield Check("port", "warn", error.message, error.hint or "")


def cache(subject: Subject) -> Iterator[Check]:
    given = subject.config.engine.weights_cache
    folder = Path(given).expanduser() if given else default_cache_folder()
    anchor = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(anchor, os.W_OK):
        yield Check("cache", "fail", f"{folder} cannot be written", "set --weights-cache, or mend its permissions")
        return
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    free = shutil.disk_usage(anchor).free
    detail = f"{folder}: {about_bytes(used)} used, {about_bytes(free)} free"
    if anchor == folder and folder.stat().st_mode & 0o022:
        yield Check("cache", "warn", f"{detail}; others can write to it", f"chmod go-w {folder}")
        return
    few = free < MIN_FREE_CACHE_BYTES
    yield Check("cache", "warn" if few else "ok", detail, "prepared weights need about the model's size" if few else "")


def temporary_folder(_: Subject) -> Iterator[Check]:
    folder = tempfile.gettempdir()
    long = len(folder) > MAX_SOCKET_FOLDER_CHARS
    advice = "sockets below it may get longer than 107 bytes: set TMPDIR to a short path" if long else ""
    yield Check("temporary files", "warn" if long else "ok", folder, advice)


def clock(_: Subject) -> Iterator[Check]:
    """Deadlines travel as epoch seconds. A wrong year and a clock that differs from the file system's are seen here."""
    with tempfile.TemporaryFile() as file:
        file.write(b"x")
        file.flush()
        stamped = os.fstat(file.fileno()).st_mtime
    skew = time.time() - stamped
    installed = Path(__file__).stat().st_mtime
    if time.time() < installed - 86_400:
        yield Check("clock", "fail", time.strftime("%Y-%m-%d %H:%M:%S"), "it is before the installation: set the clock")
    elif abs(skew) > CLOCK_TOLERANCE_S:
        yield Check("clock", "warn", f"differs from the file system's by {skew:.1f} s", "run a time service (chrony)")
    else:
        yield Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


CHECKS: tuple[Callable[[Subject], Iterable[Check]], ...] = (
    python,
    packages,
    cpu,
    memory,
    shared_memory,
    open_files,
    compiler,
    gpus,
    port,
    cache,
    temporary_folder,
    clock,
)


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), ()))


def _kernels() -> Path | None:
    native = importlib.util.find_spec("headwater.engines.native.cpu")
    package = Path(native.origin).parent if native and native.origin else Path()
    name = library_name()
    return next((path for path in (package / name, default_cache_folder() / "kernels" / name) if path.is_file()), None)


def _torch_sees_gpus() -> Iterator[Check]:
    """In a process of its own: importing torch here would take seconds and a CUDA context."""
    if importlib.util.find_spec("torch") is None:
        return
    program = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.device_count())"
    lines = _output([sys.executable, "-c", program])
    words = lines[-1].split() if lines else []
    if len(words) != 3:
        yield Check("torch and gpus", "fail", "importing torch fails", "reinstall torch")
        return
    version, cuda, count = words
    sees = cuda != "None" and count != "0"
    advice = "" if sees else "this torch is a CPU build: install one for your CUDA version"
    yield Check("torch and gpus", "ok" if sees else "warn", f"torch {version}, CUDA {cuda}, sees {count}", advice)


def _output(command: list[str]) -> list[str] | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()


def _required(extra: str) -> list[str]:
    """Names of the distributions that headwater asks for, always or with an extra."""
    wanted = []
    for requirement in metadata.requires("headwater") or []:
        spec, _, marker = requirement.partition(";")
        if (f"'{extra}'" in marker or f'"{extra}"' in marker) if extra else "extra" not in marker:
            wanted.append(spec.split("[")[0].split("<")[0].split(">")[0].split("=")[0].split("!")[0].strip())
    return wanted


def _versions(names: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
