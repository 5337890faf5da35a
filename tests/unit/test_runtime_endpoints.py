"""Where sockets may live."""

import os
import socket
import stat
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.runtime.cluster_keys import KEY_BYTES, with_key
from headwater.runtime.endpoints import (
    IpcEndpoints,
    TcpEndpoints,
    parse_bind,
    unlink_ipc,
)
from headwater.runtime.private_folder import default_run_folder, ensure_private


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e") / "run"


def test_ipc_addresses_are_new_and_the_folder_is_private(folder: Path) -> None:
    endpoints = parse_bind("ipc", run_folder=folder)
    assert isinstance(endpoints, IpcEndpoints)
    addresses = {endpoints.new("requests") for _ in range(20)}
    assert len(addresses) == 20
    assert all(address.startswith(f"ipc://{folder}/requests-") for address in addresses)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folders_in_it_do_not_open_it_to_others(folder: Path) -> None:
    ensure_private(folder / "inner" / "most")
    IpcEndpoints(folder).new("requests")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "inner", folder / "inner" / "most")} == {
        0o700
    }


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_open_to_others_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode 0{mode:o}"):
        IpcEndpoints(folder).new("x")


def test_a_place_where_no_folder_can_be_made_is_named(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(ConfigError, match=r"run/inner cannot be made: Not a directory") as caught:
        IpcEndpoints(folder / "inner").new("x")
    assert "XDG_RUNTIME_DIR" in (caught.value.hint or "")


def test_a_link_to_a_folder_is_refused(folder: Path) -> None:
    real = folder.with_name("real")
    real.mkdir(mode=0o700)
    folder.symlink_to(real)
    with pytest.raises(ConfigError) as caught:
        IpcEndpoints(folder).new("x")
    assert "must be a folder" in (caught.value.hint or "")


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for sockets"):
        IpcEndpoints(tmp_path / ("x" * 90))


def test_the_separator_of_addresses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'#'"):
        IpcEndpoints(tmp_path / "a#b")


def test_sockets_of_dead_processes_are_removed_and_no_others(folder: Path) -> None:
    endpoints = IpcEndpoints(folder)
    endpoints.new("x")
    with (
        socket.socket(socket.AF_UNIX) as dead,
        socket.socket(socket.AF_UNIX) as alive,
        socket.socket(socket.AF_UNIX) as young,
    ):
        for name, bound in (("dead", dead), ("alive", alive), ("young", young)):
            bound.bind(str(folder / name))
        alive.listen()
        dead.close()
        young.close()
        (folder / "file").write_text("x")
        for name in ("dead", "alive", "file"):
            os.utime(folder / name, (1, 1))
        endpoints.new("x")
        assert sorted(os.listdir(folder)) == ["alive", "file", "young"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_may_be_bound(host: str) -> None:
    assert isinstance(parse_bind(host), TcpEndpoints)


@pytest.mark.parametrize("host", ["10.0.0.1", "192.168.1.5", "8.8.8.8", "fe80::1", "2001:db8::1"])
def test_other_addresses_need_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match="no keys") as caught:
        parse_bind(host)
    assert "--insecure" in (caught.value.hint or "")
    assert isinstance(parse_bind(host, insecure=True), TcpEndpoints)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "", "example.org", "127.0.0.1:80", "eth0"])
def test_what_is_no_single_address_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="bind address"):
        parse_bind(host, insecure=True)


def test_tcp_ports_are_chosen_by_the_system() -> None:
    assert parse_bind("127.0.0.1").new("x") == "tcp://127.0.0.1:*"
    assert parse_bind("::1").new("x") == "tcp://[::1]:*"


def test_the_default_folder_follows_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_run_folder().is_relative_to(tmp_path)


def test_only_ipc_addresses_have_files(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.write_text("x")
    unlink_ipc(f"tcp://{path}")
    assert path.exists()
    unlink_ipc(f"ipc://{path}")
    unlink_ipc(f"ipc://{path}")
    assert not path.exists()
    path.write_text("x")
    unlink_ipc(with_key(f"ipc://{path}", "ab" * KEY_BYTES))
    assert not path.exists()
