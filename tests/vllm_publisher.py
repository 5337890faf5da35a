"""A publisher of KV events as vLLM's: PUB with numbered batches, and a ROUTER that replays the last ones."""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from headwater.engines.kv_feed.subscription import FeedAddress

_END = b"\xff" * 8


class Publisher:
    """Publishes from the caller's thread, replays on one of its own, as vLLM does."""

    def __init__(self, folder: Path | None, *, dial: str | None = None, topic: str = "kv") -> None:
        self._context = zmq.Context()
        self._folder = folder
        self._dial = dial
        self._topic = topic.encode()
        self._number = 0
        self._kept: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        self._running = True
        self._pub = self._socket(zmq.PUB)
        if dial is not None:
            self._pub.connect(dial)
            return
        assert folder is not None
        self.address = FeedAddress(f"ipc://{folder}/events", topic, f"ipc://{folder}/replay")
        self._pub.bind(self.address.endpoint)
        self._thread = threading.Thread(target=self._replay)
        self._thread.start()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self._running = False
        if self._dial is None:
            self._thread.join()
        self._pub.close(0)
        self._context.term()

    def publish(self, events: list[dict[str, Any]], timestamp: float | None = None) -> None:
        self._pub.send_multipart(self._keep(events, timestamp))

    def lose(self, events: list[dict[str, Any]], timestamp: float | None = None) -> None:
        """As `publish`, but nobody hears it."""
        self._keep(events, timestamp)

    def garble(self) -> None:
        self._pub.send_multipart([self._topic, (0).to_bytes(8, "big"), b"\xc1"])
        self._pub.send_multipart([self._topic, b"only two"])

    def restart(self) -> None:
        """A new life: numbers begin again, nothing old is replayed."""
        with self._lock:
            self._number = 0
            self._kept.clear()

    def _keep(self, events: list[dict[str, Any]], timestamp: float | None) -> list[bytes]:
        payload = msgspec.msgpack.encode([time.time() if timestamp is None else timestamp, events, 0])
        with self._lock:
            number = self._number
            self._number += 1
            self._kept.append((number, payload))
        return [self._topic, number.to_bytes(8, "big"), payload]

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        return socket

    def _replay(self) -> None:
        router = self._socket(zmq.ROUTER)
        router.bind(str(self.address.replay_endpoint))
        while self._running:
            if not router.poll(5):
                continue
            peer, _, start = router.recv_multipart()
            with self._lock:
                kept = [entry for entry in self._kept if entry[0] >= int.from_bytes(start, "big")]
            for number, payload in kept:
                router.send_multipart([peer, b"", self._topic, number.to_bytes(8, "big"), payload])
            router.send_multipart([peer, b"", b"", _END, b""])
        router.close(0)
