"""What is left where frontends meet."""

import os
import socket
from pathlib import Path

from headwater.frontend.neighbours import Neighbours, folder_for


def test_what_killed_frontends_of_another_cluster_left_goes(run_folder: Path) -> None:
    run_folder.chmod(0o700)
    gone, alive = folder_for(run_folder, "file:///gone"), folder_for(run_folder, "file:///alive")
    young = folder_for(run_folder, "file:///young")
    with socket.socket(socket.AF_UNIX) as dead, Neighbours(alive, "fe-alive").listen():
        gone.mkdir(mode=0o700)
        young.mkdir(mode=0o700)
        dead.bind(str(gone / "fe-dead.sock"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(alive / "fe-other.sock"))
        listener.listen()
        for path in (gone / "fe-dead.sock", gone, alive / "fe-alive.sock", alive / "fe-other.sock", alive):
            os.utime(path, (1, 1))
        mine = Neighbours(folder_for(run_folder, "file:///mine"), "fe-mine")
        mine.listen().close()
        assert not gone.exists()
        assert os.listdir(alive) == ["fe-other.sock"]
        assert young.exists(), "its frontend is about to listen"
        mine.close()


def test_the_folder_of_a_cluster_stays_for_its_frontends_that_start_at_once(run_folder: Path) -> None:
    run_folder.chmod(0o700)
    folder = folder_for(run_folder, "etcd://mine")
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "fe-dead.sock"))
    for path in (folder / "fe-dead.sock", folder):
        os.utime(path, (1, 1))
    before = folder.stat().st_ino
    mine = Neighbours(folder, "fe-mine")
    with os.scandir(folder):  # its number is not given away meanwhile
        mine.listen().close()
    assert folder.stat().st_ino == before
    assert os.listdir(folder) == ["fe-mine.sock"]
    mine.close()
