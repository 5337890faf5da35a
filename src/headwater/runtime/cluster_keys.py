"""The keys of a cluster: which process may join its planes, and how it proves that.

Every host (or pod, or process: whatever is to be let in and thrown out on its own) has one file with its own CURVE key
pair and the public keys of all members. One file copied everywhere is the simple case: one member. The file must be
private. `headwater keys cluster` writes it.

An address on a plane ends in the public key of whoever listens there (`tcp://10.0.0.1:5555?curve=<hex>`). It is dialled
only if that is the key of a member, so an entry forged in the registry leads nowhere.
"""

import os
import stat
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import zmq
from zmq.utils import z85

from headwater.errors import ConfigError

KEY_BYTES = 32
_MAX_FILE_BYTES = 4 * 1024 * 1024
_MARK = "?curve="

HexKey = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
MemberName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class ClusterKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document."""

    format: Literal["headwater-cluster-keys"]
    version: Literal[1]
    name: MemberName
    """Of the member that this file is for."""
    public: HexKey
    secret: HexKey
    members: dict[MemberName, HexKey]

    @property
    def admitted(self) -> frozenset[bytes]:
        return frozenset(bytes.fromhex(key) for key in self.members.values())


def new_cluster(name: str) -> ClusterKeys:
    public, secret = new_pair()
    return ClusterKeys("headwater-cluster-keys", 1, name, public, secret, {name: public})


def new_pair() -> tuple[str, str]:
    """(public, secret) in hex."""
    public, secret = zmq.curve_keypair()
    return z85.decode(public).hex(), z85.decode(secret).hex()


def load_cluster_keys(path: Path) -> ClusterKeys:
    """Raises `ConfigError`, which shows no key."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the cluster keys {path}: {error.strerror}") from error
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (os.geteuid(), 0) or mode & 0o077:
        raise ConfigError(
            f"the cluster keys {path} have owner {found.st_uid} and mode {mode:04o}: others could join the cluster",
            hint=f"chown {os.geteuid()} {path} && chmod 600 {path}",
        )
    return decode_cluster_keys(content, str(path))


def decode_cluster_keys(content: bytes, where: str) -> ClusterKeys:
    try:
        keys = msgspec.json.decode(content, type=ClusterKeys)
    except (msgspec.MsgspecError, RecursionError):
        # The message of the decoder could quote what it found.
        raise ConfigError(f"{where}: not a file of cluster keys", hint="`headwater keys cluster create`") from None
    if zmq.curve_public(z85.encode(bytes.fromhex(keys.secret))) != z85.encode(bytes.fromhex(keys.public)):
        raise ConfigError(f"{where}: public and secret key do not belong together")
    if keys.public not in keys.members.values():
        raise ConfigError(f"{where}: {keys.name} itself is not among the members: its key was revoked")
    return keys


def encode_cluster_keys(keys: ClusterKeys) -> bytes:
    return msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n"


def with_key(endpoint: str, public: str) -> str:
    """The address of a listener that proves `public`."""
    return f"{endpoint}{_MARK}{public}"


def split_key(address: str) -> tuple[str, bytes | None]:
    """The endpoint, and the key of whoever listens there. Raises `ConfigError`."""
    endpoint, mark, given = address.rpartition(_MARK)
    if not mark:
        return address, None
    try:
        key = bytes.fromhex(given)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"the address {endpoint!r} ends in something that is no key")
    return endpoint, key
