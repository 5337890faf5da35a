import socket
from pathlib import Path

import pytest

from headwater.deploy.clusters import ClusterRecord, cluster_folder, running_clusters
from headwater.deploy.ports import base_url, connectable, reserved_port
from headwater.errors import ConfigError
from headwater.runtime.private_folder import default_run_folder


def listener(port: int = 0, *, share: bool) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.listen()
    return made


@pytest.mark.parametrize("share", [False, True])
def test_a_port_somebody_listens_on_is_refused_also_when_it_could_be_shared(share: bool) -> None:
    with listener(share=share) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="is in use") as raised, reserved_port("127.0.0.1", port):
            pass
        assert "--port 0" in str(raised.value.hint)


@pytest.mark.parametrize("share", [False, True])
def test_children_can_listen_on_the_reserved_port_and_reach_it(share: bool) -> None:
    with reserved_port("127.0.0.1", 0) as port:
        assert port > 0
        with listener(port, share=share), socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_several_children_can_share_it() -> None:
    with reserved_port("127.0.0.1", 0) as port, listener(port, share=True), listener(port, share=True):
        pass


def test_names_and_foreign_addresses() -> None:
    with reserved_port("localhost", 0) as port:
        assert port > 0
    with pytest.raises(ConfigError, match="--host aaa"), reserved_port("a" * 70, 0):
        pass
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"), reserved_port("192.0.2.1", 0):
        pass


def test_where_a_listener_is_reached() -> None:
    assert connectable("0.0.0.0") == "127.0.0.1"
    assert base_url("::", 8000) == "http://[::1]:8000"
    assert base_url("10.1.2.3", 80) == "http://10.1.2.3:80"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return default_run_folder()


def test_a_running_cluster_is_found_until_it_ends(base: Path) -> None:
    assert running_clusters() == []
    with cluster_folder() as folder:
        assert running_clusters() == [], "not announced yet"
        record = ClusterRecord(pid=1, url="http://x", registry="file:///r", started=5.0)
        folder.publish(record)
        assert running_clusters() == [record]
        assert folder.path.stat().st_mode & 0o777 == 0o700
        with cluster_folder() as other:
            newer = ClusterRecord(pid=2, url="http://y", registry="file:///s", started=6.0)
            other.publish(newer)
            assert running_clusters() == [newer, record]
    assert running_clusters() == []
    assert list(base.iterdir()) == []


def test_what_a_dead_supervisor_left_is_removed(base: Path) -> None:
    with cluster_folder():
        pass
    left = base / "serve-left"
    left.mkdir()
    (left / "cluster.json").write_bytes(b"not even json")
    fresh = base / "serve-fresh"
    fresh.mkdir()
    assert running_clusters() == []
    with cluster_folder():
        assert not left.exists()
        assert fresh.exists(), "it may be about to get its record"


def test_a_folder_that_others_can_use_is_refused(base: Path) -> None:
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    with pytest.raises(ConfigError, match="has owner"), cluster_folder():
        pass
