"""NVIDIA's NIXL, for RDMA and device memory, when its package is installed. Written against 1.5.

Used only where there is an RDMA device, or for memory of a device: over plain TCP its UCX costs several times the CPU
of our own streams. The NIXL agent is made when first needed, under a name of its own for each life, so that a restart
never meets what a former life left in the peer.
"""

import secrets
import threading
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headwater.errors import LinkUnavailable, PeerLost
from headwater.transfer.base import Grant, PeerSession, RemoteRegion
from headwater.transfer.blocks import Chunk
from headwater.transfer.card import RegionKind
from headwater.transfer.outcome import Stop
from headwater.transfer.regions import Region

_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
_KINDS: tuple[RegionKind, ...] = ("shared", "memory", "device")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_SPINS = 200
_POLL_S = 50e-6


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    device: int
    metadata: bytes


class NixlBackend:
    """See the module docstring. A NIXL agent is not safe for threads: every call holds one lock."""

    name = "nixl"

    def __init__(self, *, needs_rdma: bool = True) -> None:
        self._needs_rdma = needs_rdma
        self._lock = threading.Lock()
        self._agent: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._registered: dict[int, Any] = {}

    def unavailable(self) -> str:
        if not any(find_spec(name) for name in _PACKAGES):
            return f"none of the packages {', '.join(_PACKAGES)} is installed"
        return ""

    def serves(self, local: RegionKind, remote: RegionKind) -> bool:
        if local not in _KINDS or remote not in _KINDS:
            return False
        return not self._needs_rdma or "device" in (local, remote) or _has_rdma()

    def connect(self, session: PeerSession, stop: Stop) -> "NixlLink":
        self.call("get_plugin_list")
        return NixlLink(self)

    def grant(self, region: Region, offer: bytes) -> Grant:
        self.register(region)
        offered = _Offer(region.buffer.device, self.call("get_agent_metadata"))
        return Grant(address=region.buffer.address, offer=msgspec.msgpack.encode(offered))

    def register(self, region: Region) -> None:
        """Known to NIXL from now on."""
        with self._lock:
            if region.card.id not in self._registered:
                rows = [(region.buffer.address, region.buffer.num_bytes, region.buffer.device, "")]
                self._registered[region.card.id] = self._made().register_memory(rows, _memory(region.card.kind))

    def forget(self, region: Region) -> None:
        with self._lock:
            registered = self._registered.pop(region.card.id, None)
            if registered is not None:
                self._agent.deregister_memory(registered)

    def close(self) -> None:
        with self._lock:
            for registered in self._registered.values():
                self._agent.deregister_memory(registered)
            self._registered.clear()
            self._agent = None

    def call(self, method: str, *args: Any) -> Any:
        """A call of NIXL's agent. Raises `LinkUnavailable` with what NIXL says."""
        with self._lock:
            try:
                return getattr(self._made(), method)(*args)
            except self._errors as error:
                raise LinkUnavailable(f"NIXL: {type(error).__name__}: {error}") from None

    def _made(self) -> Any:
        if self._agent is None:
            api = _api()
            # Its errors have no base of their own.
            named = (
                kind for name, kind in vars(api.nixlBind).items() if name.startswith("nixl") and name.endswith("Error")
            )
            self._errors = (RuntimeError, ValueError, OSError, *named)
            # Handles are released by the garbage collector, in any thread.
            sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            try:
                config = api.nixl_agent_config(enable_prog_thread=True, sync_mode=sync)
                self._agent = api.nixl_agent(secrets.token_hex(16), config)
            except self._errors as error:
                raise LinkUnavailable(f"NIXL cannot start: {error}") from None
        return self._agent


class _Step(NamedTuple):
    region: Region
    remote: RemoteRegion
    handle: Any


class NixlLink:
    lanes = 1

    def __init__(self, backend: NixlBackend) -> None:
        self._backend = backend
        self._peers: set[str] = set()

    def attach(self, remote: RemoteRegion) -> None:
        try:
            offer = msgspec.msgpack.decode(remote.offer, type=_Offer)
        except msgspec.MsgspecError as error:
            raise LinkUnavailable(f"the peer's metadata is unusable: {error}") from None
        name = self._backend.call("add_remote_agent", offer.metadata)
        remote.state = name.decode() if isinstance(name, bytes) else name, offer.device
        self._peers.add(remote.state[0])

    def prepare(self, region: Region, remote: RemoteRegion, chunk: Chunk, *, write: bool) -> _Step:
        self._backend.register(region)
        here, device = region.buffer.address, region.buffer.device
        local = [(here + at, size, device) for at, size in zip(chunk.local, chunk.lengths, strict=True)]
        name, their_device = remote.state
        there = [
            (remote.address + at, size, their_device) for at, size in zip(chunk.remote, chunk.lengths, strict=True)
        ]
        call = self._backend.call
        sides = (
            call("get_xfer_descs", local, _memory(region.card.kind)),
            call("get_xfer_descs", there, _memory(remote.card.kind)),
        )
        return _Step(region, remote, call("initialize_xfer", "WRITE" if write else "READ", *sides, name))

    def move(self, step: _Step, stop: Stop) -> None:
        with step.region.hold, step.remote.hold:
            state = self._state("transfer", step)
            looks = 0
            while state == "PROC":
                stop.check()
                looks += 1
                if looks > _SPINS:
                    time.sleep(_POLL_S)
                state = self._state("check_xfer_state", step)
        if state != "DONE":
            raise PeerLost("NIXL reports that the transfer failed")

    def _state(self, method: str, step: _Step) -> str:
        try:
            return str(self._backend.call(method, step.handle))
        except LinkUnavailable as error:
            raise PeerLost(error.message) from None

    def close(self) -> None:
        peers, self._peers = self._peers, set()
        for name in peers:
            try:
                self._backend.call("remove_remote_agent", name)
            except LinkUnavailable:
                continue  # it went before we could


def _api() -> Any:
    reasons = []
    for name in _PACKAGES:
        if find_spec(name):
            try:
                return import_module(f"{name}._api")
            except ImportError as error:
                reasons.append(f"{name}: {error}")
    raise LinkUnavailable("; ".join(reasons) or "NIXL is not installed")


def _memory(kind: RegionKind) -> str:
    return "VRAM" if kind == "device" else "DRAM"


def _has_rdma() -> bool:
    try:
        return any(_RDMA_DEVICES.iterdir())
    except OSError:
        return False
