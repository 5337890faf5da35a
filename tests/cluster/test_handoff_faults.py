"""Hand-offs that go wrong: the request is answered all the same, with the same tokens, and no block stays behind.

Between mockers, with real planes and real transfer. What needs processes that die or stop is in `bench/handoff_faults`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from handoff_bench import Member, Workers, prompt_of, request, workers

from data_relay import Fault, data_relay
from headwater.config.schema import EngineConfig
from headwater.engines.core import EngineCore
from headwater.engines.mocker.engine import MockerEngine
from headwater.handoff import decode as decode_side
from headwater.handoff import patience as patience_module
from headwater.handoff import prefill as prefill_side
from headwater.handoff.mover import AgentMover
from headwater.handoff.patience import Patience
from headwater.protocol.frames import SetRole
from headwater.protocol.request import RemotePrefill
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.transfer.backends.shm import SharedLink
from headwater.transfer.options import AgentOptions
from headwater.transfer.outcome import Stop

PROMPT = prompt_of(400)
MOVE = SharedLink.move


class Pair:
    """A prefill worker that takes its time (2 ms a token, 64 tokens a step), and a decode worker."""

    def __init__(self, cluster: Workers, expected: list[int]) -> None:
        self.cluster = cluster
        self.expected = expected
        self.prefill, self.decode = cluster["p"], cluster["d"]
        self.where = cluster.prefill_at("p")

    async def begin(self, stream: int = 1, where: RemotePrefill | None = None) -> None:
        """A hand-off of which some has arrived."""
        self.decode.send(request(stream, PROMPT, prefill=where or self.where))
        moved = self.decode.counts.blocks_moved
        await eventually(lambda: self.decode.counts.blocks_moved > moved, "something has arrived")

    async def ends(self, stream: int = 1) -> None:
        """With the right tokens, and without leaving anything."""
        await eventually(lambda: stream in self.decode.reasons, "it ends", 30)
        assert self.decode.tokens[stream] == self.expected
        assert not self.decode.errors

    async def fell_back(self, *, kept: bool = True) -> None:
        await self.ends()
        await eventually(lambda: self.decode.counts.fell_back == 1, "it is counted")
        assert self.decode.counts.done == 0
        assert (self.decode.counts.blocks_moved > 0) == kept
        await self.decode.all_free()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    vocab = {"<s>": 0, **{f"Ġ{'abcdefghij'[number % 10] * (2 + number // 10)}": number for number in range(1, 200)}}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    return EngineConfig(
        engine="mocker", tokenizer=str(path), num_kv_blocks=200, max_num_seqs=8, max_num_batched_tokens=72
    )


def configured(config: EngineConfig, **options: object) -> EngineConfig:
    fields = {name: getattr(config, name) for name in config.__struct_fields__}
    return EngineConfig(**(fields | options))


def mocker(config: EngineConfig, **options: object) -> MockerEngine:
    return MockerEngine(configured(config, **options))


@asynccontextmanager
async def pair(
    config: EngineConfig,
    *,
    checksums: bool = False,
    adaptive: bool = False,
    transfer: AgentOptions | None = None,
    **prefill: object,
) -> AsyncIterator[Pair]:
    slow = {"mocker_prefill_ms_per_token": 2.0} | prefill
    fast = mocker(config, mocker_speedup=0.0)
    async with workers({"alone": fast}) as cluster:
        (expected,) = await cluster["alone"].run(request(1, PROMPT))
    engines = {"p": mocker(config, **slow), "d": mocker(config, mocker_speedup=20.0)}
    async with workers(engines, checksums=checksums, adaptive=adaptive, transfer=transfer) as cluster:
        yield Pair(cluster, expected)


def test_a_prefill_worker_that_dies(config: EngineConfig) -> None:
    async def check() -> None:
        async with pair(config) as it:
            await it.begin()
            await it.prefill.shell._listener.close()
            await it.fell_back()

    run_leak_checked(check())


def test_a_prefill_worker_that_was_never_there(config: EngineConfig) -> None:
    async def check() -> None:
        async with pair(config) as it:
            it.decode.send(request(1, PROMPT, prefill=RemotePrefill("ghost", "inproc://nobody")))
            await it.fell_back(kept=False)

    run_leak_checked(check())


def test_a_prefill_worker_that_stalls_or_is_slow(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(patience: Patience, delay_ms: float, kept: bool) -> None:
        monkeypatch.setattr(decode_side, "patience", lambda *_: patience)
        async with pair(config, mocker_prefill_ms_per_token=delay_ms) as it:
            it.decode.send(request(1, PROMPT, prefill=it.where))
            await it.fell_back(kept=kept)
            await it.prefill.all_free()

    run_leak_checked(check(Patience(0.5, 0.4), 2.0, kept=True))
    run_leak_checked(check(Patience(30.0, 0.4), 10.0, kept=False))


BURST = [prompt_of(64, salt) for salt in range(32)]
IN_LINE = {"num_kv_blocks": 400, "max_num_seqs": 40}


async def burst(it: Pair, where: RemotePrefill) -> None:
    """All prompts at once, to a prefill worker of which nobody knew that it has a line."""
    for stream, prompt in enumerate(BURST):
        it.decode.send(request(stream, prompt, 2, prefill=where))
    await eventually(lambda: len(it.decode.reasons) == len(BURST), "all end", 30)
    assert not it.decode.errors


def test_a_line_at_the_prefill_worker_is_not_taken_for_silence(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_side, "patience", lambda *_: Patience(0.6, 0.4, longest_s=30.0))

    async def check() -> None:
        async with pair(configured(config, **IN_LINE), mocker_prefill_ms_per_token=1.0) as it:
            await burst(it, it.where)
            await eventually(lambda: it.decode.counts.done == len(BURST), "all were handed over")
            assert it.decode.counts.fell_back == 0
            await it.decode.all_free()
            await it.prefill.all_free()

    run_leak_checked(check())


def test_a_line_is_left_where_computing_here_is_cheaper_by_far(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as that does not only move the line here."""
    monkeypatch.setattr(decode_side, "patience", lambda *_: Patience(0.6, 0.4, longest_s=30.0))
    monkeypatch.setattr(patience_module, "_FLOOR_S", 0.3)

    async def check() -> None:
        async with pair(configured(config, **IN_LINE), mocker_prefill_ms_per_token=1.0) as it:
            await it.prefill.run(request(99, prompt_of(64, 99), 2))
            await burst(it, RemotePrefill(it.where.worker_id, it.where.address, here_ms=150.0))
            await eventually(
                lambda: it.decode.counts.done + it.decode.counts.fell_back == len(BURST), "all are counted"
            )
            assert 1 <= it.decode.counts.fell_back <= len(BURST) // 2
            await it.decode.all_free()

    run_leak_checked(check())


def test_a_prefill_worker_that_hangs_with_a_line_is_given_up(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop lives: only its engine knows that nothing goes on."""
    monkeypatch.setattr(decode_side, "patience", lambda *_: Patience(3.0, 1.5, longest_s=600.0))

    async def check() -> None:
        async with pair(configured(config, **IN_LINE), mocker_prefill_ms_per_token=10.0) as it:
            for stream, prompt in enumerate(BURST):
                it.decode.send(request(stream, prompt, 2, prefill=it.where))
            await eventually(lambda: it.decode.counts.blocks_moved > 0, "it goes on")
            with monkeypatch.context() as hanging:
                hanging.setattr(EngineCore, "plan_step", hung(it.prefill, EngineCore.plan_step))
                await eventually(lambda: len(it.decode.reasons) == len(BURST), "all end", 60)
            assert not it.decode.errors
            assert it.decode.counts.fell_back > len(BURST) // 2
            await it.decode.all_free()

    run_leak_checked(check())


def hung(member: Member, plan_step: Callable[[EngineCore], bool]) -> Callable[[EngineCore], bool]:
    stuck = member.engine._loop._core  # type: ignore[attr-defined]
    return lambda core: False if core is stuck else plan_step(core)


def test_a_prefill_worker_that_refuses(config: EngineConfig) -> None:
    async def check() -> None:
        async with pair(config, block_size=32) as it:
            it.decode.send(request(1, PROMPT, prefill=it.where))
            await it.fell_back(kept=False)
        async with pair(config) as it:
            it.prefill.shell.stop()
            it.decode.send(request(1, PROMPT, prefill=it.where))
            await it.fell_back(kept=False)

    run_leak_checked(check())


def test_a_prefill_worker_without_room(config: EngineConfig) -> None:
    """It preempts what it prefills for others, which is told at once."""

    async def check() -> None:
        async with pair(config, num_kv_blocks=30, mocker_prefill_ms_per_token=0.5) as it:
            own = [request(10 + n, prompt_of(20, n), 150) for n in range(3)]
            it.prefill.send(*own)
            it.decode.send(request(1, PROMPT, prefill=it.where))
            await it.ends()
            await it.decode.all_free()
            await eventually(lambda: len(it.prefill.reasons) == 3, "its own end", 30)
            assert not it.prefill.errors
            await it.prefill.all_free()

    run_leak_checked(check())


def test_damaged_blocks_are_noticed_and_computed_anew(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaging(self: SharedLink, step: object, stop: Stop) -> None:
        MOVE(self, step, stop)  # type: ignore[arg-type]
        target, _, pairs = step.small  # type: ignore[attr-defined]
        target[pairs[0][0].start] ^= 1

    monkeypatch.setattr(SharedLink, "move", damaging)

    async def check(checksums: bool) -> None:
        async with pair(config, checksums=checksums) as it:
            if checksums:
                it.decode.send(request(1, PROMPT, prefill=it.where))
                await it.fell_back(kept=False)
            else:
                (tokens,) = await it.decode.run(request(1, PROMPT, prefill=it.where))
                assert tokens != it.expected

    run_leak_checked(check(True))
    run_leak_checked(check(False))


@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_a_data_link_that_breaks_in_mid_transfer(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """The workers go on hearing of each other; only blocks do not come any more."""
    over_tcp = AgentOptions(backends=("tcp",), heartbeat_s=0.2, peer_timeout_s=0.8)
    card_of = AgentMover.card

    async def check() -> None:
        with data_relay() as (_, relay):
            monkeypatch.setattr(AgentMover, "card", lambda mover: relay.card(card_of(mover)))
            async with pair(config, transfer=over_tcp) as it:
                await it.begin()
                await asyncio.to_thread(relay.fail, fault)
                if fault == "freeze":
                    await it.fell_back()
                else:  # unless a read was under way just then, the next one makes new connections
                    await it.ends()
                    await it.decode.all_free()
                await it.prefill.all_free()

    run_leak_checked(check())


@pytest.mark.parametrize("stage", ["queued", "arriving"])
def test_a_client_that_leaves_stops_both_workers(config: EngineConfig, stage: str) -> None:
    async def check() -> None:
        async with pair(config, max_num_seqs=1) as it:
            if stage == "queued":
                it.prefill.send(request(5, prompt_of(100, 3), 2000))
                await eventually(lambda: bool(it.prefill.tokens), "the prefill worker is busy")
                it.decode.send(request(1, PROMPT, prefill=it.where))
                await eventually(lambda: it.prefill.load is not None and it.prefill.load.num_waiting == 1, "it waits")
            else:
                await it.begin()
            it.decode.abort(1)
            await it.decode.all_free()
            if stage == "queued":
                it.prefill.abort(5)
            await it.prefill.all_free()
            assert 1 not in it.decode.tokens

    run_leak_checked(check())


def test_a_decode_worker_that_vanishes_leaves_no_blocks_behind(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_side, "GONE_S", 0.3)

    async def check() -> None:
        async with pair(config) as it:
            await it.begin()
            peers = it.decode.shell._handoffs._decode._peers._peers  # type: ignore[union-attr]
            (peer,) = peers.values()
            await peer._link.close()
            await it.prefill.all_free()
            it.decode.abort(1)
            await it.decode.all_free()

    run_leak_checked(check())


def test_a_worker_that_was_asleep_does_not_believe_what_it_read(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_side, "_ASLEEP_S", 0.0)

    async def check() -> None:
        async with pair(config) as it:
            it.decode.send(request(1, PROMPT, prefill=it.where))
            await it.fell_back(kept=False)

    run_leak_checked(check())


def test_room_is_never_waited_for_in_a_circle(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that decode and prefill for each other, with room for hardly one prompt each."""
    monkeypatch.setattr(decode_side, "patience", lambda *_: Patience(0.6, 0.6))

    async def check() -> None:
        engines = {name: mocker(config, num_kv_blocks=30, mocker_speedup=20.0) for name in ("a", "b")}
        async with workers(engines) as cluster:
            jobs: list[Sequence[int]] = [prompt_of(350, letter) for letter in range(4)]
            running: list[tuple[Member, int]] = []
            for stream, prompt in enumerate(jobs):
                for here, there in (("a", "b"), ("b", "a")):
                    cluster[here].send(request(stream, prompt, 8, prefill=cluster.prefill_at(there)))
                    running.append((cluster[here], stream))
            await eventually(lambda: all(stream in member.reasons for member, stream in running), "all end", 30)
            assert {reason for member, stream in running for reason in [member.reasons[stream]]} == {"length"}
            for stream in range(4):
                assert cluster["a"].tokens[stream] == cluster["b"].tokens[stream]
            for member in cluster.members.values():
                await member.all_free()

    run_leak_checked(check())


@pytest.mark.parametrize("adaptive", [True, False])
def test_roles_change_while_workers_run(config: EngineConfig, adaptive: bool) -> None:
    """If they may, and what runs goes on."""

    async def check() -> None:
        async with pair(config, adaptive=adaptive) as it:
            roles = it.cluster.store.feed.instances
            assert (roles["p"].role, roles["p"].adaptive) == ("both", adaptive)
            await it.begin()
            assert it.prefill.link is not None
            for role in ("decode", "prefill"):
                it.prefill.link.send(SetRole(role))
            if adaptive:
                await eventually(lambda: roles["p"].role == "prefill", "the registry knows")
            await it.ends()
            await eventually(lambda: it.decode.counts.done == 1, "it was handed over")
            assert roles["p"].role == ("prefill" if adaptive else "both")

    run_leak_checked(check())
