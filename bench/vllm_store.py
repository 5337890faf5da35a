"""The KV store under a stock vLLM: a restart, two instances that share, and damage.

    python bench/vllm_store.py [--tokens 1000] [--rounds 3] [--core 0] [--log FILE]

vLLM's own server for CPU with the connector, and the store as a process of its own. The same prompts are sent

    computed    to an engine that has never seen them, with the connector: looking and saving included
    shared      to a second instance that runs beside the first, which computed them
    restarted   to a new process: its own cache is empty
    damaged     to a new process in which a bit of each loaded byte is changed before it is put in place: the control
    cold        to a new process without the connector: everything is computed again

The output of the engine that computed a prompt first is what each has to repeat; the control has to differ.
"""

import argparse
import contextlib
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from processes import free_port, running
from vllm_cluster import COMMON, MODEL, VLLM_PYTHON, await_ready, drawn, environment, fetched

OUTPUT = 16
FLAGS = ["--block-size", "32", "--max-num-seqs", "4", "--gpu-memory-utilization", "0.1"]
DAMAGE = Path(__file__).parent / "vllm_store_damage.py"


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    cached: int
    ttft_ms: float


@dataclass(slots=True)
class Row:
    name: str
    answers: list[Answer] = field(default_factory=list)
    same: int = 0


def transfer_config(socket: Path, module: str = "headwater.kv.connectors.vllm") -> str:
    config = {
        "kv_connector": "HeadwaterConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": str(socket)},
    }
    return json.dumps(config)


@contextlib.contextmanager
def store(folder: str, log: str | None) -> Iterator[Path]:
    path = Path(folder) / "kv.sock"
    command = [VLLM_PYTHON, "-m", "headwater", "kv", "serve", "--socket", str(path), "--host", "512MiB"]
    with running([command], environment(folder), log) as (process,):
        await_ready(path.exists, process)
        yield path


@contextlib.contextmanager
def engine(args: argparse.Namespace, config: str | None, **extra: str) -> Iterator[str]:
    port = free_port()
    command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, *COMMON, *FLAGS]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-prompt-tokens-details"]
    command += ["--disable-uvicorn-access-log", *(["--kv-transfer-config", config] if config else [])]
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as folder:
        own = environment(folder, args.core) | {"PYTHONPATH": str(DAMAGE.parent)} | extra
        with running([command], own, args.log) as (process,):
            url = f"http://127.0.0.1:{port}"
            await_ready(lambda: fetched(f"{url}/health") is not None, process)
            ask(url, drawn(Random(-1), 100))
            yield url


def ask(url: str, prompt: list[int]) -> Answer:
    fields = {"model": "demo", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    fields |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(fields).encode(), headers)
    tokens: list[int] = []
    began, first, cached = time.perf_counter(), 0.0, 0
    with urllib.request.urlopen(request, timeout=240) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            for choice in chunk["choices"]:
                first = first or time.perf_counter()
                tokens += choice["token_ids"]
            if chunk.get("usage"):
                cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(tokens, cached, 1e3 * (first - began))


def ask_all(name: str, url: str, prompts: list[list[int]], expected: list[Answer] | None) -> Row:
    row = Row(name)
    for number, prompt in enumerate(prompts):
        row.answers.append(ask(url, prompt))
        row.same += expected is None or row.answers[-1].tokens == expected[number].tokens
    print(
        f"{name:>10}{median(one.ttft_ms for one in row.answers):12.0f}{min(one.ttft_ms for one in row.answers):8.0f}"
        f"{max(one.ttft_ms for one in row.answers):8.0f}{median(one.cached for one in row.answers):16.0f}"
        f"{row.same:11} of {len(prompts)}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", default="0")
    parser.add_argument("--log", help="file for what the processes say")
    args = parser.parse_args()
    prompts = [drawn(Random(seed), args.tokens) for seed in range(args.rounds)]
    others = [drawn(Random(1000 + seed), args.tokens) for seed in range(args.rounds)]
    print(f"      way   TTFT ms p50     min     max  cached tokens p50   same output   ({args.tokens} prompt tokens)")
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as folder, store(folder, args.log) as socket:
        with engine(args, transfer_config(socket)) as url:
            expected = ask_all("computed", url, prompts, None).answers
            with engine(args, transfer_config(socket)) as second:
                begun = [ask(url, prompt) for prompt in others]
                ask_all("shared", second, others, begun)
        with engine(args, transfer_config(socket)) as url:
            ask_all("restarted", url, prompts, expected)
        with engine(args, transfer_config(socket, DAMAGE.stem)) as url:
            ask_all("damaged", url, prompts, expected)
        with engine(args, None) as url:
            ask_all("cold", url, prompts, expected)


if __name__ == "__main__":
    main()
