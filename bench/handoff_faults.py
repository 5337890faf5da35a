"""The fault table of hand-offs: each fault so many times, in the middle of a transfer, between worker processes.

    python bench/handoff_faults.py --repeats 20

Mockers at real-time pace (0.5 ms per token, chunks of 256 tokens) with real planes and real transfer. A request counts
as lost unless it ends with the tokens that an undisturbed worker gives; blocks count as leaked unless all are free on
every worker that lives, some seconds later. `delay` is what the request took beyond the median of an undisturbed local
prefill. A decode worker that dies takes its streams with it: the client asks another one, as frontends do.
"""

import argparse
import asyncio
import signal
import statistics
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import uvloop
from handoff_workers import Bench, Worker, bench, prompt_of, request
from plane_proxy import PlaneProxy

from headwater.config.schema import EngineConfig
from headwater.engines.mocker.engine import MockerEngine
from headwater.handoff.mover import AgentMover
from headwater.protocol.request import RemotePrefill
from headwater.runtime.conformance import eventually
from headwater.transfer.backends.shm import SharedLink
from headwater.transfer.options import AgentOptions
from headwater.transfer.outcome import Stop
from headwater.types import Role
from headwater.worker.shell import ShellConfig, WorkerShell

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from data_relay import Fault, data_relay

PROMPT = 2048
ANSWER = 8
BURST, BURST_PROMPT = 32, 256
PREFILL_MS = 0.5
EXPECTED_MS = 1.2 * PROMPT * PREFILL_MS
FLAGS = (
    *("--engine", "mocker", "--num-kv-blocks", "1024", "--max-num-batched-tokens", "256"),
    *("--mocker-prefill-ms-per-token", str(PREFILL_MS), "--no-transfer-checksums"),
)
SLOW = ("--mocker-prefill-ms-per-token", str(10 * PREFILL_MS))
FREE_S = 20.0


@dataclass
class Row:
    """One fault's outcome."""

    name: str
    repeats: int = 0
    lost: int = 0
    leaked: int = 0
    fell_back: int = 0
    took_s: list[float] = field(default_factory=list[float])
    held_s: list[float] = field(default_factory=list[float])


@dataclass
class Scene:
    """The workers of one fault."""

    here: Bench
    prefill: Worker
    decode: Worker
    row: Row
    expected: dict[int, list[int]]
    streams: int = 0

    async def ask(self, decode: Worker, where: RemotePrefill | None, meddle: Awaitable[object] | None = None) -> None:
        """One request, with something done to it on the way."""
        self.streams += 1
        stream = self.streams
        running = asyncio.ensure_future(decode.run(request(stream, self.prompt(), ANSWER, where)))
        if meddle is not None:
            await meddle
        _, took_s = await running
        self.note(decode, stream, took_s)

    def prompt(self) -> list[int]:
        return prompt_of(PROMPT, self.row.repeats + 1, 40_000)

    def note(self, decode: Worker, stream: int, took_s: float) -> None:
        row = self.row
        row.lost += decode.tokens.get(stream) != self.expected[row.repeats] or decode.ended.get(stream) != "length"
        row.took_s.append(took_s)

    async def finish(self) -> None:
        """Between two repeats."""
        begun = time.monotonic()
        for worker in self.here.workers:
            self.row.leaked += not await worker.free(FREE_S)
        self.row.held_s.append(time.monotonic() - begun)
        self.row.repeats += 1


SceneFault = Callable[[Scene], Awaitable[None]]
MIDDLE_S = 0.45
LINK_SILENCE_S = 5.0
"""After which a client gives its worker up."""


async def killed(scene: Scene) -> None:
    async def kill() -> None:
        await asyncio.sleep(MIDDLE_S)
        assert scene.prefill.process is not None
        scene.prefill.process.kill()

    await scene.ask(scene.decode, scene.prefill.remote(EXPECTED_MS), kill())
    await scene.here.stop(scene.prefill)
    scene.prefill = await scene.here.start("prefill")


async def stopped(scene: Scene) -> None:
    """Half-open as well: its sockets stay, and say nothing."""
    process = scene.prefill.process
    assert process is not None

    async def stop() -> None:
        await asyncio.sleep(MIDDLE_S)
        process.send_signal(signal.SIGSTOP)

    await scene.ask(scene.decode, scene.prefill.remote(EXPECTED_MS), stop())
    process.send_signal(signal.SIGCONT)
    await scene.here.stop(scene.prefill)
    scene.prefill = await scene.here.start("prefill")


async def slow(scene: Scene) -> None:
    """See `SLOW`."""
    await scene.ask(scene.decode, scene.prefill.remote(EXPECTED_MS))


async def link_cut(scene: Scene) -> None:
    proxy = PlaneProxy(scene.prefill.instance.request_address)
    await proxy.start()

    async def cut() -> None:
        await asyncio.sleep(MIDDLE_S)
        proxy.cut()

    await scene.ask(scene.decode, scene.prefill.remote(EXPECTED_MS, proxy.address), cut())
    await proxy.close()


async def half_open(scene: Scene) -> None:
    proxy = PlaneProxy(scene.prefill.instance.request_address)
    await proxy.start()

    async def freeze() -> None:
        await asyncio.sleep(MIDDLE_S)
        proxy.frozen = True

    await scene.ask(scene.decode, scene.prefill.remote(EXPECTED_MS, proxy.address), freeze())
    await proxy.close()


async def decode_killed(scene: Scene) -> None:
    process = scene.decode.process
    assert process is not None
    scene.streams += 1
    begun = time.monotonic()
    running = asyncio.ensure_future(
        scene.decode.run(request(scene.streams, scene.prompt(), ANSWER, scene.prefill.remote(EXPECTED_MS)))
    )
    await asyncio.sleep(MIDDLE_S)
    process.kill()
    await running
    await scene.here.stop(scene.decode)
    scene.decode = await scene.here.start("decode")
    started_s = time.monotonic() - begun - MIDDLE_S
    await scene.ask(scene.decode, scene.prefill.remote(EXPECTED_MS))
    scene.row.took_s[-1] += time.monotonic() - begun - started_s - scene.row.took_s[-1]


async def decode_asleep(scene: Scene) -> None:
    """For so long that it cannot know any more whether blocks were kept for it, but nobody has given it up yet."""
    process = scene.decode.process
    assert process is not None

    async def sleep() -> None:
        await asyncio.sleep(MIDDLE_S)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(3.0)
        process.send_signal(signal.SIGCONT)

    await scene.ask(scene.decode, scene.prefill.remote(EXPECTED_MS), sleep())


async def decode_stopped(scene: Scene) -> None:
    """Beyond the lease: its blocks at the prefill worker are freed meanwhile, and its client asks another worker."""
    process = scene.decode.process
    assert process is not None
    begun = time.monotonic()
    scene.streams += 1
    first = request(scene.streams, scene.prompt(), ANSWER, scene.prefill.remote(EXPECTED_MS))
    running = asyncio.ensure_future(scene.decode.run(first))
    await asyncio.sleep(MIDDLE_S)
    process.send_signal(signal.SIGSTOP)
    await running
    other = await scene.here.start("decode")
    started_s = time.monotonic() - begun
    await scene.ask(other, scene.prefill.remote(EXPECTED_MS))
    scene.row.took_s[-1] += MIDDLE_S + LINK_SILENCE_S
    scene.row.leaked += not await scene.prefill.free(FREE_S)
    scene.row.held_s.append(time.monotonic() - begun - started_s)
    process.send_signal(signal.SIGCONT)
    await scene.here.reconnect(scene.decode)
    scene.row.leaked += not await scene.decode.free(FREE_S)
    await scene.here.stop(other)


async def client_left(scene: Scene) -> None:
    scene.streams += 1
    stream = scene.streams
    running = asyncio.ensure_future(
        scene.decode.run(request(stream, scene.prompt(), ANSWER, scene.prefill.remote(EXPECTED_MS)))
    )
    await asyncio.sleep(MIDDLE_S)
    scene.decode.abort(stream)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await scene.ask(scene.decode, scene.prefill.remote(EXPECTED_MS))


async def burst(scene: Scene) -> None:
    """No fault: more than was expected, at once. The delay is that of all beyond the same prompts prefilled here."""
    prompts = [prompt_of(BURST_PROMPT, 1 + scene.row.repeats * BURST + number, 40_000) for number in range(BURST)]
    given: list[dict[int, list[int]]] = []
    took_s: list[float] = []
    for where in (scene.prefill.remote(1.2 * BURST_PROMPT * PREFILL_MS), None):
        begun, first = time.monotonic(), scene.streams + 1
        scene.streams += BURST
        await asyncio.gather(
            *[scene.decode.run(request(first + n, prompt, ANSWER, where)) for n, prompt in enumerate(prompts)]
        )
        took_s.append(time.monotonic() - begun)
        given.append({n: scene.decode.tokens.get(first + n, []) for n in range(BURST)})
    scene.row.lost += sum(given[0][n] != given[1][n] or len(given[0][n]) != ANSWER for n in range(BURST))
    scene.row.took_s.append(took_s[0] - took_s[1])


async def undisturbed(scene: Scene) -> None:
    await scene.ask(scene.decode, scene.prefill.remote(EXPECTED_MS))


async def local(scene: Scene) -> None:
    await scene.ask(scene.decode, None)


OUTSIDE: dict[str, SceneFault] = {
    "prefilled here, no fault": local,
    "handed off, no fault": undisturbed,
    "prefill worker killed": killed,
    "prefill worker stopped (SIGSTOP)": stopped,
    "prefill worker 10 x slower than said": slow,
    "link cut": link_cut,
    "link half-open": half_open,
    "decode worker killed": decode_killed,
    "decode worker asleep for 3 s": decode_asleep,
    "decode worker stopped beyond the lease": decode_stopped,
    "client leaves in mid-transfer": client_left,
    "32 prompts at once, one was expected": burst,
}


def damaging(move: Callable[[SharedLink, object, Stop], None]) -> Callable[[SharedLink, object, Stop], None]:
    def damaged(self: SharedLink, step: object, stop: Stop) -> None:
        move(self, step, stop)
        target, _, pairs = step.small  # type: ignore[attr-defined]
        for to, _ in pairs[-1:]:
            (value,) = struct.unpack_from("<Q", target, to.start)
            struct.pack_into("<Q", target, to.start, value ^ 1)

    return damaged


async def inside(here: Bench, role: Role, options: AgentOptions) -> tuple[Worker, WorkerShell, asyncio.Task[None]]:
    """A worker in this process, whose memory can be damaged and whose links can be broken."""
    config = EngineConfig(
        engine="mocker",
        num_kv_blocks=1024,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        mocker_prefill_ms_per_token=PREFILL_MS,
    )
    shell = WorkerShell(
        MockerEngine(config),
        here.registry,
        here.planes,
        ShellConfig("inside", "mocker", "m", role, transfer=options),
    )
    task = asyncio.create_task(shell.run(lambda progress: None))
    await eventually(lambda: shell.num_streams == 0 and shell._refusing is None, "it is ready", 30.0)
    instance = next(one for one in await here.registry.instances() if one.worker_id == "inside")
    return await here.connect(instance, None), shell, task


async def expectations(decode: Worker, repeats: int) -> dict[int, list[int]]:
    """The same prompts on a worker by itself."""
    found = {}
    for number in range(repeats):
        stream = 1_000_000 + number
        await decode.run(request(stream, prompt_of(PROMPT, number + 1, 40_000), ANSWER))
        found[number] = decode.tokens[stream]
    return found


async def run(names: list[str], inner: list[str], repeats: int) -> None:
    rows = []
    async with bench(*FLAGS, "--no-enable-prefix-caching") as here:
        lonely = await here.start("both")
        expected = await expectations(lonely, repeats)
        await here.stop(lonely)
        for name in names:
            row = Row(name)
            rows.append(row)
            prefill = await here.start("prefill", *(SLOW if OUTSIDE[name] is slow else ()))
            scene = Scene(here, prefill, await here.start("decode"), row, expected)
            await again_and_again(scene, OUTSIDE[name], repeats)
            for worker in list(here.workers):
                await here.stop(worker)
            show(row, rows[0])
        print(f"| (undisturbed, median: {statistics.median(rows[0].took_s):.3f} s)")
        for fault in inner:
            row = Row(fault)
            await INSIDE[fault](here, row, expected, repeats)
            show(row, rows[0])


async def corrupted(here: Bench, row: Row, expected: dict[int, list[int]], repeats: int) -> None:
    prefill = await here.start("prefill")
    decode, shell, task = await inside(here, "decode", AgentOptions(host=None, checksums=True))
    scene = Scene(here, prefill, decode, row, expected)
    with mock.patch.object(SharedLink, "move", damaging(SharedLink.move)):
        await again_and_again(scene, undisturbed, repeats)
    await leave(here, decode, shell, task)
    await here.stop(prefill)


async def data_link(fault: Fault, here: Bench, row: Row, expected: dict[int, list[int]], repeats: int) -> None:
    """Blocks go over TCP through a relay, which breaks after half of them; the workers hear of each other all along."""
    decode = await here.start("decode", "--transfer-backends", "tcp")
    prefill, shell, task = await inside(here, "prefill", AgentOptions(backends=("tcp",)))
    scene = Scene(here, prefill, decode, row, expected)
    card_of = AgentMover.card
    with data_relay() as (_, relay), mock.patch.object(AgentMover, "card", lambda mover: relay.card(card_of(mover))):
        await undisturbed(scene)
        row.took_s.clear()
        moved, relay.passed_bytes = relay.passed_bytes, 0

        async def broken(scene: Scene) -> None:
            relay.fail(fault, moved // 2)
            await undisturbed(scene)
            await asyncio.to_thread(relay.heal)

        await again_and_again(scene, broken, repeats)
    await leave(here, prefill, shell, task)
    await here.stop(decode)


async def again_and_again(scene: Scene, fault: SceneFault, repeats: int) -> None:
    for _ in range(repeats):
        await fault(scene)
        await scene.finish()
    await asyncio.sleep(0.2)
    scene.row.fell_back = scene.decode.counts.fell_back


async def leave(here: Bench, worker: Worker, shell: WorkerShell, task: asyncio.Task[None]) -> None:
    """Of a worker in this process."""
    await here.stop(worker)
    shell.stop()
    shell.stop()
    await task


INSIDE: dict[str, Callable[[Bench, Row, dict[int, list[int]], int], Awaitable[None]]] = {
    "a block corrupted on its way": corrupted,
    "data link cut in mid-transfer": partial(data_link, "cut"),
    "data link half-open in mid-transfer": partial(data_link, "freeze"),
}


def show(row: Row, base: Row) -> None:
    took = 0.0 if OUTSIDE.get(row.name) is burst else statistics.median(base.took_s)
    worst, middle = max(row.took_s) - took, statistics.median(row.took_s) - took
    print(
        f"| {row.name:<40} | {row.repeats:>3} | {row.lost:>4} | {row.leaked:>6} | {row.fell_back:>5} "
        f"| {middle:7.2f} | {worst:7.2f} | {max(row.held_s):6.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=[*OUTSIDE, *INSIDE], help="instead of all")
    args = parser.parse_args()
    print("| fault                                    | n   | lost | leaked | local | delay s | worst s | held s |")
    print("|---|---|---|---|---|---|---|---|")
    wanted = args.only or [*OUTSIDE, *INSIDE]
    outer = list(dict.fromkeys([next(iter(OUTSIDE)), *(name for name in wanted if name in OUTSIDE)]))
    uvloop.run(run(outer, [name for name in wanted if name in INSIDE], args.repeats))


if __name__ == "__main__":
    main()
