"""Folders that end with their process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.runtime.owned_folder import OwnedFolder, is_abandoned, run_folder

OWNER = """
import signal
from headwater.runtime.owned_folder import OwnedFolder
folder = OwnedFolder("part-")
print(folder.path, flush=True)
signal.pause()
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"headwater-{os.geteuid()}"


@pytest.fixture
def owner(base: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a folder of its own."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_it_is_there_until_it_is_closed(base: Path) -> None:
    folder = OwnedFolder("part-")
    assert folder.path.parent == base == run_folder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not is_abandoned(folder.path)
    folder.close()
    folder.close()
    assert list(base.iterdir()) == []


def test_that_of_a_killed_process_goes_with_the_next_one(owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, left = owner
    OwnedFolder("part-").close()
    assert left.exists(), "its process lives"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    (left / "socket").write_bytes(b"")
    OwnedFolder("other-").close()
    assert left.exists(), "it is of another kind"
    OwnedFolder("part-").close()
    assert not left.exists()


def test_one_that_is_about_to_get_its_lock_stays(base: Path) -> None:
    young, old = run_folder() / "part-young", run_folder() / "part-old"
    young.mkdir()
    old.mkdir()
    os.utime(old, (1, 1))
    OwnedFolder("part-").close()
    assert (young.exists(), old.exists()) == (True, False)


def test_several_may_clear_away_the_same_one(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes to it after another one has done so goes on."""
    gone = run_folder() / "part-gone"
    monkeypatch.setattr(Path, "glob", lambda _base, _pattern: iter([gone]))
    OwnedFolder("part-").close()
    assert not is_abandoned(gone)


def test_a_place_that_others_can_use_is_refused(base: Path) -> None:
    base.mkdir()
    base.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0755"):
        OwnedFolder("part-")
