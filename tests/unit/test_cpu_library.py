"""Finding, building and refusing the kernel library."""

import shutil
from pathlib import Path

import pytest
from cpu_reference import RandomCheckpoint, small

from headwater.engines.native.cpu import backend as backend_module
from headwater.engines.native.cpu import build
from headwater.engines.native.cpu.backend import CpuBackend, CpuOptions
from headwater.engines.native.cpu.binding import Kernels
from headwater.engines.native.cpu.library import KernelsUnavailable, load_library
from headwater.errors import ConfigError


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library compiled here and now, whatever is installed."""
    target = tmp_path_factory.mktemp("built") / build.library_name()
    build.build_library(target)
    return target


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def test_a_prebuilt_library_needs_no_compiler(built: Path, tmp_path: Path, no_compiler: None) -> None:
    library = load_library(built.parent, tmp_path)
    kernels = Kernels(library)
    assert Kernels.supported(library, kernels.isa)
    kernels.close()
    kernels.close()
    with pytest.raises(ConfigError, match="closed"):
        kernels.forward(None, None, 0)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_compiled_once_into_the_cache_folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.engines.native.cpu.library.build_library", lambda target: shutil.copy(built, target))
    killed = tmp_path / "cache" / "kernels" / ".build-left"
    killed.mkdir(parents=True)
    load_library(tmp_path / "no-package", tmp_path / "cache")
    cached = tmp_path / "cache" / "kernels" / build.library_name()
    assert cached.is_file()
    assert not killed.exists()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr("headwater.engines.native.cpu.library.build_library", build.build_library)
    load_library(tmp_path / "no-package", tmp_path / "cache")


def test_no_compiler_is_said_plainly(tmp_path: Path, no_compiler: None) -> None:
    with pytest.raises(KernelsUnavailable, match=r"no C\+\+ compiler on PATH"):
        load_library(tmp_path / "no-package", tmp_path / "cache")


def test_a_failing_compiler_leaves_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho this machine has no headers >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    with pytest.raises(KernelsUnavailable, match="no headers"):
        load_library(tmp_path / "no-package", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "kernels").iterdir()] == [".building"]


def test_a_library_others_can_replace_is_not_loaded(
    built: Path, tmp_path: Path, no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    shutil.copy(built, folder / built.name)
    folder.chmod(0o777)
    with pytest.raises(KernelsUnavailable):
        load_library(folder, tmp_path / "cache")
    assert "can be written by other users" in caplog.text
    folder.chmod(0o755)
    (folder / built.name).chmod(0o666)
    with pytest.raises(KernelsUnavailable):
        load_library(folder, tmp_path / "cache")
    (folder / built.name).chmod(0o644)
    load_library(folder, tmp_path / "cache")


def test_kernels_are_not_built_where_others_can_write(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="refusing to build"):
        load_library(tmp_path / "no-package", tmp_path / "cache")


def test_a_damaged_library_is_rebuilt(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.engines.native.cpu.library.build_library", lambda target: shutil.copy(built, target))
    package = tmp_path / "package"
    for folder in (package, tmp_path / "cache" / "kernels"):
        folder.mkdir(parents=True)
        (folder / built.name).write_bytes(b"\x7fELF and then nothing")
    kernels = Kernels(load_library(package, tmp_path / "cache"))
    kernels.close()


def test_changed_sources_change_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_name()
    copy = tmp_path / "csrc"
    shutil.copytree(build.SOURCE_FOLDER, copy)
    monkeypatch.setattr(build, "SOURCE_FOLDER", copy)
    assert build.library_name() == before
    (copy / "linear.h").write_text((copy / "linear.h").read_text() + "\n// changed\n")
    assert build.library_name() != before


def test_the_backend_reports_missing_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise KernelsUnavailable("no compiler")

    monkeypatch.setattr(backend_module, "load_library", unavailable)
    with pytest.raises(KernelsUnavailable):
        CpuBackend(RandomCheckpoint(small()), CpuOptions(weights_cache=tmp_path))
    assert list(tmp_path.iterdir()) == []
