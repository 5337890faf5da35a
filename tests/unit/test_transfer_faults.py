"""Processes that die, stop, lie or send garbage: both sides learn in bounded time, and nothing else breaks."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from data_relay import Fault, data_relay
from headwater.errors import (
    ConfigError,
    LinkUnavailable,
    Overloaded,
    PeerLost,
    RegionGone,
    StaleGeneration,
    TransferError,
    TransferRefused,
)
from headwater.transfer.agent import Agent
from headwater.transfer.benchmark import Target
from headwater.transfer.card import AgentCard, decode_card, encode_card
from headwater.transfer.greeting import Identity, greet
from headwater.transfer.options import AgentOptions
from headwater.transfer.outcome import Stop
from headwater.transfer.target import Settings
from headwater.transfer.wire import (
    DATAS,
    MAX_FRAME_BYTES,
    Answer,
    Challenge,
    Done,
    Fetch,
    Hello,
    Ready,
    Refused,
    Store,
    frame,
    length_of,
)

KEY = b"k" * 32
BLOCK = 4096
BLOCKS = 2048
LOST_S = 0.8
BOUND_S = 20.0
"""Generous: the promise is `LOST_S` and a second, on a machine that has time."""


def options(*backends: str, key: bytes | None = KEY, host: str | None = "127.0.0.1") -> AgentOptions:
    return AgentOptions(key=key, host=host, backends=backends, heartbeat_s=0.2, peer_timeout_s=LOST_S)


@contextlib.contextmanager
def target_of(backend: str) -> Iterator[Target]:
    kind = "shared" if backend == "shm" else "memory"
    settings = Settings("target", KEY.hex(), [backend], BLOCK * BLOCKS, BLOCK, kind, 0.2, LOST_S)
    target = Target(settings)
    try:
        yield target
    finally:
        with contextlib.suppress(ProcessLookupError):
            target.process.send_signal(signal.SIGCONT)
        target.process.kill()
        target.close()


def keep_moving(agent: Agent, target: Target) -> tuple[threading.Thread, list[TransferError]]:
    """Transfers back to back until one fails."""
    local = agent.allocate(BLOCK * BLOCKS, block_bytes=BLOCK)
    transfer = agent.read(local.blocks(range(0, BLOCKS, 2)), target.blocks(list(range(1, BLOCKS, 2))), timeout_s=60)
    transfer.run()
    errors: list[TransferError] = []

    def work() -> None:
        try:
            while True:
                transfer.run()
        except TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("backend", ["shm", "cma", "tcp"])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_stops_in_mid_transfer_is_lost(backend: str, sign: signal.Signals) -> None:
    with target_of(backend) as target, Agent("here", options(backend)) as agent:
        agent.add_peer(target.card)
        expected = agent.expect("target", b"never", 60.0)
        agent.notify("target", b"hello")
        thread, errors = keep_moving(agent, target)
        target.process.send_signal(sign)
        thread.join(BOUND_S)
        assert [type(error) for error in errors] == [PeerLost]
        assert not expected.done()  # it never began a session of its own


def test_a_peer_that_wakes_up_after_it_was_given_up_is_a_peer_again() -> None:
    with target_of("tcp") as target, Agent("here", options("tcp")) as agent:
        agent.add_peer(target.card)
        thread, errors = keep_moving(agent, target)
        target.process.send_signal(signal.SIGSTOP)
        thread.join(BOUND_S)
        assert errors
        target.process.send_signal(signal.SIGCONT)
        local = agent.allocate(BLOCK, block_bytes=BLOCK)
        deadline = time.monotonic() + BOUND_S
        while True:
            try:
                agent.read(local.blocks([0]), target.blocks([5])).run()
                break
            except PeerLost:
                assert time.monotonic() < deadline
        assert local.view[0] == 5 * BLOCK % 251 + 1


INITIATOR = textwrap.dedent(
    """
    import sys
    from headwater.transfer.agent import Agent
    from headwater.transfer.blocks import Blocks
    from headwater.transfer.options import AgentOptions
    import msgspec
    card, blocks, backend = sys.argv[1:4]
    agent = Agent("other", AgentOptions(key=b"k" * 32, backends=(backend,), heartbeat_s=0.2, peer_timeout_s=0.8))
    agent.add_peer(bytes.fromhex(card))
    there = msgspec.msgpack.decode(bytes.fromhex(blocks), type=Blocks)
    here = agent.allocate(there.num_bytes, block_bytes=there.block_bytes)
    transfer = agent.write(here.blocks(range(there.count)), there)
    transfer.run()
    agent.notify("here", b"begun")
    while True:
        transfer.run()
    """
)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_who_expects_something_of_a_process_that_dies_or_stops_learns_it(backend: str, sign: signal.Signals) -> None:
    with Agent("here", options(backend)) as agent:
        region = agent.allocate(BLOCK * 64, block_bytes=BLOCK)
        blocks = msgspec.msgpack.encode(region.blocks(range(64))).hex()
        begun, never = agent.expect("other", b"begun", 60.0), agent.expect("other", b"never", 60.0)
        child = subprocess.Popen([sys.executable, "-c", INITIATOR, agent.card().hex(), blocks, backend])
        try:
            begun.result(BOUND_S)
            child.send_signal(sign)
            with pytest.raises(PeerLost):
                never.result(BOUND_S)
            agent.unregister(region)  # nobody holds it any more
        finally:
            child.kill()
            child.wait()


def test_a_stopped_peer_does_not_let_go_but_does_not_block_the_owner_for_ever() -> None:
    with Agent("here", options("shm")) as agent:
        region = agent.allocate(BLOCK * 64, block_bytes=BLOCK)
        blocks = msgspec.msgpack.encode(region.blocks(range(64))).hex()
        begun = agent.expect("other", b"begun", 60.0)
        child = subprocess.Popen([sys.executable, "-c", INITIATOR, agent.card().hex(), blocks, "shm"])
        try:
            begun.result(BOUND_S)
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(TransferError, match="did not let go"):
                agent.unregister(region, 0.1)
        finally:
            child.kill()
            child.wait()


# Keys


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_wrong_key_is_refused_and_says_so(backend: str) -> None:
    with Agent("here", options(backend, key=b"x" * 32)) as here, Agent("there", options(backend)) as there:
        here.add_peer(there.card())
        with pytest.raises(TransferRefused, match="does not prove the key"):
            here.notify("there", b"x")
        assert there.notices() == []


def test_a_card_with_a_token_lets_its_holder_in_and_no_other() -> None:
    with Agent("here", options("tcp", key=None)) as here, Agent("there", options("tcp", key=None)) as there:
        card = decode_card(there.card())
        here.add_peer(encode_card(msgspec.structs.replace(card, token=b"y" * 32)))
        with pytest.raises(TransferRefused):
            here.notify("there", b"x")
        here.add_peer(there.card())
        here.notify("there", b"x")
        there.expect("here", b"x", BOUND_S).result(BOUND_S)


def test_a_short_key_and_an_address_nobody_can_reach_are_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        AgentOptions(key=b"secret")
    with pytest.raises(ConfigError, match="advertised_host"):
        AgentOptions(host="0.0.0.0")


# Who speaks wrongly


def dial(agent: Agent) -> socket.socket:
    card = decode_card(agent.card())
    return socket.create_connection((card.host, card.port), BOUND_S)


def closes(sock: socket.socket) -> bool:
    """Whether the other side ends the connection, whatever it says before."""
    sock.settimeout(BOUND_S)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(65536):
            pass
    return True


HELLO = Hello(1, "mallory", 1, "here", 0, "data", b"n" * 32)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        bytes(64),
        (100).to_bytes(4, "little") + bytes(100),
        (2**31).to_bytes(4, "little"),
        frame(Done(b"tag", b"payload")),
        frame(Answer(b"p", b"c")),
        frame(msgspec.structs.replace(HELLO, version=99)),
        frame(msgspec.structs.replace(HELLO, target="somebody")),
        frame(msgspec.structs.replace(HELLO, nonce=b"short")),
        frame(HELLO) + frame(HELLO),
        frame(HELLO) + frame(Answer(b"p" * 32, b"c")),
    ],
)
def test_strangers_are_sent_away(sent: bytes) -> None:
    with Agent("here", options("tcp")) as agent:
        with dial(agent) as sock:
            sock.sendall(sent)
            assert closes(sock)
        with Agent("there", options("tcp")) as there:
            there.add_peer(agent.card())
            there.notify("here", b"fine")
            agent.expect("there", b"fine", BOUND_S).result(BOUND_S)


def test_a_proof_cannot_be_reflected() -> None:
    """Who connects cannot answer with what the accepting side proved."""
    with Agent("here", options("tcp")) as agent, dial(agent) as sock:
        sock.sendall(frame(HELLO))
        header = sock.recv(4, socket.MSG_WAITALL)
        challenge = msgspec.msgpack.decode(sock.recv(length_of(header, 4096), socket.MSG_WAITALL), type=Challenge)
        sock.sendall(frame(Answer(challenge.proof, b"")))
        header = sock.recv(4, socket.MSG_WAITALL)
        refused = msgspec.msgpack.decode(sock.recv(length_of(header, 4096), socket.MSG_WAITALL), type=Refused)
        assert (refused.code, refused.card) == ("transfer_refused", b"")


def data_stream(agent: Agent, name: str = "mallory") -> socket.socket:
    """A data stream of someone who has the key and means no good."""
    peer = decode_card(agent.card())
    card = encode_card(AgentCard(1, name, 1, ""))
    sock = dial(agent)
    try:
        greet(sock, Identity(name, 1, KEY, lambda: card), peer, KEY, "data", Stop(agent.clock, BOUND_S))
    except TransferError:
        sock.close()
        raise
    return sock


def spans(*pairs: tuple[int, int]) -> bytes:
    return b"".join(number.to_bytes(8, "little") for pair in pairs for number in pair)


def answer(sock: socket.socket) -> Ready | Refused:
    header = sock.recv(4, socket.MSG_WAITALL)
    made = DATAS.decode(sock.recv(length_of(header, MAX_FRAME_BYTES), socket.MSG_WAITALL))
    assert isinstance(made, Ready | Refused)
    return made


@pytest.mark.parametrize(
    ("pairs", "code"),
    [
        ([(0, BLOCK + 1)], "transfer_refused"),
        ([(BLOCK, 1)], "transfer_refused"),
        ([(0, 0)], "transfer_refused"),
        ([(2**64 - 1, 2)], "transfer_refused"),
        ([(0, 2**64 - 1)], "transfer_refused"),
        ([(0, 16), (BLOCK - 8, 9)], "transfer_refused"),
    ],
)
def test_spans_are_checked_where_the_memory_is(pairs: list[tuple[int, int]], code: str) -> None:
    with Agent("here", options("tcp")) as agent:
        region = agent.allocate(BLOCK)
        with data_stream(agent) as sock:
            sock.sendall(frame(Fetch(region.card.id, spans(*pairs))))
            refused = answer(sock)
            assert isinstance(refused, Refused)
            assert refused.code == code
            # The stream goes on, also after a store that was refused: its bytes were read and thrown away.
            sock.sendall(frame(Store(region.card.id, spans(*pairs), 64)) + b"!" * 64)
            assert isinstance(answer(sock), Refused)
            sock.sendall(frame(Store(99, spans((0, 8)), 8)) + b"!" * 8)
            unknown = answer(sock)
            assert isinstance(unknown, Refused)
            assert unknown.code == "region_gone"
            sock.sendall(frame(Store(region.card.id, spans((8, 4), (0, 4)), 8)) + b"abcdefgh")
            assert answer(sock) == Ready(8)
            assert bytes(region.view[:12]) == b"efgh\0\0\0\0abcd"
            sock.sendall(frame(Fetch(region.card.id, spans((0, 4)))))
            assert answer(sock) == Ready(4)
            assert sock.recv(4, socket.MSG_WAITALL) == b"efgh"


@pytest.mark.parametrize("sent", [frame(Ready(1)), b"\xff\xff\xff\xff", (9).to_bytes(4, "little") + b"nonsense!"])
def test_garbage_on_a_data_stream_ends_it(sent: bytes) -> None:
    with Agent("here", options("tcp")) as agent, data_stream(agent) as sock:
        sock.sendall(sent)
        assert closes(sock)


def test_a_store_cut_off_in_the_middle_frees_the_region() -> None:
    with Agent("here", options("tcp")) as agent:
        region = agent.allocate(BLOCK)
        with data_stream(agent) as sock:
            sock.sendall(frame(Store(region.card.id, spans((0, BLOCK)), BLOCK)) + b"half")
        agent.unregister(region)


def test_a_half_open_store_does_not_keep_the_owner_from_its_memory() -> None:
    with Agent("here", options("tcp")) as agent:
        region = agent.allocate(BLOCK)
        with data_stream(agent) as sock:
            sock.sendall(frame(Store(region.card.id, spans((0, BLOCK)), BLOCK)) + b"half")
            deadline = time.monotonic() + BOUND_S
            while not region.hold._users:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            agent.unregister(region, BOUND_S)
            assert closes(sock)


def test_streams_are_counted() -> None:
    few = AgentOptions(key=KEY, backends=("tcp",), max_streams=1)
    with Agent("here", few) as agent, data_stream(agent), pytest.raises(TransferRefused, match="no more allowed"):
        data_stream(agent)


def test_whoever_only_waits_at_the_door_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.transfer.reception._GREETING_S", 0.05)
    with Agent("here", options("tcp")) as agent, dial(agent) as sock:
        assert closes(sock)


def test_a_link_that_swallows_everything_is_given_up() -> None:
    """Half open: the connection stands, and nothing comes through any more."""
    with (
        Agent("there", options("tcp")) as there,
        Agent("here", options("tcp")) as here,
        data_relay(there) as (card, relay),
    ):
        here.add_peer(card)
        local, remote = here.allocate(BLOCK, block_bytes=BLOCK), there.allocate(BLOCK, block_bytes=BLOCK)
        here.write(local.blocks([0]), remote.blocks([0])).run()
        expected = there.expect("here", b"never", 60.0)
        relay.fail("freeze")
        future = here.write(local.blocks([0]), remote.blocks([0]), timeout_s=60.0).post()
        with pytest.raises(PeerLost):
            future.result(BOUND_S)
        with pytest.raises(PeerLost):
            expected.result(BOUND_S)


@pytest.mark.parametrize("fault", ["cut", "freeze"])
@pytest.mark.parametrize("write", [False, True])
def test_a_data_link_that_breaks_in_mid_transfer_is_noticed_and_the_next_one_works(fault: Fault, write: bool) -> None:
    with (
        Agent("there", options("tcp")) as there,
        Agent("here", options("tcp")) as here,
        data_relay(there) as (card, relay),
    ):
        here.add_peer(card)
        local = here.allocate(BLOCK * BLOCKS, block_bytes=BLOCK)
        remote = there.register(bytearray(os.urandom(BLOCK * BLOCKS)), block_bytes=BLOCK)
        move = here.write if write else here.read
        every_other = list(range(0, BLOCKS, 2))
        move(local.blocks([0]), remote.blocks([0])).run()
        relay.fail(fault, BLOCK * BLOCKS // 4)
        with pytest.raises(PeerLost):
            move(local.blocks(every_other), remote.blocks(every_other), timeout_s=60.0).post().result(BOUND_S)
        if fault == "freeze":
            relay.heal()
        move(local.blocks(every_other), remote.blocks(every_other), timeout_s=60.0).run()
        assert all(
            local.view[at : at + BLOCK] == remote.view[at : at + BLOCK] for at in range(0, BLOCK * BLOCKS, 2 * BLOCK)
        )
        there.unregister(remote, timeout_s=5.0)  # nobody holds it any more


def test_who_tries_again_at_once_does_not_meet_the_broken_session_again() -> None:
    """Also when the reactor has yet to see that it broke."""
    with (
        Agent("there", options("tcp")) as there,
        Agent("here", options("tcp")) as here,
        data_relay(there) as (card, relay),
    ):
        here.add_peer(card)
        local, remote = here.allocate(BLOCK, block_bytes=BLOCK), there.allocate(BLOCK, block_bytes=BLOCK)
        read = here.read(local.blocks([0]), remote.blocks([0]))
        read.run()
        stop = Stop(here.clock, BOUND_S)
        broken = here.session("there", there.generation, stop)
        sees_again = threading.Event()

        def look_away() -> None:
            sees_again.wait(BOUND_S)

        here.soon(look_away)
        relay.fail("cut")
        fresh = here.session("there", there.generation, stop)
        sees_again.set()
        assert (broken.outbound.lost is not None, fresh.outbound.is_up()) == (True, True)
        read.run()


# Lives


def test_a_restarted_peer_poisons_nobody() -> None:
    cards: dict[str, bytes] = {}
    with Agent("here", options("shm"), lookup=cards.get) as here:
        local = here.allocate(BLOCK, block_bytes=BLOCK)
        for life in range(3):
            with target_of("shm") as target:
                cards["target"] = target.card
                here.read(local.blocks([0]), target.blocks([life])).run()
                assert local.view[0] == life * BLOCK % 251 + 1
                stale = target.blocks([0])
        with pytest.raises(PeerLost):
            here.read(local.blocks([0]), stale).run()


def test_a_peer_of_the_same_name_at_the_same_place_tells_its_new_card() -> None:
    """The address may be reused by the next life: the handshake notices, and no look-up is needed."""
    with Agent("there", options("tcp")) as there, Agent("here", options("tcp")) as here:
        card = decode_card(there.card())
        here.add_peer(encode_card(msgspec.structs.replace(card, generation=card.generation - 1)))
        local, remote = here.allocate(BLOCK, block_bytes=BLOCK), there.allocate(BLOCK, block_bytes=BLOCK)
        stale = msgspec.structs.replace(remote.blocks([0]), generation=card.generation - 1)
        with pytest.raises(StaleGeneration):
            here.read(local.blocks([0]), stale).run()
        here.read(local.blocks([0]), remote.blocks([0])).run()


def test_a_life_that_is_over_is_not_let_in() -> None:
    with Agent("here", options("tcp")) as here, Agent("there", options("tcp")) as there:
        card = decode_card(there.card())
        here.add_peer(encode_card(msgspec.structs.replace(card, generation=card.generation + 1)))
        there.add_peer(here.card())
        with pytest.raises(StaleGeneration, match="later life"):
            there.notify("here", b"x")


# Files and choice


def test_a_file_that_became_too_short_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(secrets.token_bytes(4 * BLOCK))
    with Agent("here", options("file")) as here, Agent("there", options("file")) as there:
        here.add_peer(there.card())
        local, remote = here.allocate(4 * BLOCK, block_bytes=BLOCK), there.register(path, block_bytes=BLOCK)
        here.read(local.blocks(range(4)), remote.blocks(range(4))).run()
        assert bytes(local.view) == path.read_bytes()
        os.truncate(path, 2 * BLOCK)
        here.read(local.blocks([1]), remote.blocks([1])).run()
        for order in (here.read, here.write):
            with pytest.raises(RegionGone, match="8192 bytes long"):
                order(local.blocks([2]), remote.blocks([2])).run()
        assert path.stat().st_size == 2 * BLOCK


def test_an_agent_reads_its_own_files(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(b"abcd" * BLOCK)
    with Agent("here", options("file")) as here:
        here.add_peer(here.card())
        local, file = here.allocate(BLOCK, block_bytes=BLOCK), here.register(path, block_bytes=BLOCK)
        here.read(local.blocks([0]), file.blocks([3])).run()
        assert bytes(local.view[:4]) == b"abcd"


def test_links_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(__file__)
    (tmp_path / "empty").touch()
    with Agent("here", options("file")) as here:
        for name in ("link", "missing", "empty"):
            with pytest.raises(TransferRefused):
                here.register(tmp_path / name)


def test_the_best_back_end_is_taken_with_a_reason_and_the_next_when_it_fails() -> None:
    every = options("shm", "cma", "tcp")
    with Agent("here", every) as here, Agent("there", options("tcp", "cma", "shm")) as there:
        here.add_peer(there.card())
        local = here.allocate(BLOCK, block_bytes=BLOCK)
        shared, private = there.allocate(BLOCK, block_bytes=BLOCK), there.register(bytearray(BLOCK), block_bytes=BLOCK)
        assert here.read(local.blocks([0]), shared.blocks([0])).run().backend == "shm"
        assert here.read(local.blocks([0]), private.blocks([0])).run().backend == "cma"
    with Agent("here", every) as here, Agent("there", every) as there:
        card = decode_card(there.card())
        here.add_peer(encode_card(msgspec.structs.replace(card, unix="")))
        local, shared = here.allocate(BLOCK, block_bytes=BLOCK), there.allocate(BLOCK, block_bytes=BLOCK)
        assert here.read(local.blocks([0]), shared.blocks([0])).run().backend == "tcp"
        (report,) = here.links()
        assert "not shm: the peer is not on this host" in report.reason
        assert "not cma" in report.reason


def test_when_nothing_fits_all_reasons_are_told() -> None:
    with Agent("here", options("shm", "tcp")) as here, Agent("there", options("cma", host=None)) as there:
        here.add_peer(there.card())
        local, remote = here.allocate(BLOCK, block_bytes=BLOCK), there.allocate(BLOCK, block_bytes=BLOCK)
        with pytest.raises(LinkUnavailable, match=r"not shm: the peer does not offer it; not tcp: the peer does not"):
            here.read(local.blocks([0]), remote.blocks([0])).run()


def test_notices_beyond_the_bound_drop_the_oldest() -> None:
    few = AgentOptions(key=KEY, backends=("tcp",), max_notices=3)
    with Agent("here", options("tcp")) as here, Agent("there", few) as there:
        here.add_peer(there.card())
        for number in range(5):
            here.notify("there", b"%d" % number)
        deadline = time.monotonic() + BOUND_S
        while there._inbox.dropped < 2:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert [notice.tag for notice in there.notices()] == [b"2", b"3", b"4"]


def test_two_agents_that_wait_for_each_other_still_answer() -> None:
    """One mover each, both waiting for the other's checksums."""
    single = AgentOptions(key=KEY, backends=("tcp",), movers=1, checksums=True)
    with Agent("one", single) as one, Agent("other", single) as other:
        one.add_peer(other.card())
        other.add_peer(one.card())
        mine, theirs = one.allocate(64 * BLOCK, block_bytes=BLOCK), other.allocate(64 * BLOCK, block_bytes=BLOCK)
        posted = [
            agent.read(local.blocks([number]), remote.blocks([32 + number])).post()
            for number in range(32)
            for agent, local, remote in ((one, mine, theirs), (other, theirs, mine))
        ]
        for future in posted:
            assert future.result(BOUND_S).num_bytes == BLOCK


def test_more_transfers_than_allowed_are_refused_at_once() -> None:
    few = AgentOptions(key=KEY, backends=("tcp",), movers=1, max_posted=2)
    with Agent("here", few) as here, Agent("there", options("tcp")) as there, data_relay(there) as (card, relay):
        here.add_peer(card)
        local, remote = here.allocate(BLOCK, block_bytes=BLOCK), there.allocate(BLOCK, block_bytes=BLOCK)
        here.read(local.blocks([0]), remote.blocks([0])).run()
        relay.fail("freeze")
        stuck = [here.read(local.blocks([0]), remote.blocks([0]), timeout_s=1.0) for _ in range(3)]
        posted = [transfer.post() for transfer in stuck[:2]]
        with pytest.raises(Overloaded):
            stuck[2].post()
        assert stuck[2].check() == "idle"
        for future in posted:
            with pytest.raises(TransferError):
                future.result(BOUND_S)
