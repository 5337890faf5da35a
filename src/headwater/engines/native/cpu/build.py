"""Compile the kernels into one shared library. Standard library only: the wheel's build hook runs this file alone.

The library holds one variant per instruction set and picks at run time, so one build serves every host of its
architecture. Its name carries a hash of sources and flags: a library that does not match its sources is never found.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "c++", "clang++")
COMPILE_TIMEOUT_S = 300.0
BUILD_PREFIX = ".build-"

_FLAGS = [
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno"),
    *("-ffp-contract=off", "-Wall", "-Wextra", "-Wno-maybe-uninitialized"),
]
_X86_VARIANTS = {
    "avx2": ["-march=x86-64-v3", "-DHW_AVX2"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-DHW_AVX512"],
}


class BuildError(Exception):
    """No compiler, or it failed."""


def _variants() -> dict[str, list[str]]:
    x86 = _X86_VARIANTS if platform.machine() in ("x86_64", "AMD64") else {}
    return {"portable": [], **x86}


def library_name() -> str:
    """File name of the library that belongs to the sources and this architecture."""
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS, _variants())).encode())
    for source in sorted(SOURCE_FOLDER.iterdir()):
        digest.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return f"kernels-{digest.hexdigest()[:20]}.so"


def build_library(target: Path) -> None:
    """Compile into `target`, which appears complete or not at all. Raises `BuildError`."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=BUILD_PREFIX) as folder:
        objects = [Path(folder, f"{name}.o") for name in ("dispatch", *_variants())]
        commands = [[compiler, *_FLAGS, "-c", str(SOURCE_FOLDER / "dispatch.cpp"), "-o", str(objects[0])]]
        for (variant, flags), output in zip(_variants().items(), objects[1:], strict=True):
            source = str(SOURCE_FOLDER / "variant.cpp")
            commands.append([compiler, *_FLAGS, *flags, f"-DHW_VARIANT={variant}", "-c", source, "-o", str(output)])
        library = Path(folder, "library.so")
        commands.append([compiler, "-shared", "-pthread", "-o", str(library), *map(str, objects)])
        for command in commands:
            _run(command)
        library.chmod(0o755)
        os.replace(library, target)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr.strip()[-2000:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
