"""CURVE on the planes: members come in, everybody else is kept out, and keys come and go."""

import asyncio
import json
import os
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from headwater.config.schema import RuntimeConfig
from headwater.errors import ConfigError, HeadwaterError, WorkerLost
from headwater.protocol import PROTOCOL_VERSION
from headwater.protocol.frames import Hello, Submit
from headwater.runtime.cluster_keys import (
    ClusterKeys,
    decode_cluster_keys,
    encode_cluster_keys,
    load_cluster_keys,
    new_cluster,
    new_pair,
    split_key,
    with_key,
)
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.curve import Membership
from headwater.runtime.endpoints import TcpEndpoints
from headwater.runtime.planes import ZmqPlanes, open_planes
from headwater.runtime.requests.conformance import FrontendEnd, WorkerEnd, example_request, example_step
from headwater.runtime.wire import Limits, join_frames

FAST = Limits(silence_s=1.0, heartbeat_s=0.2, linger_s=0.1)
CONNECT_TIMEOUT_S = 2.0


def write(path: Path, keys: ClusterKeys) -> Path:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(encode_cluster_keys(keys))
    fresh.chmod(0o600)
    os.replace(fresh, path)
    return path


def enrolled(keys: ClusterKeys, name: str) -> tuple[ClusterKeys, ClusterKeys]:
    """The cluster with another member, and that member's own file."""
    public, secret = new_pair()
    members = {**keys.members, name: public}
    mine = msgspec.structs.replace(keys, members=members)
    return mine, msgspec.structs.replace(mine, name=name, public=public, secret=secret)


def planes_of(path: Path | None, limits: Limits = FAST) -> ZmqPlanes:
    membership = None if path is None else Membership(path)
    return ZmqPlanes(TcpEndpoints("127.0.0.1", insecure=False), limits, membership=membership)


async def talk(worker_planes: ZmqPlanes, frontend_planes: ZmqPlanes, address: str | None = None) -> int:
    """A frame there and a step back; raises what keeps them apart. Returns how many frames the worker saw."""
    worker = await WorkerEnd(worker_planes.listener()).listen()
    frontend = FrontendEnd(frontend_planes.link(address or worker.address, "frontend-1"))
    try:
        await frontend.connect(CONNECT_TIMEOUT_S)
        frontend.link.send(Submit([example_request(1)]))
        await eventually(lambda: bool(worker.frames), "the request comes through")
        worker.listener.send(worker.frames[0][0], example_step(1))
        await eventually(lambda: bool(frontend.frames), "the step comes back")
    finally:
        await frontend.link.close()
        await worker.listener.close()
    return len(worker.frames)


def apart(worker_path: Path | None, frontend_path: Path | None) -> HeadwaterError:
    """What the frontend hears that may not come in."""
    found: list[HeadwaterError] = []

    async def check() -> None:
        planes = [planes_of(path) for path in (worker_path, frontend_path)]
        with pytest.raises(HeadwaterError) as caught:
            await talk(planes[0], planes[1])
        found.append(caught.value)
        for each in planes:
            await each.close()

    run_leak_checked(check())
    return found[0]


def together(worker_path: Path, frontend_path: Path) -> None:
    async def check() -> None:
        planes = [planes_of(path) for path in (worker_path, frontend_path)]
        assert await talk(planes[0], planes[1]) == 1
        for each in planes:
            await each.close()

    run_leak_checked(check())


def test_members_talk_and_strangers_do_not(tmp_path: Path) -> None:
    cluster = new_cluster("head")
    mine, theirs = enrolled(cluster, "node-2")
    head, node = write(tmp_path / "head", mine), write(tmp_path / "node", theirs)
    together(head, head)
    together(head, node)
    together(node, head)
    stranger = write(tmp_path / "stranger", new_cluster("stranger"))
    assert isinstance(apart(head, stranger), ConfigError), "it does not know whom it would talk to"
    forged = new_cluster("stranger")
    forged = msgspec.structs.replace(forged, members={**mine.members, "stranger": forged.public})
    assert isinstance(apart(head, write(tmp_path / "forged", forged)), WorkerLost), "the worker does not let it in"
    assert isinstance(apart(head, None), ConfigError), "no key at all"
    assert isinstance(apart(None, head), ConfigError), "a worker without a key is not believed"


def test_a_rogue_process_neither_sends_nor_hears_anything(tmp_path: Path) -> None:
    """It knows the address and speaks ZeroMQ: in clear, or with a key pair of its own, it gets no byte through."""

    async def check() -> None:
        path = write(tmp_path / "keys", new_cluster("head"))
        planes = planes_of(path)
        worker = await WorkerEnd(planes.listener()).listen()
        endpoint, public = split_key(worker.address)
        publisher = planes.publisher()
        events = await publisher.open("worker-1", lambda: [])
        context = zmq.Context()
        rogues = []
        hello = join_frames([msgspec.msgpack.encode(Hello("rogue", PROTOCOL_VERSION))])
        for keyed in (False, True):
            for kind, where in ((zmq.DEALER, endpoint), (zmq.SUB, split_key(events.split("#")[0])[0])):
                rogue = context.socket(kind)
                rogue.linger = 0
                if keyed:
                    rogue.curve_publickey, rogue.curve_secretkey = zmq.curve_keypair()
                    rogue.setsockopt(zmq.CURVE_SERVERKEY, public)
                if kind == zmq.SUB:
                    rogue.setsockopt(zmq.SUBSCRIBE, b"")
                rogue.connect(where)
                if kind == zmq.DEALER:
                    rogue.send(hello)
                rogues.append(rogue)
        await eventually(lambda: planes._context.membership.num_refused >= 2, "the rogues are turned away")
        for _ in range(20):
            publisher.publish([])
            await asyncio.sleep(0.01)
        assert worker.frames == []
        for rogue in rogues:
            assert not rogue.poll(0)
            rogue.close()
        context.term()
        await publisher.close()
        await worker.listener.close()
        await planes.close()

    run_leak_checked(check())


def test_members_are_enrolled_and_revoked_without_a_restart(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = new_cluster("head")
        mine, theirs = enrolled(cluster, "node-2")
        head, node = write(tmp_path / "head", cluster), write(tmp_path / "node", theirs)
        worker_planes, frontend_planes = planes_of(head), planes_of(node)
        with pytest.raises(WorkerLost):
            await talk(worker_planes, frontend_planes)
        write(head, mine)
        assert await talk(worker_planes, frontend_planes) == 1
        head.write_bytes(b"{ broken")
        assert await talk(worker_planes, frontend_planes) == 1, "a broken file changes nothing"
        write(head, cluster)
        with pytest.raises(WorkerLost):
            await talk(worker_planes, frontend_planes)
        await frontend_planes.close()
        await worker_planes.close()

    run_leak_checked(check())


def test_addresses_that_others_reach_want_keys_or_a_word(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no keys") as caught:
        open_planes(RuntimeConfig(bind="10.1.2.3"))
    assert "--cluster-key" in (caught.value.hint or "")
    path = write(tmp_path / "keys", new_cluster("head"))
    for config in (
        RuntimeConfig(bind="10.1.2.3", insecure=True),
        RuntimeConfig(bind="10.1.2.3", cluster_key=str(path)),
    ):
        asyncio.run(open_planes(config).close())


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", new_cluster("head"))
    assert load_cluster_keys(path).name == "head"
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="others could join") as caught:
            load_cluster_keys(path)
        assert json.loads(path.read_bytes())["secret"] not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        load_cluster_keys(tmp_path / "none")


def test_keys_that_do_not_fit_are_refused() -> None:
    good = new_cluster("head")
    other = new_cluster("other")
    assert decode_cluster_keys(encode_cluster_keys(good), "f") == good
    for change in ({"public": other.public}, {"members": {}}, {"members": {"x": other.public}}):
        with pytest.raises(ConfigError):
            decode_cluster_keys(encode_cluster_keys(msgspec.structs.replace(good, **change)), "f")


@given(st.binary(max_size=200) | st.just(b"[" * 100_000))
def test_no_bytes_break_the_reader_of_cluster_keys(content: bytes) -> None:
    with pytest.raises(ConfigError):
        decode_cluster_keys(content, "f")


@given(st.text(max_size=80))
def test_no_address_breaks_the_reader_of_addresses(address: str) -> None:
    try:
        endpoint, key = split_key(address)
    except ConfigError:
        return
    assert address == (endpoint if key is None else with_key(endpoint, key.hex()))


@given(st.lists(st.binary(max_size=40), max_size=9))
def test_no_question_breaks_the_porter(parts: list[bytes]) -> None:
    membership = Membership.__new__(Membership)
    membership.num_refused = 0
    membership._path, membership._seen, membership._admitted = Path("/nowhere"), None, frozenset()
    assert membership.answer(parts)[2] in (b"400", b"500")
