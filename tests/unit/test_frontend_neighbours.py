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
