"""CURVE on all sockets of a ZeroMQ context: who listens proves itself, who dials is let in if it is a member.

The decision is made in the process itself, by ZeroMQ's own authentication protocol (ZAP). The file of keys is looked
at again when somebody asks to come in, so members are enrolled and revoked without a restart; connections that stand
are kept. A file that cannot be read lets the last known members in.
"""

import logging
from pathlib import Path

import zmq

from headwater.errors import ConfigError
from headwater.runtime.cluster_keys import ClusterKeys, load_cluster_keys, split_key, with_key

logger = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"headwater"
_VERSION = b"1.0"
_REQUEST_PARTS = 7
_CURVE_SERVER = int(zmq.CURVE_SERVER)
_CURVE_SERVERKEY = int(zmq.CURVE_SERVERKEY)
_CURVE_PUBLICKEY = int(zmq.CURVE_PUBLICKEY)
_CURVE_SECRETKEY = int(zmq.CURVE_SECRETKEY)
_ZAP_DOMAIN = int(zmq.ZAP_DOMAIN)

Options = dict[int, int | bytes]


class Membership:
    """This process's keys and the members it knows."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError`."""
        self._path = path
        self._keys = load_cluster_keys(path)
        self._admitted = self._keys.admitted
        self._seen = self._identity()
        self.num_refused = 0

    @property
    def keys(self) -> ClusterKeys:
        return self._keys

    def admits(self, public: bytes) -> bool:
        if (seen := self._identity()) != self._seen:
            self._seen = seen
            self._reload()
        return public in self._admitted

    def listening(self) -> Options:
        """Options of a socket that binds."""
        return {_CURVE_SERVER: 1, _CURVE_SECRETKEY: bytes.fromhex(self._keys.secret), _ZAP_DOMAIN: _DOMAIN}

    def dialling(self, address: str) -> tuple[str, Options]:
        """The endpoint, and the options for a socket about to connect to it. Raises `ConfigError`."""
        endpoint, public = split_key(address)
        if public is None:
            raise ConfigError(f"{endpoint!r} listens without a key, and this process has cluster keys")
        if not self.admits(public):
            raise ConfigError(f"{endpoint!r} has the key of no member of the cluster")
        return endpoint, {
            _CURVE_SERVERKEY: public,
            _CURVE_PUBLICKEY: bytes.fromhex(self._keys.public),
            _CURVE_SECRETKEY: bytes.fromhex(self._keys.secret),
        }

    def address(self, endpoint: str) -> str:
        return with_key(endpoint, self._keys.public)

    def answer(self, request: list[bytes]) -> list[bytes]:
        """One ZAP request to its reply."""
        if len(request) < _REQUEST_PARTS - 1 or request[0] != _VERSION:
            return [_VERSION, request[1] if len(request) > 1 else b"", b"500", b"not understood", b"", b""]
        number, domain, _, _, mechanism, *credentials = request[1:]
        admitted = mechanism == b"CURVE" and domain == _DOMAIN and len(credentials) == 1 and self.admits(credentials[0])
        if not admitted:
            self._refused()
            return [_VERSION, number, b"400", b"no member", b"", b""]
        return [_VERSION, number, b"200", b"OK", credentials[0].hex().encode(), b""]

    def _refused(self) -> None:
        """Said ever more rarely: whoever tries may try for ever."""
        self.num_refused += 1
        if self.num_refused & (self.num_refused - 1) == 0:
            logger.warning("%d times a process without a member's key was kept off the planes", self.num_refused)

    def _reload(self) -> None:
        try:
            found = load_cluster_keys(self._path)
        except ConfigError as error:
            logger.error("the members stay as they were: %s", error.message)
            return
        if found.public != self._keys.public:
            logger.warning("%s has another key of this process; it counts from the next start on", self._path)
        self._admitted = found.admitted
        logger.info("cluster keys read: %d members", len(found.members))

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
