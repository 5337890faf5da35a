"""NIXL and Mooncake's Transfer Engine beside our transfer back-ends: same blocks, same machine, taking turns.

    python bench/peers/transfer.py --peer-python PYTHON [--rows shm cma nixl nixl-thread tcp nixl-tcp mooncake]
        [--block 4096 65536 1048576] [--batch 1 1000] [--write] [--rounds 5] [--seconds 0.3] [--json]

PYTHON is an interpreter with numpy and `nixl-cu12` and `mooncake-transfer-engine-non-cuda` installed. Every row moves
the same scattered blocks between two processes, prepared once and posted again and again, and takes its turns with the
others. CPU seconds are user and system time of both processes with all their threads; the target of NIXL without its
progress thread polls every millisecond, which is what its handshake needs. Our TCP rows authenticate.

`nixl` is UCX with the progress thread off, `nixl-thread` with its defaults, `nixl-tcp` with UCX_TLS=tcp and defaults.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

REGION_BYTES = 256 << 20
OURS = ("shm", "cma", "tcp")
PEERS = ("nixl", "nixl-thread", "nixl-tcp", "mooncake")
START_S = 60.0


@dataclass
class Runner:
    """One row: something that can be told to run for a while."""

    name: str
    run: object
    laps: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    """CPU seconds per GB, per round."""


# -- Peers, in their own interpreter --------------------------------------------------------------------------------


def positions(block: int, batch: int) -> tuple[list[int], list[int]]:
    rng = random.Random(7)
    blocks = max(REGION_BYTES, block * batch) // block
    return rng.sample(range(blocks), batch), rng.sample(range(blocks), batch)


def say(**what: object) -> None:
    print("@" + json.dumps(what), flush=True)


def hear(stream: object) -> dict:
    """The next line that is ours: libraries chat on the same stream."""
    while line := stream.readline():  # type: ignore[attr-defined]
        if line.startswith("@"):
            return json.loads(line[1:])
    raise EOFError("the other process ended")


def pattern(num_bytes: int) -> bytes:
    base = bytes(range(1, 252))
    return (base * (num_bytes // 251 + 1))[:num_bytes]


def buffer(num_bytes: int, fill: bool) -> tuple[object, int]:
    import numpy as np

    array = np.frombuffer(bytearray(pattern(num_bytes) if fill else num_bytes), dtype=np.uint8)
    return array, array.ctypes.data


def target_nixl(kind: str, num_bytes: int) -> None:
    agent, address, _keep = nixl_agent("target", kind, num_bytes, fill=True)
    say(metadata=agent.get_agent_metadata().hex(), address=address)
    serve_cpu(agent.get_new_notifs if kind == "nixl" else None)


def target_mooncake(num_bytes: int) -> None:
    engine, address, _keep = mooncake_engine(num_bytes, fill=True)
    say(session=f"127.0.0.1:{engine.get_rpc_port()}", address=address)
    serve_cpu(None)


def serve_cpu(poll: object) -> None:
    """Answer each line with our CPU seconds; poll meanwhile if the library needs it."""
    import select

    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.001 if poll else None)
        if ready:
            if not sys.stdin.readline():
                return
            say(cpu_s=time.process_time())
        elif poll:
            poll()  # type: ignore[operator]


def nixl_agent(name: str, kind: str, num_bytes: int, *, fill: bool) -> tuple[object, int, object]:
    from nixl_cu12 import _api

    agent = _api.nixl_agent(name, _api.nixl_agent_config(enable_prog_thread=kind != "nixl"))
    array, address = buffer(num_bytes, fill)
    agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
    return agent, address, array


def mooncake_engine(num_bytes: int, *, fill: bool) -> tuple[object, int, object]:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    array, address = buffer(num_bytes, fill)
    assert engine.register_memory(address, num_bytes) == 0
    return engine, address, array


def once_nixl(kind: str, block: int, batch: int, write: bool, peer: dict, num_bytes: int) -> tuple[object, object]:
    """A call that moves the batch once."""
    import numpy as np

    agent, address, array = nixl_agent("bench", kind, num_bytes, fill=False)
    remote = agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
    here, there = positions(block, batch)
    sides = []
    for who, base, indices in (("NIXL_INIT_AGENT", address, here), (remote, peer["address"], there)):
        rows = np.array([(base + i * block, block, 0) for i in indices], dtype=np.uint64)
        sides.append(agent.prep_xfer_dlist(who, agent.get_xfer_descs(rows, "DRAM")))
    every = np.arange(batch, dtype=np.int32)
    handle = agent.make_prepped_xfer("WRITE" if write else "READ", sides[0], every, sides[1], every)

    def once() -> None:
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state

    return once, array


def once_mooncake(block: int, batch: int, write: bool, peer: dict, num_bytes: int) -> tuple[object, object]:
    engine, address, array = mooncake_engine(num_bytes, fill=False)
    here, there = positions(block, batch)
    ours = [address + i * block for i in here]
    theirs = [peer["address"] + i * block for i in there]
    call = engine.batch_transfer_sync_write if write else engine.batch_transfer_sync_read

    def once() -> None:
        assert call(peer["session"], ours, theirs, [block] * batch) == 0

    return once, array


def initiate(kind: str, block: int, batch: int, write: bool) -> None:
    """Run the library against a target of its own, in slices as told on stdin."""
    num_bytes = max(REGION_BYTES, block * batch) // block * block
    command = [sys.executable, __file__, "--target", kind, str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
        peer = hear(target.stdout)

        def both_cpu_s() -> float:
            target.stdin.write("cpu\n")
            target.stdin.flush()
            return time.process_time() + hear(target.stdout)["cpu_s"]

        make = once_mooncake if kind == "mooncake" else once_nixl
        args = (block, batch, write, peer, num_bytes)
        once, array = make(*args) if kind == "mooncake" else make(kind, *args)
        once()
        if not write:
            check(array, block, batch)
        say(ready=True)
        for line in sys.stdin:
            laps = []
            cpu_s = both_cpu_s()
            end = time.perf_counter() + float(line)
            while (started := time.perf_counter()) < end:
                once()
                laps.append(time.perf_counter() - started)
            say(laps=laps, cpu_s=both_cpu_s() - cpu_s)
        target.stdin.close()
        target.kill()
    os._exit(0)  # destructors of the libraries may wait for peers that are gone


def check(array: object, block: int, batch: int) -> None:
    for to, at in zip(*positions(block, batch), strict=True):
        got = bytes(array[to * block : (to + 1) * block])  # type: ignore[index]
        assert got == pattern_at(at * block, block), "wrong bytes"


def pattern_at(start: int, num_bytes: int) -> bytes:
    base = bytes(range(1, 252))
    skip = start % 251
    return (base * (num_bytes // 251 + 2))[skip : skip + num_bytes]


# -- The comparison ---------------------------------------------------------------------------------------------------


def peer_runner(stack: ExitStack, python: str, kind: str, block: int, batch: int, write: bool) -> Runner:
    environment = dict(os.environ, UCX_TLS="tcp") if kind == "nixl-tcp" else dict(os.environ)
    command = [python, __file__, "--initiate", kind, str(block), str(batch), *(["--write"] if write else [])]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    stack.callback(child.wait, START_S)
    stack.callback(child.stdin.close)
    hear(child.stdout)

    def run(seconds: float) -> tuple[list[float], float]:
        child.stdin.write(f"{seconds}\n")
        child.stdin.flush()
        answer = hear(child.stdout)
        return answer["laps"], answer["cpu_s"]

    return Runner(kind, run)


def our_runner(stack: ExitStack, kind: str, block: int, batch: int, write: bool) -> Runner:
    from headwater.transfer.benchmark import Bench, Case, running

    case = Case(kind, block, batch, write, region_bytes=REGION_BYTES)
    bench = Bench(case, *stack.enter_context(running(case)))
    return Runner(kind, bench.run)


def compare(args: argparse.Namespace, block: int, batch: int) -> list[dict]:
    with ExitStack() as stack:
        runners = []
        for kind in args.rows:
            try:
                if kind in OURS:
                    runners.append(our_runner(stack, kind, block, batch, args.write))
                else:
                    runners.append(peer_runner(stack, args.peer_python, kind, block, batch, args.write))
            except EOFError:
                print(f"{kind} does not run here", file=sys.stderr)
        for runner in runners:
            runner.run(args.seconds / 2)
        for turn in range(args.rounds):
            for runner in runners if turn % 2 else reversed(runners):
                laps, cpu_s = runner.run(args.seconds)
                runner.laps += laps
                runner.costs.append(cpu_s / (len(laps) * block * batch) * 1e9)
    return [row(runner, block, batch, args.write) for runner in runners]


def row(runner: Runner, block: int, batch: int, write: bool) -> dict:
    laps = sorted(runner.laps)
    size = block * batch
    return {
        "row": runner.name,
        "op": "write" if write else "read",
        "block": block,
        "batch": batch,
        "gb_s": size / median(laps) / 1e9,
        "best_gb_s": size / laps[0] / 1e9,
        "latency_us": median(laps) * 1e6,
        "best_us": laps[0] * 1e6,
        "cpu_s_per_gb": median(runner.costs),
        "cpu_min": min(runner.costs),
        "cpu_max": max(runner.costs),
        "transfers": len(laps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rows", nargs="+", default=[*OURS, *PEERS])
    parser.add_argument("--block", nargs="+", type=int, default=[4096, 65536, 1 << 20])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--initiate", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--target", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.target:
        kind, num_bytes = args.target
        target_mooncake(int(num_bytes)) if kind == "mooncake" else target_nixl(kind, int(num_bytes))
    elif args.initiate:
        kind, block, batch = args.initiate
        initiate(kind, int(block), int(batch), args.write)
    else:
        report(args)


def report(args: argparse.Namespace) -> None:
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", file=sys.stderr)
    for block in args.block:
        for batch in args.batch:
            many = min(batch, max(1, REGION_BYTES // block))
            for found in compare(args, block, many):
                if args.json:
                    print(json.dumps(found), flush=True)
                    continue
                cost = f"{found['cpu_s_per_gb']:8.3f} ({found['cpu_min']:.3f} to {found['cpu_max']:.3f})"
                speed = f"{found['gb_s']:7.2f}{found['best_gb_s']:7.2f} GB/s {found['latency_us']:10.1f} us"
                print(f"{found['row']:12}{found['op']:6}{block:>8} x{many:<5}{speed}  CPU s/GB {cost}", flush=True)


if __name__ == "__main__":
    main()
