"""Prefill on one real vLLM, decode on another; run by an interpreter that has vLLM, with bench/ on its path.

    PYTHONPATH=bench VLLM_PYTHON tests/vllm_handoff_life.py MODEL_FOLDER [--vocabulary N] [--sizes P D] [WORDS OF VLLM]

One JSON line per check. `--sizes`: tensor-parallel sizes of the prefill and of the decode worker. Words of vLLM are for
both, such as another KV connector beside ours.
The prefill worker is a process of its own, which is killed at the end. The decode worker is in this process, so that
what it reads can be damaged, with checksums and without.
"""

import argparse
import asyncio
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from array import array
from collections.abc import Awaitable, Callable
from unittest import mock

import psutil
import uvloop
from handoff_workers import Bench, Worker, bench, request

from headwater.config.schema import EngineConfig
from headwater.engines.vllm.engine import VllmEngine
from headwater.handoff.service import Handoffs
from headwater.kv.identity import namespace
from headwater.runtime.conformance import eventually
from headwater.transfer.backends.shm import SharedLink
from headwater.transfer.options import AgentOptions
from headwater.worker.shell import ShellConfig, WorkerShell

STAGING = 64 << 20
ANSWER = 16
START_S = 240.0
FLAGS = ["--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024"]
FLAGS += ["--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--num-kv-blocks", "160", "--threads", "1"]
LENGTHS = (5, 64, 65, 250, 600)
MOVE = SharedLink.move


class Life:
    def __init__(self, here: Bench, vocabulary: int, sizes: tuple[int, int], words: list[str]) -> None:
        self.here = here
        self.words = words
        self.sizes = sizes
        self.vocabulary = vocabulary
        self.streams = 0
        self.prefill: Worker
        self.decode: Worker
        self.shell: WorkerShell
        self.engine: VllmEngine

    async def start(self, model: str) -> None:
        flags = [*FLAGS, "--tensor-parallel-size", str(self.sizes[0]), "--kv-staging", str(STAGING)]
        prefilling = asyncio.create_task(self.here.start("prefill", model, *flags, *self.words))
        config = EngineConfig(
            engine="vllm",
            model=model,
            dtype="float32",
            block_size=32,
            max_model_len=1024,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            num_kv_blocks=160,
            threads=1,
            tensor_parallel_size=self.sizes[1],
            kv_staging=STAGING,
            engine_args=("--enforce-eager", *self.words),
        )
        self.engine = VllmEngine(config)
        options = ShellConfig("inside", "vllm", "m", "decode", transfer=AgentOptions(host=None))
        self.shell = WorkerShell(self.engine, self.here.registry, self.here.planes, options)
        self.running = asyncio.create_task(self.shell.run(lambda progress: None))
        await eventually(lambda: self.shell._refusing is None or self.running.done(), "it is ready", START_S)
        await eventually(lambda: self.shell._record._instance.state == "ready", "it is ready", START_S)
        self.decode = await self.here.connect(self.shell._record._instance, None)
        self.prefill = await prefilling

    def prompt(self, length: int, seed: int) -> list[int]:
        return [3 + (seed * 7919 + at * at * 31 + at * 104_729) % (self.vocabulary - 3) for at in range(length)]

    async def answer(self, prompt: list[int], *, handed: bool, salt: str = "", meanwhile: object = None) -> list[int]:
        self.streams += 1
        stream = self.streams
        where = self.prefill.remote() if handed else None
        one = request(stream, prompt, ANSWER, where)
        card = self.decode.instance.card
        one.namespace = namespace(card.fingerprint, card.kv_layout, salt=salt)
        running = asyncio.create_task(self.decode.run(one))
        if callable(meanwhile):
            await meanwhile()
        await running
        assert self.decode.ended[stream] == "length", self.decode.ended[stream]
        return self.decode.tokens[stream]

    async def alone(self, prompt: list[int]) -> list[int]:
        """What the decode worker says without help, nothing of it cached."""
        return await self.answer(prompt, handed=False, salt=f"alone-{self.streams}")

    async def counts(self) -> tuple[int, int, int]:
        await asyncio.sleep(0.3)
        counts = self.decode.counts
        return counts.done, counts.fell_back, counts.blocks_moved

    def slots_free(self) -> bool:
        staging = self.engine._staging
        return staging.num_free == staging.num_slots


async def check_output_is_that_of_one_worker(life: Life) -> str:
    moved = []
    for seed, length in enumerate(LENGTHS, 1):
        prompt = life.prompt(length, seed)
        before = await life.counts()
        handed = await life.answer(prompt, handed=True)
        after = await life.counts()
        blocks = -(-length // 32) if length > 32 else 0
        assert after[1] == before[1], "fell back"
        assert after[2] - before[2] == blocks, (length, after, before)
        moved.append(after[2] - before[2])
        assert handed == await life.alone(prompt), length
    await eventually(life.slots_free, "all slots are free")
    return f"prompts of {LENGTHS}: blocks moved {moved}"


async def check_only_what_is_missing_moves(life: Life) -> str:
    """The first 320 tokens are in the decode worker's cache, and vLLM's own."""
    prompt = life.prompt(320, 50)
    await life.answer(prompt, handed=False)
    await asyncio.sleep(0.3)
    before = await life.counts()
    longer = prompt + life.prompt(200, 51)
    handed = await life.answer(longer, handed=True)
    moved = (await life.counts())[2] - before[2]
    assert moved == 17 - 10, moved
    assert handed == await life.alone(longer)
    return f"{moved} of 17 blocks moved"


async def check_several_at_once(life: Life) -> str:
    prompts = [life.prompt(length, 60 + length) for length in (100, 333, 200, 64)]
    before = await life.counts()
    handed = await asyncio.gather(*[life.answer(prompt, handed=True) for prompt in prompts])
    after = await life.counts()
    assert after[0] - before[0] == 4, (before, after)
    assert list(handed) == [await life.alone(prompt) for prompt in prompts]
    return "4 of 4 equal"


async def check_damaged_blocks_show(life: Life) -> str:
    """The control: what is moved is what is used."""
    prompt = life.prompt(600, 70)
    with mock.patch.object(SharedLink, "move", damaging):
        handed = await life.answer(prompt, handed=True)
    assert handed != await life.alone(prompt)
    return "other tokens come"


async def check_checksums_find_damage(life: Life) -> str:
    former = life.shell._handoffs
    await former.close()
    life.shell._handoffs = Handoffs(
        life.engine,
        life.engine._info,
        f"inside-{life.streams}",
        life.shell._open_link,
        life.shell._listener.send,
        AgentOptions(host=None, checksums=True),
    )
    prompt = life.prompt(600, 80)
    before = await life.counts()
    with mock.patch.object(SharedLink, "move", damaging):
        handed = await life.answer(prompt, handed=True)
    after = await life.counts()
    assert after[1] == 1, (before, after)
    assert handed == await life.alone(prompt)
    await eventually(life.slots_free, "all slots are free")
    return "computed here, equal"


async def check_an_abort_frees_everything(life: Life) -> str:
    prompt = life.prompt(600, 90)
    life.streams += 1
    stream = life.streams
    running = asyncio.create_task(life.decode.run(request(stream, prompt, ANSWER, life.prefill.remote())))
    await asyncio.sleep(0.1)
    life.decode.abort(stream)
    life.decode.ended[stream] = "aborted"
    await running
    await eventually(life.slots_free, "all slots are free")
    prompt = life.prompt(250, 91)
    assert await life.answer(prompt, handed=True) == await life.alone(prompt)
    return "slots free, the next one is right"


async def check_a_hung_prefill_worker_costs_time_only(life: Life) -> str:
    prompt = life.prompt(600, 100)
    family = psutil.Process(life.prefill.instance.pid)
    members = [family, *family.children(recursive=True)]

    async def hang() -> None:
        for member in members:
            member.suspend()

    began = time.monotonic()
    await hang()
    life.streams += 1
    one = request(life.streams, prompt, ANSWER, life.prefill.remote(expected_ms=500.0))
    await life.decode.run(one)
    took = time.monotonic() - began
    for member in members:
        member.resume()
    assert life.decode.tokens[life.streams] == await life.alone(prompt)
    await eventually(life.slots_free, "all slots are free", 20)
    return f"complete after {took:.1f} s"


async def check_a_killed_prefill_worker_costs_nothing_else(life: Life) -> str:
    prompt = life.prompt(600, 110)
    process = life.prefill.process
    assert process is not None

    async def kill() -> None:
        await eventually(lambda: bool(life.shell._handoffs._decode._open), "the prefill was asked for")
        os.kill(process.pid, signal.SIGKILL)

    before = await life.counts()
    handed = await life.answer(prompt, handed=True, meanwhile=kill)
    after = await life.counts()
    alone = await life.alone(prompt)
    assert handed == alone, (handed, alone, before, after)
    assert after[1] - before[1] == 1, "it was in the middle"
    await eventually(life.slots_free, "all slots are free", 20)
    return f"fell back {after[1] - before[1]} times, {after[2] - before[2]} blocks had arrived, equal"


def damaging(self: SharedLink, step: object, stop: object) -> None:
    MOVE(self, step, stop)
    target, _, pairs = step.small
    for to, _ in pairs:
        target[to] = flipped(bytes(target[to]))
    for address, _, length in step.large:
        damaged = flipped(ctypes.string_at(address, length))
        ctypes.memmove(address, damaged, length)


def flipped(data: bytes) -> bytes:
    """Other signs: what comes is wrong and finite. Blocks with worse in them would damage their next owners too."""
    words = array("I", data)
    return array("I", [word ^ (1 << 31) for word in words]).tobytes()


CHECKS: tuple[Callable[[Life], Awaitable[str]], ...] = (
    check_output_is_that_of_one_worker,
    check_only_what_is_missing_moves,
    check_several_at_once,
    check_damaged_blocks_show,
    check_an_abort_frees_everything,
    check_checksums_find_damage,
    check_a_hung_prefill_worker_costs_time_only,
    check_a_killed_prefill_worker_costs_nothing_else,
)


async def main(model: str, vocabulary: int, sizes: tuple[int, int], words: list[str]) -> None:
    async with bench() as here:
        life = Life(here, vocabulary, sizes, words)
        began = time.monotonic()
        await life.start(model)
        print(f"started in {time.monotonic() - began:.0f} s", file=sys.stderr)
        for check in CHECKS:
            began = time.monotonic()
            try:
                detail = await asyncio.wait_for(check(life), 120)
            except Exception:  # noqa: BLE001 - reported
                told = {"check": check.__name__, "result": "failed", "detail": traceback.format_exc()[-1500:]}
            else:
                told = {"check": check.__name__, "result": "passed", "detail": detail}
            told["seconds"] = f"{time.monotonic() - began:.1f}"
            print(json.dumps(told), flush=True)
        life.shell.stop()
        await asyncio.wait_for(life.running, 60)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--vocabulary", type=int, default=90)
    parser.add_argument("--sizes", type=int, nargs=2, default=(1, 1))
    given, of_vllm = parser.parse_known_args()
    uvloop.run(main(given.model, given.vocabulary, tuple(given.sizes), of_vllm))
