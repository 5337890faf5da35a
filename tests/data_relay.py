"""A relay in front of a transfer agent whose links break on command, or after so many bytes.

cut       both ends see a connection reset; new connections go through
freeze    connections stand, and nothing passes any more, those to come included (half-open)
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Literal

import msgspec

from headwater.transfer.agent import Agent
from headwater.transfer.card import decode_card, encode_card

Fault = Literal["cut", "freeze"]
_CHUNK = 16 << 10
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: on and 0 seconds, so that closing resets."""


class DataRelay:
    """Carries what goes over TCP to and from one agent."""

    def __init__(self) -> None:
        self.passed_bytes = 0
        """Either way."""
        self._fault: tuple[Fault, int] | None = None
        self._frozen = threading.Event()
        self._ended = threading.Event()
        self._upstream = ("", 0)
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def card(self, card: bytes) -> bytes:
        """The agent's card, as one that leads through here alone."""
        known = decode_card(card)
        self._upstream = (known.host, known.port)
        return encode_card(msgspec.structs.replace(known, unix="", port=self._listener.getsockname()[1]))

    def fail(self, fault: Fault, after_bytes: int = 0) -> None:
        """Once: when so many bytes more have passed."""
        with self._lock:
            self._fault = fault, self.passed_bytes + after_bytes
            due = not after_bytes
        if due:
            self._happen(fault)

    def heal(self) -> None:
        """What is frozen is gone; what comes passes."""
        self._fault = None
        self._reset()
        self._frozen.clear()

    def close(self) -> None:
        self._ended.set()
        self._acceptor.join()
        self._listener.close()
        self._reset()
        for pump in self._pumps:
            pump.join()

    def _accept(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(self._upstream)
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    self._pumps.append(threading.Thread(target=self._pump, args=ends, daemon=True))
                    self._pumps[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """Until either end is shut, which wakes whoever waits on it."""
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if not self._frozen.is_set():
                    self._pass_on(sink, data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _pass_on(self, sink: socket.socket, data: bytes) -> None:
        due: Fault | None = None
        with self._lock:
            if self._fault is not None and self.passed_bytes + len(data) >= self._fault[1]:
                due, limit = self._fault
                data = data[: max(0, limit - self.passed_bytes)]
            self.passed_bytes += len(data)
        sink.sendall(data)
        if due is not None:
            self._happen(due)

    def _happen(self, fault: Fault) -> None:
        self._fault = None
        if fault == "cut":
            self._reset()
        else:
            self._frozen.set()

    def _reset(self) -> None:
        with self._lock:
            ends, self._ends = self._ends, []
        for sock in ends:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def data_relay(agent: Agent | None = None) -> Iterator[tuple[bytes, DataRelay]]:
    """With the card of an agent that leads through it."""
    relay = DataRelay()
    try:
        yield relay.card(agent.card()) if agent is not None else b"", relay
    finally:
        relay.close()
