"""Encrypted transfers: nothing readable on the wire, no change on its way unnoticed."""

import dataclasses
import itertools
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import PeerLost, TransferError, TransferRefused
from headwater.transfer import sealing
from headwater.transfer.agent import Agent
from headwater.transfer.card import decode_card, encode_card
from headwater.transfer.options import AgentOptions
from headwater.transfer.sealing import Exchange, Opener, SealedSocket, Sealer
from headwater.transfer.streams import look_often, receive_all, send_all

KEY = b"k" * 32
BLOCK = 4096
PATTERN = b"the quick brown fox jumps over the lazy dog "


def options(*, encrypt: bool = True, key: bytes | None = KEY) -> AgentOptions:
    return AgentOptions(key=key, backends=("tcp",), heartbeat_s=0.2, peer_timeout_s=2.0, encrypt=encrypt)


class Wire:
    """Between two agents: relays TCP, keeps what passes and may change it."""

    def __init__(self, port: int, change: Callable[[bytes], bytes] = bytes) -> None:
        self.seen = bytearray()
        self._change = change
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(self._change(data))
        except OSError:
            pass
        finally:
            sink.close()


def apart(card: bytes, port: int) -> bytes:
    """The card as a peer of another host would have it: no Unix socket, and TCP through the wire."""
    return encode_card(msgspec.structs.replace(decode_card(card), unix="", port=port))


def port_of(agent: Agent) -> int:
    return decode_card(agent.card()).port


@pytest.fixture
def owner() -> Iterator[Agent]:
    with Agent("owner", options()) as agent:
        yield agent


def filled(agent: Agent, num_blocks: int = 64) -> "object":
    region = agent.register(bytearray(BLOCK * num_blocks), block_bytes=BLOCK)
    region.view[:] = (PATTERN * (BLOCK * num_blocks // len(PATTERN) + 1))[: BLOCK * num_blocks]
    return region


def test_nothing_can_be_read_on_the_wire_and_all_comes_through(owner: Agent) -> None:
    there = filled(owner)
    wire = Wire(port_of(owner))
    with Agent("reader", options()) as reader:
        reader.add_peer(apart(owner.card(), wire.port))
        here = reader.register(bytearray(BLOCK * 64), block_bytes=BLOCK)
        descriptor = there.blocks(range(64))  # type: ignore[attr-defined]
        reader.read(here.blocks(range(64)), descriptor).run()
        assert bytes(here.view) == bytes(there.view)  # type: ignore[attr-defined]
        here.view[:] = b"secret!!" * (BLOCK * 8)
        reader.write(here.blocks(range(64)), descriptor).run()
        assert bytes(there.view) == bytes(here.view)  # type: ignore[attr-defined]
        reader.notify("owner", b"a notice that nobody reads")
    wire.close()
    assert len(wire.seen) > 2 * BLOCK * 64
    for clear in (PATTERN[:12], b"secret!!", b"a notice", decode_card(owner.card()).boot_id.encode()[:16]):
        assert clear not in wire.seen


@pytest.mark.parametrize("offset", [0, 1, 40, 5000])
def test_what_is_changed_on_its_way_is_not_taken(owner: Agent, offset: int) -> None:
    there = filled(owner)
    armed = threading.Event()

    def change(data: bytes) -> bytes:
        if not armed.is_set() or len(data) <= offset:
            return data
        return data[:offset] + bytes((data[offset] ^ 1,)) + data[offset + 1 :]

    wire = Wire(port_of(owner), change)
    with Agent("reader", options()) as reader:
        reader.add_peer(apart(owner.card(), wire.port))
        here = reader.register(bytearray(BLOCK * 64), block_bytes=BLOCK)
        transfer = reader.read(here.blocks(range(64)), there.blocks(range(64)), timeout_s=5)  # type: ignore[attr-defined]
        transfer.run()
        armed.set()
        with pytest.raises(TransferError):
            transfer.run()
    wire.close()


@pytest.mark.parametrize("encrypts", [True, False])
def test_agents_that_do_not_agree_say_so(encrypts: bool) -> None:
    with Agent("owner", options(encrypt=encrypts)) as owner, Agent("reader", options(encrypt=not encrypts)) as reader:
        reader.add_peer(apart(owner.card(), port_of(owner)))
        with pytest.raises(TransferRefused, match="set `encrypt` alike"):
            reader.notify("owner", b"x")


@pytest.mark.parametrize("encrypts", [True, False])
def test_agents_of_one_host_need_not_agree(encrypts: bool) -> None:
    """Nothing is sealed between them: they talk over a Unix socket."""
    with Agent("owner", options(encrypt=encrypts)) as owner, Agent("reader", options(encrypt=not encrypts)) as reader:
        reader.add_peer(owner.card())
        reader.notify("owner", b"x")


def test_a_wrong_key_is_refused(owner: Agent) -> None:
    with Agent("reader", options(key=b"x" * 32)) as reader:
        reader.add_peer(apart(owner.card(), port_of(owner)))
        with pytest.raises(TransferRefused, match="prove the key"):
            reader.notify("owner", b"x")


def pair() -> tuple[Sealer, Opener]:
    key = bytes(range(32))
    return Sealer(key), Opener(key)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=5000), min_size=1, max_size=8), st.integers(1, 3000))
def test_records_come_back_in_whatever_pieces_they_travel(plains: list[bytes], piece: int) -> None:
    sealer, opener = pair()
    wire = b"".join(sealer.seal(plain) for plain in plains)
    got: list[bytes] = []
    for at in range(0, len(wire), piece):
        got += opener.open_all(wire[at : at + piece])
    assert got == plains
    assert opener.is_empty


@pytest.mark.parametrize("trick", ["repeat", "drop", "swap", "cut"])
def test_records_that_are_moved_are_noticed(trick: str) -> None:
    sealer, opener = pair()
    first, second, third = (sealer.seal(bytes((number,)) * 100) for number in range(3))
    order = {
        "repeat": [first, first],
        "drop": [first, third],
        "swap": [second, first],
        "cut": [first[:-20] + second],
    }[trick]
    with pytest.raises(PeerLost):
        list(opener.open_all(b"".join(order)))


@given(st.binary(max_size=200))
def test_no_bytes_pass_for_a_record(data: bytes) -> None:
    _, opener = pair()
    try:
        assert list(opener.open_all(data)) == []
        assert len(opener.space()) > 0
    except PeerLost:
        return


def test_every_exchange_gives_other_keys_and_both_sides_the_same() -> None:
    here, there = Exchange(), Exchange()
    ours, theirs = here.keys(there.public, KEY, b"said"), there.keys(here.public, KEY, b"said")
    assert ours == theirs
    assert ours.connects != ours.accepts
    assert Exchange().keys(there.public, KEY, b"said") != ours, "who learns the secret later learns nothing"
    assert here.keys(there.public, b"x" * 32, b"said") != ours
    assert here.keys(there.public, KEY, b"other") != ours
    with pytest.raises(PeerLost):
        here.keys(bytes(32), KEY)


def test_sealed_sockets_gather_and_scatter_as_bare_ones() -> None:
    near, far = socket.socketpair()
    for sock in (near, far):
        look_often(sock)
    one, other = bytes(range(32)), bytes(range(1, 33))
    ours = SealedSocket(near, Sealer(one), Opener(other))
    theirs = SealedSocket(far, Sealer(other), Opener(one))
    sizes = [1, 70_000, 3, 600_000, 4096, 300_000]
    sent = [bytes((number,)) * size for number, size in enumerate(sizes)]
    sender = threading.Thread(target=send_all, args=(ours, [memoryview(data) for data in sent], None))
    sender.start()
    total = bytearray(sum(sizes))
    cuts = [0, 10, 500_000, 500_001, len(total)]
    views = [memoryview(total)[start:end] for start, end in itertools.pairwise(cuts)]
    receive_all(theirs, views, None)
    sender.join()
    assert bytes(total) == b"".join(sent)
    ours.close()
    with pytest.raises(PeerLost):
        receive_all(theirs, [memoryview(bytearray(1))], None)
    theirs.close()


def test_without_the_library_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Exception, match="cryptography"):
        dataclasses.replace(options(encrypt=False), encrypt=True)
