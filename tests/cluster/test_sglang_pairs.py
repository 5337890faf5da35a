"""SGLang's own hand-off behind our router: a request at two servers at once, and what becomes of it when one fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from frontend_rig import Rig, Sink, rig
from scripted_worker import until

from headwater.engines.attached.engine import AttachedEngine
from headwater.engines.suite import SIZES
from headwater.errors import NoWorkers
from headwater.frontend.moves import MoveLimits
from headwater.protocol.request import EngineRequest, SamplingParams
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.wire import Limits
from headwater.worker.shell import ShellConfig, WorkerShell
from sglang_double import GenerateBody, SglangDouble
from sglang_pair_double import PairedDouble
from word_tokenizer import write_word_tokenizer

PROMPT = b"".join(number.to_bytes(4, "little") for number in range(20, 90))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_word_tokenizer(tmp_path)


class Pairs:
    """A frontend, two servers that prefill, one that decodes, and a worker attached to each."""

    def __init__(self, running: Rig, tokenizer: Path) -> None:
        self.rig = running
        self.config = msgspec.structs.replace(SIZES, tokenizer=str(tokenizer), mocker_decode_base_ms=3.0)
        self.doubles = {name: PairedDouble(self.config, mode) for name, mode in MODES.items()}
        self._running: list[tuple[WorkerShell, asyncio.Task[None]]] = []

    @property
    def decode(self) -> PairedDouble:
        return self.doubles["d"]

    @property
    def prefills(self) -> list[PairedDouble]:
        return [self.doubles["p1"], self.doubles["p2"]]

    async def attach(self, name: str) -> None:
        double = self.doubles[name]
        await double.start()
        config = msgspec.structs.replace(self.config, attach=(double.url,), served_model_name=("m",))
        about = ShellConfig(name, "attached", "m", drain_timeout_s=1)
        shell = WorkerShell(AttachedEngine(config), self.rig.registry, self.rig.planes, about)
        self._running.append((shell, asyncio.create_task(shell.run(lambda _: None))))

    async def close(self) -> None:
        for shell, _ in self._running:
            shell.stop()
            shell.stop()
        await asyncio.gather(*[task for _, task in self._running])
        for double in self.doubles.values():
            if double.port:
                await double.close()

    async def there(self, *names: str) -> None:
        view, models = self.rig.view, self.rig.models
        await until(lambda: len([w for w in view.workers if w.usable]) == len(names), 10)
        await until(lambda: models.ready or "d" not in names, 10)

    def submit(self, n: int = 1, max_tokens: int = 20) -> tuple[list[int], list[Sink]]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        requests = [EngineRequest(0, "r1", "m", PROMPT, sampling) for _ in range(n)]
        sinks = [Sink() for _ in range(n)]
        return self.rig.dispatcher.submit(self.rig.models.get("m").card, requests, sinks), sinks


MODES = {"p1": "prefill", "p2": "prefill", "d": "decode"}


@contextlib.asynccontextmanager
async def pairs(tokenizer: Path, *names: str) -> AsyncIterator[Pairs]:
    planes = InprocPlanes(Limits(heartbeat_s=0.1, silence_s=1.0))
    async with rig(planes, moves=MoveLimits(max_wait_s=1.0)) as running:
        members = Pairs(running, tokenizer)
        try:
            for name in names:
                await members.attach(name)
            await members.there(*names)
            yield members
        finally:
            await members.close()
    await planes.close()


async def whole(tokenizer: Path) -> list[int]:
    """What one server that does both says."""
    double = SglangDouble(msgspec.structs.replace(SIZES, tokenizer=str(tokenizer)))
    await double.start()
    body = {"input_ids": list(range(20, 90)), "sampling_params": {"max_new_tokens": 20, "temperature": 0.0}}
    chunks = [chunk async for chunk in double.generate(msgspec.convert(body | {"rid": "whole"}, GenerateBody))]
    await double.close()
    return list(chunks[-1]["output_ids"])


def test_both_servers_get_a_request_at_once_and_the_roles_are_the_servers_own(tokenizer: Path) -> None:
    async def scenario() -> None:
        async with pairs(tokenizer, "p1", "d") as members:
            roles = {w.worker_id: (w.instance.role, w.instance.paired) for w in members.rig.view.workers}
            assert roles == {"p1": ("prefill", True), "d": ("decode", True)}
            _, (sink,) = members.submit()
            await until(lambda: sink.finished is not None, 10)
            assert sink.error is None
            assert sink.token_ids == await whole(tokenizer)
            (there,), (here,) = members.prefills[0].raw, members.decode.raw
            differing = {name for name in there if there[name] != here[name]}
            assert differing == {"rid"}
            assert (there["bootstrap_host"], there["bootstrap_port"]) == (
                "127.0.0.1",
                members.prefills[0]._bootstrap_port,
            )
            assert 0 <= there["bootstrap_room"] < 2**63
            assert members.prefills[0].fetched == [there["bootstrap_room"]]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_several_choices_are_several_requests_with_rooms_of_their_own(tokenizer: Path) -> None:
    async def scenario() -> None:
        async with pairs(tokenizer, "p1", "d") as members:
            _, sinks = members.submit(n=3)
            await until(lambda: all(sink.finished for sink in sinks), 10)
            assert len({tuple(sink.token_ids) for sink in sinks}) == 1
            rooms = [body["bootstrap_room"] for body in members.decode.raw]
            assert len(set(rooms)) == 3
            assert sorted(rooms) == sorted(members.prefills[0].fetched)
            assert all(body["sampling_params"].get("n", 1) == 1 for body in members.decode.raw)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def rooms_of(double: PairedDouble, rids: list[str]) -> list[int]:
    return [body["bootstrap_room"] for body in double.raw if body["rid"] in rids]


def test_of_two_choices_the_one_that_is_cancelled_takes_only_its_own_room_along(tokenizer: Path) -> None:
    async def scenario() -> None:
        async with pairs(tokenizer, "p1", "d") as members:
            prefill, decode = members.prefills[0], members.decode
            prefill.gate.clear()
            streams, (first, second) = members.submit(n=2)
            await until(lambda: prefill.num_open == 2 and len(decode.raw) == 2, 10)
            members.rig.dispatcher.abort(streams[1:])
            await until(lambda: bool(prefill.aborted) and bool(decode.aborted), 10)
            prefill.gate.set()
            await until(lambda: first.finished is not None, 10)
            assert (first.error, first.token_ids) == (None, await whole(tokenizer))
            assert (second.finished, second.token_ids) == (None, [])
            given_up = rooms_of(decode, decode.aborted)
            assert len(given_up) == 1
            assert rooms_of(prefill, prefill.aborted) == given_up
            assert set(prefill.fetched) == {body["bootstrap_room"] for body in decode.raw} - set(given_up)
            await until(lambda: prefill.num_open == decode.num_open == 0, 10)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_of_two_choices_one_ends_early_and_the_other_one_goes_on(tokenizer: Path) -> None:
    """As with a stop string, which the frontend finds."""

    async def scenario() -> None:
        async with pairs(tokenizer, "p1", "d") as members:
            prefill, decode = members.prefills[0], members.decode
            streams, (first, second) = members.submit(n=2, max_tokens=100)
            await until(lambda: bool(second.token_ids), 10)
            members.rig.dispatcher.abort(streams[1:])
            await until(lambda: first.finished is not None, 10)
            assert (first.error, len(first.token_ids)) == (None, 100)
            assert first.token_ids[:20] == await whole(tokenizer)
            assert len(second.token_ids) < 100
            assert sorted(prefill.fetched) == sorted(body["bootstrap_room"] for body in decode.raw)
            assert len(rooms_of(decode, decode.aborted)) == 1
            await until(lambda: prefill.num_open == decode.num_open == 0, 10)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_prefill_server_that_dies_costs_time_and_no_request(tokenizer: Path) -> None:
    async def scenario() -> None:
        async with pairs(tokenizer, "p1", "p2", "d") as members:
            for double in members.prefills:
                double.gate.clear()
            _, (sink,) = members.submit()
            await until(lambda: any(double.raw for double in members.prefills), 10)
            (asked,) = [double for double in members.prefills if double.raw]
            (other,) = [double for double in members.prefills if double is not asked]
            other.gate.set()
            await asked.stop()
            await until(lambda: sink.finished is not None or sink.error is not None, 20)
            assert sink.error is None
            assert sink.token_ids == await whole(tokenizer)
            assert len(other.raw) == 1
            assert other.raw[0]["bootstrap_room"] != asked.raw[0]["bootstrap_room"]
            await asked.start()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_prefill_worker_that_leaves_at_once_costs_time_and_no_request(tokenizer: Path) -> None:
    async def scenario() -> None:
        async with pairs(tokenizer, "p1", "p2", "d") as members:
            for double in members.prefills:
                double.gate.clear()
            _, (sink,) = members.submit()
            await until(lambda: any(double.raw for double in members.prefills), 10)
            (number,) = [number for number, double in enumerate(members.prefills) if double.raw]
            members.prefills[1 - number].gate.set()
            shell, _ = members._running[number]
            shell.stop()
            shell.stop()
            await until(lambda: sink.finished is not None or sink.error is not None, 20)
            assert sink.error is None
            assert sink.token_ids == await whole(tokenizer)
            await until(lambda: members.prefills[number].num_open == 0 or bool(members.prefills[number].aborted), 10)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_without_a_worker_that_prefills_nothing_is_begun(tokenizer: Path) -> None:
    async def scenario() -> None:
        async with pairs(tokenizer, "d") as members:
            with pytest.raises(NoWorkers, match="computes no prompts"):
                members.submit()
            assert members.decode.raw == []
            assert members.rig.dispatcher.num_streams == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_prefill_server_alone_gets_no_requests(tokenizer: Path) -> None:
    async def scenario() -> None:
        async with pairs(tokenizer, "p1") as members:
            with pytest.raises(NoWorkers):
                members.submit()
            assert members.prefills[0].raw == []

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_client_that_leaves_frees_both_servers(tokenizer: Path) -> None:
    async def scenario() -> None:
        async with pairs(tokenizer, "p1", "d") as members:
            members.prefills[0].gate.clear()
            streams, _ = members.submit()
            await until(lambda: members.prefills[0].num_open == 1 and bool(members.decode.raw), 10)
            members.rig.dispatcher.abort(streams)
            await until(lambda: bool(members.prefills[0].aborted) and bool(members.decode.aborted), 10)
            members.prefills[0].gate.set()
            await until(lambda: members.prefills[0].num_open == 0 and members.decode.num_open == 0, 10)

    asyncio.run(asyncio.wait_for(scenario(), 60))
