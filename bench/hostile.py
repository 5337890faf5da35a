"""Attack a server as SECURITY.md says, at a size, and print what came of it.

    python bench/hostile.py [--scale 1.0] [--url http://127.0.0.1:8000]

Without --url it starts `headwater serve --engine mocker`. Per attack: what was answered, how long an honest request
took meanwhile at worst, and how much the frontend grew (once the attack was over). Ends with code 1 if anything was
answered 5xx other than 503, an honest request failed, the frontend grew by more than 320 MiB (what a burst may hold at
once), or it died.
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "fuzz"))

from served import Server, serving

MIB = 1 << 20
HONEST = b'{"model": "smollm2-135m-instruct", "prompt": "hi", "max_tokens": 4}'
DEEP = 100_000


def post(body: bytes, path: str = "/v1/completions", *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


@dataclass
class Attack:
    server: Server
    scale: float
    answers: Counter[str] = field(default_factory=Counter)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(asyncio.open_connection(*self.server.address), 20)

    async def say(self, data: bytes, timeout_s: float = 30.0) -> str:
        """The status that is answered, or what else happened."""
        try:
            reader, writer = await self.connect()
        except (OSError, TimeoutError):
            return "not connected"
        try:
            writer.write(data)
            line = await asyncio.wait_for(reader.readline(), timeout_s)
            return line.split()[1].decode() if line else "closed"
        except TimeoutError:
            return "no answer"
        except (OSError, IndexError):
            return "reset"
        finally:
            writer.close()

    async def each(self, messages: list[bytes]) -> None:
        for message in messages:
            self.answers[await self.say(message)] += 1

    def times(self, count: int) -> int:
        return max(1, round(count * self.scale))


async def first_lines(readers: list[asyncio.StreamReader], timeout_s: float) -> list[str]:
    """What each connection ends with: a status, nothing, or not at all."""
    waits = (asyncio.wait_for(reader.readline(), timeout_s) for reader in readers)
    ends = await asyncio.gather(*waits, return_exceptions=True)
    words = [end.split() if isinstance(end, bytes) else [] for end in ends]
    return [
        "STILL OPEN" if isinstance(end, TimeoutError) else word[1].decode() if len(word) > 1 else "closed"
        for end, word in zip(ends, words, strict=True)
    ]


async def slow_loris(attack: Attack) -> None:
    """2,000 heads that never end, a byte at a time."""
    opened = []
    for _ in range(attack.times(2000)):
        with contextlib.suppress(OSError, TimeoutError):
            opened.append(await attack.connect())
            opened[-1][1].write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: ")
    for _ in range(16):
        for _, writer in opened:
            with contextlib.suppress(OSError):
                writer.write(b"x")
        await asyncio.sleep(0.5)
    for line in await first_lines([reader for reader, _ in opened], 30):
        attack.answers[line] += 1
    for _, writer in opened:
        writer.close()


async def connect_and_drop(attack: Attack) -> None:
    """10,000 connections that are dropped at once, half of them after half a request."""
    for number in range(attack.times(10_000)):
        try:
            _, writer = await attack.connect()
        except (OSError, TimeoutError):
            attack.answers["not connected"] += 1
            continue
        if number % 2:
            writer.write(post(HONEST)[:-5])
        writer.transport.abort()
        attack.answers["dropped"] += 1


async def drop_while_served(attack: Attack) -> None:
    """1,000 requests whose client leaves before the answer."""
    for _ in range(attack.times(1000)):
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await attack.connect()
            writer.write(post(HONEST.replace(b"4}", b'400, "stream": true}')))
            await asyncio.sleep(0)
            writer.transport.abort()
            attack.answers["dropped"] += 1


async def deep_json(attack: Attack) -> None:
    bodies = [
        b"[" * DEEP + b"]" * DEEP,
        b'{"a":' * DEEP,
        b'{"model": "m", "prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    ]
    await attack.each([post(body, path) for path in ("/v1/chat/completions", "/v1/completions") for body in bodies * 5])


async def colliding_keys(attack: Attack) -> None:
    """Names of equal hash under the classical weak functions, and numbers of equal hash in Python."""
    numbers = ",".join(f'"{n * (2**61 - 1)}": 1' for n in range(1, 100_000)).encode()
    names = ",".join(
        f'"{"".join("Aa" if n >> bit & 1 else "BB" for bit in range(16))}": 1' for n in range(65_536)
    ).encode()
    bodies = [b'{"model": "m", "prompt": "x", "logit_bias": {' + numbers + b"}}", b"{" + names + b"}"]
    await attack.each([post(body) for body in bodies * 5])


async def zip_bombs(attack: Attack) -> None:
    bomb = gzip.compress(b"0" * (200 * MIB), 9)
    await attack.each(
        [post(bomb, "/v1/completions", f"content-encoding: {coding}") for coding in ("gzip", "br", "zstd")]
    )
    await attack.each([post(bomb)])


async def oversized_heads(attack: Attack) -> None:
    heads = [
        b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * MIB + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"h%d: 1\r\n" % n for n in range(50_000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + b"k" * 30_000 + b"\r\n\r\n",
    ]
    await attack.each(heads * attack.times(25))


async def oversized_bodies(attack: Attack) -> None:
    await attack.each([b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"] * 50)
    await attack.each([post(b'{"model": "m", "prompt": "' + b"a" * (20 * MIB) + b'"}')] * attack.times(10))
    await attack.each([post(b'{"model": "m", "prompt": "' + b"a " * (7 * MIB) + b'"}')] * attack.times(10))


async def partial_bodies(attack: Attack) -> None:
    """Hundreds of bodies that stop one byte before their end."""
    opened = []
    body = b'{"model": "m", "prompt": "' + b"a" * MIB + b'"}'
    for _ in range(attack.times(300)):
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await attack.connect()
            writer.write(post(body)[:-1])
            opened.append((reader, writer))
    for line in await first_lines([reader for reader, _ in opened], 60):
        attack.answers[line] += 1
    for _, writer in opened:
        writer.close()


async def deaf_readers(attack: Attack) -> None:
    """Streams that nobody reads."""
    opened = []
    body = HONEST.replace(b"4}", b'4000, "ignore_eos": true, "stream": true}')
    for _ in range(attack.times(200)):
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await attack.connect()
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(post(body))
            opened.append(writer)
    await asyncio.sleep(5)
    for writer in opened:
        writer.transport.abort()
        attack.answers["dropped"] += 1


ATTACKS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        slow_loris,
        connect_and_drop,
        drop_while_served,
        deep_json,
        colliding_keys,
        zip_bombs,
        oversized_heads,
        oversized_bodies,
        partial_bodies,
        deaf_readers,
    )
}


async def honest_requests(attack: Attack, until: asyncio.Event) -> tuple[float, int]:
    """(worst seconds, failures) of one request after the other."""
    worst, failures = 0.0, 0
    while not until.is_set():
        began = time.perf_counter()
        if await attack.say(post(HONEST), 60.0) != "200":
            failures += 1
        worst = max(worst, time.perf_counter() - began)
        await asyncio.sleep(0.05)
    return worst, failures


async def run(server: Server, scale: float) -> bool:
    fine = True
    warm = Attack(server, scale)
    for _ in range(50):
        await warm.say(post(HONEST))
    print(f"{'attack':<20}{'seconds':>8}{'honest worst ms':>17}{'failed':>8}{'grew MiB':>10}  answers")
    for name, act in ATTACKS.items():
        attack, over = Attack(server, scale), asyncio.Event()
        before, began = server.rss_bytes() if server.supervisor_pid else 0, time.perf_counter()
        honest = asyncio.create_task(honest_requests(Attack(server, scale), over))
        await act(attack)
        over.set()
        worst, failures = await honest
        took_s = time.perf_counter() - began
        await asyncio.sleep(1.0)
        grew = (server.rss_bytes() - before) / MIB if server.supervisor_pid else 0.0
        bad = [
            answer
            for answer in attack.answers
            if (answer.startswith("5") and answer != "503") or answer == "STILL OPEN"
        ]
        fine = fine and not bad and not failures and grew < 320 and server.alive()
        said = json.dumps(dict(attack.answers))
        print(f"{name:<20}{took_s:>8.1f}{1e3 * worst:>17.0f}{failures:>8}{grew:>10.1f}  {said}", flush=True)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--url")
    args = parser.parse_args()
    with serving(args.url) as server:
        fine = asyncio.run(run(server, args.scale))
        alive = server.alive()
    print("the server lives" if alive else "THE SERVER IS DEAD")
    return 0 if fine and alive else 1


if __name__ == "__main__":
    sys.exit(main())
