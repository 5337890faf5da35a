"""Faults at random under load: what do clients notice?

    python bench/chaos.py                                         10 minutes, 4 workers, 64 streams, the demo model
    python bench/chaos.py --minutes 0.5 --workers 2 --streams 12 --tokens 24 --cases 12

First every case runs undisturbed: greedy, seeded, and a third of all with a JSON schema; some with log probabilities,
penalties, stop strings, two choices. Then as many clients as there are streams go round and round the cases, while a
random fault strikes every few seconds, and every answer must be, byte for byte, the undisturbed one (usage included,
except for what was cached). The faults:

    kill      SIGKILL to a worker                             stop      SIGSTOP to a worker for some seconds
    cut       the link of a worker in a network namespace     drain     a worker is told to leave within a second
    registry  its folder is deleted                           roll      all processes are replaced, one by one

`cut` needs root and `ip netns`; it is left out where those are missing. With `--etcd SECONDS` the registry is an etcd
of its own, and `registry` kills it for so long (`cut` is left out). At the end no worker may hold a KV block.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import Etcd, free_port

JSON = dict[str, Any]
FAULTS = ("kill", "stop", "cut", "drain", "registry", "roll")
NAMESPACE = f"hwchaos{os.getpid() % 10_000}"
LINK = f"hwc{os.getpid() % 10_000}"
NEAR, FAR = (f"10.213.{os.getpid() % 250}.{number}" for number in (1, 2))
ANSWER_TIMEOUT_S = 180.0
TOPICS = ("rivers", "bridges", "winter", "a small harbour", "old maps", "bread", "clouds", "trains", "bees", "stairs")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "number": {"type": "integer", "minimum": 0, "maximum": 999},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "number", "words"],
    "additionalProperties": False,
}


# -- cases ----------------------------------------------------------------------------------------------------------


def cases_of(count: int, tokens: int, model: str) -> list[JSON]:
    return [case_of(number, tokens, model) for number in range(count)]


def case_of(number: int, tokens: int, model: str) -> JSON:
    """Bodies of requests: a third greedy, a third seeded, a third with a schema, of which half are seeded."""
    topic = TOPICS[number % len(TOPICS)]
    body: JSON = {"model": model, "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"messages": [{"role": "user", "content": f"Write about {topic}, note {number}."}]}
    kind = ("greedy", "seeded", "schema")[number % 3]
    if kind == "seeded" or number % 6 == 5:
        body |= {"temperature": 0.9, "top_p": 0.95, "seed": 1000 + number}
    else:
        body |= {"temperature": 0.0}
    if kind == "schema":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "note", "schema": SCHEMA}}
    extra = number // 3 % 4
    if extra == 1:
        body |= {"logprobs": True, "top_logprobs": 2}
    elif extra == 2 and kind != "schema":
        body |= {"frequency_penalty": 0.5, "presence_penalty": 0.3, "stop": ["\n\n", " the sea"]}
    elif extra == 3 and kind == "seeded":
        body |= {"n": 2}
    return body


@dataclass
class Outcome:
    """One answer as a client sees it."""

    status: int = 0
    error: str = ""
    done: bool = False
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, Any] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    worst_gap_s: float = 0.0

    @property
    def lost(self) -> bool:
        return self.status != 200 or bool(self.error) or not self.done

    def same_as(self, other: "Outcome") -> bool:
        mine, theirs = ((o.texts, o.logprobs, o.ends, o.usage) for o in (self, other))
        return mine == theirs

    def take(self, event: JSON) -> None:
        if "error" in event:
            self.error = str(event["error"].get("message"))
            return
        if event.get("usage"):
            self.usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + (choice["delta"].get("content") or "")
            if choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["content"])
            if choice["finish_reason"] is not None:
                self.ends[index] = choice["finish_reason"]


async def ask(port: int, body: JSON) -> Outcome:
    outcome = Outcome()
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await _ask(port, body, outcome)
    except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
        outcome.error = outcome.error or f"{type(error).__name__} {error}"
    return outcome


async def _ask(port: int, body: JSON, outcome: Outcome) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: chaos\r\ncontent-length: {len(content)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        outcome.status = int(head.split()[1])
        if outcome.status != 200:
            length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
            outcome.error = (await reader.readexactly(length)).decode()[:300]
            return
        pending, last = b"", time.monotonic()
        while size := int(await reader.readline(), 16):
            pending += (await reader.readexactly(size + 2))[:-2]
            *events, pending = pending.split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: "):
                    continue
                if event == b"data: [DONE]":
                    outcome.done = True
                    continue
                now = time.monotonic()
                outcome.worst_gap_s = max(outcome.worst_gap_s, now - last)
                last = now
                outcome.take(json.loads(event[6:]))
    finally:
        writer.close()


# -- the cluster ----------------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    folder: Path
    port: int
    supervisor: asyncio.subprocess.Process
    lone: asyncio.subprocess.Process | None = None
    """The worker in a namespace of its own."""
    etcd: Etcd | None = None
    """A registry that can be away for a while."""
    etcd_outage_s: float = 0.0

    def get(self, path: str) -> JSON:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return json.load(answer)

    async def workers(self) -> list[JSON]:
        document = await asyncio.to_thread(self.get, "/debug/cluster")
        return document["workers"]

    async def ready_workers(self) -> list[JSON]:
        """Those that get requests; none while the frontend cannot serve."""
        with contextlib.suppress(OSError, ValueError):
            await asyncio.to_thread(self.get, "/ready")
            return [w for w in await self.workers() if w["state"] == "ready" and w["connected"]]
        return []


@contextlib.asynccontextmanager
async def running(args: argparse.Namespace, *, cut: bool) -> AsyncIterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="hwc-"))
    port = free_port()
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    etcd = Etcd(folder / "etcd") if args.etcd else None
    registry = f"etcd://127.0.0.1:{etcd.port}/chaos" if etcd is not None else (folder / "registry").as_uri()
    command = [sys.executable, "-m", "headwater"]
    shared = ["--registry", registry, "--threads", "1", "--drain-timeout", "20s", "--num-kv-blocks", "2048"]
    shared += ["--engine", args.engine]
    serve = [*command, "serve", *shared, "--port", str(port), "--workers", str(args.workers - cut)]
    if etcd is not None:
        await asyncio.to_thread(etcd.start)
    with (folder / "log").open("wb") as log:
        supervisor = await asyncio.create_subprocess_exec(*serve, env=environment, stdout=log, stderr=log)
        cluster = Cluster(folder, port, supervisor, etcd=etcd, etcd_outage_s=args.etcd)
        try:
            if cut:
                await asyncio.to_thread(make_namespace)
                lone = ["ip", "netns", "exec", NAMESPACE, *command, "worker", *shared, "--bind", FAR, "--insecure"]
                cluster.lone = await asyncio.create_subprocess_exec(*lone, env=environment, stdout=log, stderr=log)
            await until_ready(cluster, args.workers)
            yield cluster
        finally:
            for process in (cluster.lone, supervisor):
                if process is not None and process.returncode is None:
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
            await asyncio.gather(*(p.wait() for p in (cluster.lone, supervisor) if p is not None))
            if cut:
                await asyncio.to_thread(ip, "netns", "delete", NAMESPACE)
            if etcd is not None:
                etcd.kill()
            if args.keep:
                print(f"the log is {folder}/log", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)


async def until_ready(cluster: Cluster, count: int, within_s: float = 180.0) -> None:
    deadline = time.monotonic() + within_s
    while len(await cluster.ready_workers()) < count:
        if cluster.supervisor.returncode is not None or time.monotonic() > deadline:
            raise SystemExit(f"the cluster is not ready:\n{(cluster.folder / 'log').read_text()[-3000:]}")
        await asyncio.sleep(0.3)


def can_cut() -> bool:
    if os.geteuid() or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", NAMESPACE], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "delete", NAMESPACE], check=False, capture_output=True)
    return made.returncode == 0


def make_namespace() -> None:
    inside = ["netns", "exec", NAMESPACE, "ip"]
    for words in (
        ["netns", "add", NAMESPACE],
        ["link", "add", LINK, "type", "veth", "peer", "name", "far", "netns", NAMESPACE],
        ["address", "add", f"{NEAR}/30", "dev", LINK],
        ["link", "set", LINK, "up"],
        [*inside, "address", "add", f"{FAR}/30", "dev", "far"],
        [*inside, "link", "set", "far", "up"],
        [*inside, "link", "set", "lo", "up"],
    ):
        ip(*words)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


# -- faults ---------------------------------------------------------------------------------------------------------


class Faults:
    """Strikes at random, one fault at a time; keeps at least two workers whole."""

    def __init__(self, cluster: Cluster, kinds: list[str], chance: random.Random, pause_s: tuple[float, float]) -> None:
        self.struck: Counter[str] = Counter()
        self.noticed: dict[str, list[float]] = {"kill": [], "stop": []}
        """Seconds until the frontend gave a worker nothing any more."""
        self._cluster = cluster
        self._kinds = kinds
        self._chance = chance
        self._pause_s = pause_s

    async def strike_until(self, end: float) -> None:
        kinds: list[str] = []
        while time.monotonic() < end:
            kinds = kinds or self._chance.sample(self._kinds, len(self._kinds))
            kind = kinds.pop()
            strike: Callable[[], Coroutine[Any, Any, None]] = getattr(self, kind)
            print(f"{end - time.monotonic():6.0f} s left: {kind}", file=sys.stderr, flush=True)
            await strike()
            self.struck[kind] += 1
            await asyncio.sleep(self._chance.uniform(*self._pause_s))

    async def kill(self) -> None:
        victim = await self._victim()
        if victim is not None:
            os.kill(victim["pid"], signal.SIGKILL)
            self.noticed["kill"].append(await self._until_noticed(victim["worker_id"]))

    async def stop(self) -> None:
        victim = await self._victim()
        if victim is None:
            return
        os.kill(victim["pid"], signal.SIGSTOP)
        try:
            self.noticed["stop"].append(await self._until_noticed(victim["worker_id"]))
            await asyncio.sleep(self._chance.uniform(0.0, 6.0))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim["pid"], signal.SIGCONT)

    async def cut(self) -> None:
        await asyncio.to_thread(ip, "link", "set", LINK, "down")
        await asyncio.sleep(self._chance.uniform(3.0, 9.0))
        await asyncio.to_thread(ip, "link", "set", LINK, "up")

    async def drain(self) -> None:
        victim = await self._victim()
        if victim is None:
            return
        url = f"http://127.0.0.1:{self._cluster.port}/admin/drain/{victim['worker_id']}"
        request = urllib.request.Request(url, b'{"within_s": 1}', {"authorization": f"Bearer {self._key()}"})
        await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=5).close())

    async def registry(self) -> None:
        etcd = self._cluster.etcd
        if etcd is not None:
            etcd.kill()
            await asyncio.sleep(self._cluster.etcd_outage_s)
            await asyncio.to_thread(etcd.start)
            return
        await asyncio.to_thread(shutil.rmtree, self._cluster.folder / "registry", True)

    async def roll(self) -> None:
        before = self._record()
        self._cluster.supervisor.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + 300
        while self._record()["restarts"] == before["restarts"] and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    def _record(self) -> JSON:
        (path,) = self._cluster.folder.glob("headwater-*/serve-*/cluster.json")
        with contextlib.suppress(ValueError):
            return {"restarts": 0, **json.loads(path.read_text())}
        return {"restarts": -1}

    def _key(self) -> str:
        return str(self._record().get("key", ""))

    async def _victim(self) -> JSON | None:
        """A worker of the supervisor's, while two others stand."""
        ready = await self._cluster.ready_workers()
        lone = self._cluster.lone
        ours = [worker for worker in ready if lone is None or worker["pid"] != lone.pid]
        return self._chance.choice(ours) if len(ready) > 2 or (len(ready) == 2 and lone is None) else None

    async def _until_noticed(self, worker_id: str) -> float:
        began = time.monotonic()
        while time.monotonic() < began + 30:
            if all(worker["worker_id"] != worker_id for worker in await self._cluster.ready_workers()):
                return time.monotonic() - began
            await asyncio.sleep(0.02)
        return float("inf")


# -- the run --------------------------------------------------------------------------------------------------------


@dataclass
class Account:
    streams: int = 0
    lost: int = 0
    differing: int = 0
    invalid_json: int = 0
    worst_gap_s: float = 0.0
    examples: list[str] = field(default_factory=list)

    def add(self, body: JSON, got: Outcome, expected: Outcome) -> None:
        self.streams += 1
        self.worst_gap_s = max(self.worst_gap_s, got.worst_gap_s)
        if got.lost:
            self.lost += 1
            self.examples.append(f"lost: {got.status} {got.error}")
        elif not got.same_as(expected):
            self.differing += 1
            self.examples.append(f"differs: {got} instead of {expected}")
        if "response_format" in body and not got.lost:
            self.invalid_json += not _is_beginning_of_json(got)


def _is_beginning_of_json(got: Outcome) -> bool:
    """What ended by itself must be a whole document."""
    for index, text in got.texts.items():
        if got.ends.get(index) == "stop":
            try:
                json.loads(text)
            except ValueError:
                return False
    return True


async def references(port: int, cases: list[JSON]) -> list[Outcome]:
    """Undisturbed, a few at a time."""
    found: list[Outcome] = []
    for first in range(0, len(cases), 8):
        found += await asyncio.gather(*(ask(port, body) for body in cases[first : first + 8]))
    bad = [outcome for outcome in found if outcome.lost]
    if bad:
        raise SystemExit(f"{len(bad)} of {len(cases)} cases fail undisturbed: {bad[0].status} {bad[0].error}")
    return found


async def load(port: int, cases: list[JSON], expected: list[Outcome], streams: int, end: float) -> Account:
    account = Account()
    turn = 0

    async def client() -> None:
        nonlocal turn
        while time.monotonic() < end:
            number = turn % len(cases)
            turn += 1
            account.add(cases[number], await ask(port, cases[number]), expected[number])

    await asyncio.gather(*(client() for _ in range(streams)))
    return account


async def leaked_blocks(cluster: Cluster, count: int) -> int:
    """KV blocks held when nothing runs, on all workers together."""
    await until_ready(cluster, count)
    for _ in range(100):
        workers = await cluster.workers()
        loads = [worker["load"] for worker in workers if worker["load"] is not None]
        held = sum(round(w["load"]["kv_usage"] * w["kv_blocks"]) for w in workers if w["load"] is not None)
        if not held and len(loads) == len(workers) and not any(load["num_running"] for load in loads):
            return 0
        await asyncio.sleep(0.1)
    return held


async def run(args: argparse.Namespace) -> JSON:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    chance = random.Random(args.seed)
    kinds = [kind for kind in args.faults.split(",") if kind != "cut" or (not args.etcd and can_cut())]
    async with running(args, cut="cut" in kinds) as cluster:
        model = (await asyncio.to_thread(cluster.get, "/v1/models"))["data"][0]["id"]
        cases = cases_of(args.cases, args.tokens, model)
        expected = await references(cluster.port, cases)
        print(f"{len(cases)} cases ran undisturbed", file=sys.stderr, flush=True)
        began = time.monotonic()
        end = began + args.minutes * 60
        faults = Faults(cluster, kinds, chance, (args.pause, 2 * args.pause))
        striking = asyncio.ensure_future(faults.strike_until(end))
        account = await load(cluster.port, cases, expected, args.streams, end)
        await striking
        leaked = await leaked_blocks(cluster, args.workers)
    return {
        "minutes": round((time.monotonic() - began) / 60, 2),
        "workers": args.workers,
        "streams_at_once": args.streams,
        "faults": dict(faults.struck),
        "streams": account.streams,
        "lost": account.lost,
        "differing": account.differing,
        "invalid_json": account.invalid_json,
        "leaked_blocks": leaked,
        "worst_gap_s": round(account.worst_gap_s, 2),
        "killed_noticed_s": round(max(faults.noticed["kill"], default=0.0), 2),
        "stopped_noticed_s": round(max(faults.noticed["stop"], default=0.0), 2),
        "examples": account.examples[:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--cases", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--pause", type=float, default=5.0, help="shortest time between two faults, s; twice the longest"
    )
    parser.add_argument("--etcd", type=float, default=0.0, metavar="SECONDS", help="an etcd, away for so long")
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma-separated")
    parser.add_argument("--engine", default="native")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the log")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = asyncio.run(run(args))
    if args.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:20} {value}")
    if report["lost"] or report["differing"] or report["invalid_json"] or report["leaked_blocks"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
