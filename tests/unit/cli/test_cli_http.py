"""What verbs make of answers that do not come, or not to their end."""

import socket
import threading
from collections.abc import Iterator

import pytest

from headwater.cli.http import Server
from headwater.errors import Unavailable


@pytest.fixture
def stalled() -> Iterator[Server]:
    """Begins an answer and sends no more."""
    done = threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{")
            done.wait(10)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.2)
        done.set()
        thread.join()


def test_an_answer_that_stops_half_way_is_none(stalled: Server) -> None:
    with pytest.raises(Unavailable, match="timed out"):
        stalled.get_json("/debug/cluster")
