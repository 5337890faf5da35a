"""Faults under load, ours beside NVIDIA Dynamo 1.6.1's: what becomes of 64 streams when one of 4 workers goes?

    bench/peers/setup dynamo demo
    python bench/peers/chaos.py [--system NAME ...] [--fault NAME ...]

Four worker processes with mock engines of about 6 ms a step, one frontend, 64 streams of 300 tokens. One second in:

    kill    SIGKILL to one worker
    stop    SIGSTOP to one worker, until the end
    wipe    the folder of the registry is deleted

Then 24 new requests, and after all streams are over or 40 s have passed another 24. A stream is complete when it has
all its tokens, failed when it ends with an error, hung when neither has happened after 40 s.

    dynamo              as it comes: --migration-limit 0
    dynamo migrating    --migration-limit 3
    headwater           as it comes
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from processes import Process, free_port, running  # noqa: E402

PEERS = Path(os.environ.get("PEERS", ROOT / "build/peers"))
WORKERS, STREAMS, TOKENS, NEW = 4, 64, 300, 24
LIMIT_S = 40.0
START_S = 90.0


@dataclass(frozen=True)
class Setting:
    port: int
    workers: list[Process]
    registry: Path


@contextlib.contextmanager
def dynamo(*flags: str) -> Iterator[Setting]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hw-dynamo-") as folder:
        registry = Path(folder) / "registry"
        registry.mkdir()
        environment = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(registry),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }
        python = str(PEERS / "dynamo/bin/python")
        planes = "--discovery-backend file --request-plane tcp --event-plane zmq"
        worker = f"-m dynamo.mocker --model-path {PEERS / 'demo'} --model-name bench --num-workers 1 --block-size 16"
        worker += f" --speedup-ratio 1 --max-model-len 8192 {planes}"
        frontend = f"-m dynamo.frontend --http-host 127.0.0.1 --http-port {port} {planes} --router-mode kv"
        frontend += f" --tokenizer fastokens {' '.join(flags)}"
        commands = [[python, *worker.split()]] * WORKERS + [[python, *frontend.split()]]
        with running(commands, environment, None) as children:
            yield Setting(port, children[:WORKERS], registry)


@contextlib.contextmanager
def headwater() -> Iterator[Setting]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hw-chaos-") as folder:
        registry = Path(folder) / "registry"
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "headwater"]
        shared = ["--registry", registry.as_uri()]
        worker = [*command, "worker", "--engine", "mocker", "--served-model-name", "bench", *shared]
        worker += ["--mocker-decode-base-ms", "6", "--max-model-len", "8192"]
        frontend = [*command, "frontend", "--port", str(port), *shared]
        with running([worker] * WORKERS + [frontend], environment, None) as children:
            yield Setting(port, children[:WORKERS], registry)


SYSTEMS: dict[str, Callable[[], AbstractContextManager[Setting]]] = {
    "dynamo": dynamo,
    "dynamo migrating": lambda: dynamo("--migration-limit", "3"),
    "headwater": headwater,
}
FAULTS: dict[str, Callable[[Setting], None]] = {
    "kill": lambda it: it.workers[0].send_signal(signal.SIGKILL),
    "stop": lambda it: it.workers[0].send_signal(signal.SIGSTOP),
    "wipe": lambda it: shutil.rmtree(it.registry, ignore_errors=True),
}


async def stream(port: int, tokens: int) -> str:
    """`complete`, `hung`, or why it failed."""
    try:
        async with asyncio.timeout(LIMIT_S):
            return await _stream(port, tokens)
    except TimeoutError:
        return "hung"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        return f"failed: {type(error).__name__}"


async def _stream(port: int, tokens: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = {"model": "bench", "messages": [{"role": "user", "content": "Tell me a long story."}]}
        body |= {"max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: chaos\r\ncontent-length: {len(content)}\r\n"
        writer.write(f"{head}connection: close\r\ncontent-type: application/json\r\n\r\n".encode() + content)
        status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        answer = (await reader.read()).decode() if status == 200 else ""
    finally:
        writer.close()
    if status != 200:
        return f"failed: {status}"
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
    documents = [json.loads(event) for event in events]
    failures = [document["error"] for document in documents if "error" in document]
    if failures:
        return f"failed: error event {failures[0].get('code')}"
    used = [document["usage"]["completion_tokens"] for document in documents if document.get("usage")]
    return "complete" if used and used[-1] == tokens else "failed: cut off"


async def play(it: Setting, fault: Callable[[Setting], None]) -> dict[str, object]:
    deadline = time.monotonic() + START_S
    while await stream(it.port, 2) != "complete":
        if time.monotonic() > deadline:
            raise SystemExit("the system did not start")
        await asyncio.sleep(0.5)
    await asyncio.sleep(3.0)
    began = time.monotonic()
    streams = [asyncio.ensure_future(stream(it.port, TOKENS)) for _ in range(STREAMS)]
    await asyncio.sleep(1.0)
    fault(it)
    first = Counter(await asyncio.gather(*(stream(it.port, 5) for _ in range(NEW))))
    outcomes = Counter(await asyncio.gather(*streams))
    took_s = time.monotonic() - began
    later = Counter(await asyncio.gather(*(stream(it.port, 5) for _ in range(NEW))))
    return {
        "streams": dict(outcomes),
        "took_s": round(took_s, 1),
        "new at once": dict(first),
        "new later": dict(later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", action="append", choices=SYSTEMS)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    for fault in args.fault or FAULTS:
        for system in args.system or SYSTEMS:
            with SYSTEMS[system]() as setting:
                found = asyncio.run(play(setting, FAULTS[fault]))
                if fault == "stop":
                    setting.workers[0].send_signal(signal.SIGCONT)
            if args.json:
                print(json.dumps({"fault": fault, "system": system, **found}), flush=True)
            else:
                print(
                    f"{fault:6}{system:18}" + "  ".join(f"{name}: {value}" for name, value in found.items()), flush=True
                )


if __name__ == "__main__":
    main()
