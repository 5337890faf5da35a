import json
import resource
import socket
from pathlib import Path
from typing import Any

import pytest

from headwater.cli import doctor_checks
from headwater.cli.doctor_checks import Check, Subject
from headwater.cli.main import main
from headwater.config.schema import EngineConfig, FrontendConfig, ServeConfig


def checks(function: Any, config: ServeConfig | None = None) -> dict[str, Check]:
    return {check.name: check for check in function(Subject(config or ServeConfig()))}


def test_every_check_says_something_about_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--port", "0"])
    found = json.loads(capsys.readouterr().out)
    names = {check["name"] for check in found}
    assert {"python", "packages", "cpu", "memory", "open files", "kernels", "gpus", "port", "cache", "clock"} <= names
    assert all(check["detail"] for check in found)
    assert all(check["advice"] for check in found if check["status"] != "ok")
    assert code == (1 if any(check["status"] == "fail" for check in found) else 0)


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--port", "0"])
    assert "python" in capsys.readouterr().out


def test_a_taken_port_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = checks(doctor_checks.port, ServeConfig(frontend=FrontendConfig(port=port)))
    assert found["port"].status == "warn"
    assert "in use" in found["port"].detail


def test_a_low_limit_of_open_files_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 65_536))
    found = checks(doctor_checks.open_files)["open files"]
    assert (found.status, "ulimit -n 65536" in found.advice) == ("fail", True)


def test_missing_shared_memory_and_compilers_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor_checks, "_kernels", lambda: None)
    assert checks(doctor_checks.compiler)["kernels"].status == "warn"
    assert checks(doctor_checks.gpus)["gpus"].status == "ok"
    wanted = ServeConfig(engine=EngineConfig(device="cuda"))
    assert checks(doctor_checks.gpus, wanted)["gpus"].status == "fail"


def fake_tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_gpus_are_told_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(doctor_checks, "_torch_sees_gpus", lambda: iter(()))
    fake_tool(
        tmp_path,
        "nvidia-smi",
        "for i in 1 2; do echo 'NVIDIA H200, 143771 MiB, 5 MiB, 570.1'; done",
    )
    found = checks(doctor_checks.gpus)
    assert set(found) == {"gpu 0", "gpu 1"}
    assert "H200" in found["gpu 0"].detail
    fake_tool(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML' >&2; exit 9")
    assert checks(doctor_checks.gpus)["gpus"].status == "warn"


def test_a_cpu_build_of_torch_beside_gpus_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_output", lambda _: ["2.13.0 None 0"])
    (found,) = doctor_checks._torch_sees_gpus()
    assert (found.status, "CPU build" in found.advice) == ("warn", True)
    monkeypatch.setattr(doctor_checks, "_output", lambda _: ["2.13.0 13.0 8"])
    (found,) = doctor_checks._torch_sees_gpus()
    assert found.status == "ok"


def test_the_cache_folder_is_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    config = ServeConfig(engine=EngineConfig(weights_cache=str(folder)))
    assert checks(doctor_checks.cache, config)["cache"].status in ("ok", "warn")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "weights").write_bytes(b"x" * 3000)
    found = checks(doctor_checks.cache, config)["cache"]
    assert found.status == "warn"
    assert "2.9 KiB used" in found.detail
    assert "chmod go-w" in found.advice


def test_a_clock_before_the_installation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks(doctor_checks.clock)["clock"].status == "ok"
    monkeypatch.setattr(doctor_checks.time, "time", lambda: 1_000_000_000.0)
    assert checks(doctor_checks.clock)["clock"].status == "fail"


def test_what_is_required_is_read_off_the_distribution() -> None:
    assert "msgspec" in doctor_checks._required("")
    assert "torch" not in doctor_checks._required("")
    assert "torch" in doctor_checks._required("native")
