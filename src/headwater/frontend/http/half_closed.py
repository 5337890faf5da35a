"""A client that has shut its sending side: does it still read, or has it gone?

Both look alike until something is sent: whoever reads takes it, and the kernel of one that has gone answers with a
reset. So something is sent at once and now and then, and the connection's state is looked at, because nobody tells of a
reset where nothing is read any more.
"""

import asyncio
import socket
from collections.abc import Callable

_FIRST_LOOK_S = 0.05
_LONGEST_PAUSE_S = 1.0
_PROBE_S = 5.0
_RESET = 7
"""`TCP_CLOSE` of Linux."""
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)


class HalfClosed:
    """`probe`: what may be sent now without harm; `gone`: the client has. Watches until `close`."""

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], bytes], gone: Callable[[], None]) -> None:
        self._transport = transport
        self._probe = probe
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._pause_s = _FIRST_LOOK_S
        self._send_probe()
        self._timer = self._loop.call_later(self._pause_s, self._look)

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._is_reset():
            self._gone()
            return
        if self._loop.time() - self._probed >= _PROBE_S:
            self._send_probe()
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._timer = self._loop.call_later(self._pause_s, self._look)

    def _send_probe(self) -> None:
        self._probed = self._loop.time()
        if data := self._probe():
            self._transport.write(data)

    def _is_reset(self) -> bool:
        """Where the system does not say, the next write fails."""
        sock = self._transport.get_extra_info("socket")
        if sock is None or sock.family == socket.AF_UNIX or _TCP_INFO is None:
            return False
        try:
            return bool(sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] == _RESET)
        except OSError:
            return False
