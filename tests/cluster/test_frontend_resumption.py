"""Clients that come back for an answer whose connection broke, over real sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from api_client import CHAT, Connection, Reply
from scripted_worker import ScriptedWorker, until
from test_frontend_http import Running, running

from headwater.frontend.resumption import ResumptionLimits
from headwater.protocol.request import SequenceOutput
from headwater.weights.base import ResolvedModel

STREAM = {**CHAT, "stream": True, "max_tokens": 6}


def events_of(body: bytes) -> list[tuple[int, str]]:
    """(number, data) of every event."""
    found: list[tuple[int, str]] = []
    for event in body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
        if "data" in lines:
            found.append((int(lines["id"]), lines["data"]))
    return found


async def read_events(connection: Connection, count: int) -> list[tuple[int, str]]:
    """The first ones of a chunked answer, whose end is not waited for."""
    await connection.reader.readuntil(b"\r\n\r\n")
    body = b""
    while body.count(b"data: ") < count:
        size = int(await asyncio.wait_for(connection.reader.readline(), 20), 16)
        body += (await connection.reader.readexactly(size + 2))[:-2]
    return events_of(body)


def generate(worker: ScriptedWorker, first: int, last: int, *, end: bool = False) -> None:
    for number in range(first, last):
        finish = "length" if end and number == last - 1 else None
        worker.step(SequenceOutput(worker.requests[0].stream, [504 + number], finish))


async def broken_after(it: Running, worker: ScriptedWorker, count: int) -> list[tuple[int, str]]:
    """Begin an answer, get some events, lose the connection."""
    async with it.connection() as first:
        await first.send("POST", "/v1/chat/completions", STREAM, x_request_id="mine", last_event_id="0")
        await until(lambda: bool(worker.requests))
        generate(worker, 0, count)
        seen = await read_events(first, count)
    return seen


def texts(events: list[tuple[int, str]]) -> str:
    documents = [json.loads(data) for _, data in events if data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for one in documents for choice in one["choices"])


def test_a_client_that_comes_back_gets_the_rest_and_nothing_twice(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            worker = await it.worker(answers=False)
            seen = await broken_after(it, worker, 3)
            generate(worker, 3, 5)
            await asyncio.sleep(0.1)
            assert worker.aborted == [], "it goes on for a while"
            async with it.connection() as again:
                headers = {"x_request_id": "mine", "last_event_id": str(seen[-1][0])}
                await again.send("POST", "/v1/chat/completions", STREAM, **headers)
                await asyncio.sleep(0.1)
                generate(worker, 5, 6, end=True)
                rest = events_of((await again.read()).body)
            assert [number for number, _ in seen + rest] == list(range(1, len(seen) + len(rest) + 1))
            assert rest[-1][1] == "[DONE]"
            assert len(worker.requests) == 1
            async with it.connection() as once_more:
                reply = await once_more.ask(
                    "POST", "/v1/chat/completions", STREAM, x_request_id="mine", last_event_id="0"
                )
                assert texts(events_of(reply.body)) == texts(seen + rest)
            assert it.frontend.dispatcher.faults.resumed == 2

    uvloop.run(main())


def test_what_nobody_comes_back_for_is_stopped(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            it.frontend._resumption.limits = ResumptionLimits(keep_s=0.2)
            worker = await it.worker(answers=False)
            await broken_after(it, worker, 2)
            await until(lambda: worker.aborted == [worker.requests[0].stream])
            assert len(it.frontend._resumption) == 0
            assert it.frontend._resumption.total_bytes == 0
            async with it.connection() as late:
                reply = await late.ask("POST", "/v1/chat/completions", STREAM, x_request_id="mine", last_event_id="2")
                assert reply.status == 404
                assert "'mine' is kept here" in reply.json()["error"]["message"]

    uvloop.run(main())


def test_an_answer_has_one_connection_the_one_that_asked_last(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it, it.connection() as first, it.connection() as second:
            worker = await it.worker(answers=False)
            headers = {"x_request_id": "mine", "last_event_id": "0"}
            await first.send("POST", "/v1/chat/completions", STREAM, **headers)
            await until(lambda: bool(worker.requests))
            generate(worker, 0, 2)
            seen = await read_events(first, 2)
            await second.send("POST", "/v1/chat/completions", STREAM, **headers)
            await asyncio.wait_for(first.reader.read(), 20)
            assert first.reader.at_eof()
            generate(worker, 2, 6, end=True)
            got = events_of((await second.read()).body)
            assert got[: len(seen)] == seen
            assert got[-1][1] == "[DONE]"
            assert len(worker.requests) == 1

    uvloop.run(main())


def test_only_so_much_of_an_answer_is_kept(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            it.frontend._resumption.limits = ResumptionLimits(answer_bytes=600)
            worker = await it.worker(answers=False)
            await broken_after(it, worker, 2)
            generate(worker, 2, 6, end=True)
            await asyncio.sleep(0.1)
            async with it.connection() as late:
                reply = await late.ask("POST", "/v1/chat/completions", STREAM, x_request_id="mine", last_event_id="1")
                assert reply.status == 400
                assert "what follows 1 is not" in reply.json()["error"]["message"]

    uvloop.run(main())


def test_answers_that_are_complete_make_room(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            it.frontend._resumption.limits = ResumptionLimits(total_bytes=3000)
            await it.worker()
            for number in range(10):
                async with it.connection() as one:
                    asked = {"x_request_id": f"r{number}", "last_event_id": "0"}
                    assert (await one.ask("POST", "/v1/chat/completions", STREAM, **asked)).status == 200
            assert 1 <= len(it.frontend._resumption) < 10

    uvloop.run(main())


@pytest.mark.parametrize("given", ["-1", "x", "9" * 40])
def test_bad_numbers_are_refused(demo_model: ResolvedModel, given: str) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            await it.worker()
            async with it.connection() as one:
                reply = await one.ask("POST", "/v1/chat/completions", STREAM, last_event_id=given)
                assert reply.status == 400
                error = reply.json()["error"]
                assert error["param"] == "Last-Event-ID"
                assert f"is '{given}'" in error["message"]

    uvloop.run(main())


def test_another_request_under_the_same_id_gets_nothing_of_the_answer(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            worker = await it.worker()
            async with it.connection() as one:
                asked = {"x_request_id": "fixed", "last_event_id": "0"}
                first = await one.ask("POST", "/v1/chat/completions", STREAM, **asked)
                other = await one.ask("POST", "/v1/chat/completions", {**STREAM, "max_tokens": 3}, **asked)
                assert (other.status, other.json()["error"]["param"]) == (400, "x-request-id")
                elsewhere = await one.ask("POST", "/v1/completions", STREAM, **asked)
                assert elsewhere.status == 400
                again = await one.ask("POST", "/v1/chat/completions", STREAM, **asked)
                assert again.body == first.body
                assert len(worker.requests) == 1

    uvloop.run(main())


def test_a_whole_answer_is_kept_too_and_others_are_not(demo_model: ResolvedModel) -> None:
    async def main() -> None:
        async with running(demo_model) as it:
            worker = await it.worker()
            async with it.connection() as one:
                first = await one.ask("POST", "/v1/chat/completions", CHAT, x_request_id="w", last_event_id="0")
                again = await one.ask("POST", "/v1/chat/completions", CHAT, x_request_id="w", last_event_id="0")
                assert first.body == again.body
                assert len(worker.requests) == 1
                plain = await one.ask("POST", "/v1/chat/completions", STREAM, x_request_id="p")
                assert b"id: 1\n" not in plain.body
                assert len(it.frontend._resumption) == 1

    uvloop.run(main())


@contextlib.asynccontextmanager
async def two_frontends(
    resolved: ResolvedModel, folder: Path, **frontend: Any
) -> AsyncIterator[tuple[Running, Running]]:
    meeting = folder / "m"
    async with (
        running(resolved, meeting_folder=meeting, **frontend) as one,
        running(resolved, beside=one, meeting_folder=meeting, **frontend) as other,
    ):
        yield one, other


def test_a_client_that_comes_back_to_another_frontend_gets_the_rest_all_the_same(
    demo_model: ResolvedModel, tmp_path: Path
) -> None:
    async def main() -> None:
        async with two_frontends(demo_model, tmp_path) as (one, other):
            worker = await one.worker(answers=False)
            await until(lambda: other.frontend.models.ready, 30)
            seen = await broken_after(one, worker, 3)
            async with other.connection() as again:
                headers = {"x_request_id": "mine", "last_event_id": str(seen[-1][0])}
                await again.send("POST", "/v1/chat/completions", STREAM, **headers)
                await until(lambda: one.frontend.dispatcher.faults.resumed == 1)
                generate(worker, 3, 6, end=True)
                reply = await again.read()
            rest = events_of(reply.body)
            assert [number for number, _ in seen + rest] == list(range(1, len(seen) + len(rest) + 1))
            assert rest[-1][1] == "[DONE]"
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert reply.headers["x-request-id"] == "mine"
            async with other.connection() as twice:
                same = await twice.ask("POST", "/v1/chat/completions", STREAM, x_request_id="mine", last_event_id="0")
                assert texts(events_of(same.body)) == texts(seen + rest), "the same first request, sent twice"
            assert len(worker.requests) == 1
            assert len(other.frontend._resumption) == 0
        assert not (tmp_path / "m").exists(), "nothing is left behind"

    uvloop.run(main())


def test_whole_answers_and_unknown_ones_at_another_frontend(demo_model: ResolvedModel, tmp_path: Path) -> None:
    async def main() -> None:
        async with two_frontends(demo_model, tmp_path) as (one, other):
            worker = await one.worker()
            await until(lambda: other.frontend.models.ready, 30)
            (tmp_path / "m" / "dead.sock").touch()
            asked = {"x_request_id": "w", "last_event_id": "0"}
            first = await one.ask("POST", "/v1/chat/completions", CHAT, **asked)
            again = await other.ask("POST", "/v1/chat/completions", CHAT, **asked)
            assert (again.status, again.body) == (200, first.body)
            assert len(worker.requests) == 1
            lost = await other.ask("POST", "/v1/chat/completions", CHAT, x_request_id="nobody", last_event_id="3")
            assert lost.status == 404
            fresh = await other.ask("POST", "/v1/chat/completions", CHAT, x_request_id="new", last_event_id="0")
            assert fresh.status == 200
            assert len(worker.requests) == 2
            assert len(other.frontend._resumption) == 1, "who was asked first keeps it"

    uvloop.run(main())


def test_a_client_that_leaves_again_at_another_frontend_lets_the_answer_expire(
    demo_model: ResolvedModel, tmp_path: Path
) -> None:
    async def main() -> None:
        async with two_frontends(demo_model, tmp_path) as (one, other):
            one.frontend._resumption.limits = ResumptionLimits(keep_s=0.3)
            worker = await one.worker(answers=False)
            await until(lambda: other.frontend.models.ready, 30)
            seen = await broken_after(one, worker, 2)
            async with other.connection() as again:
                headers = {"x_request_id": "mine", "last_event_id": str(seen[-1][0])}
                await again.send("POST", "/v1/chat/completions", STREAM, **headers)
                await until(lambda: one.frontend.dispatcher.faults.resumed == 1)
                await asyncio.sleep(0.5)
                assert worker.aborted == [], "it has a connection"
            await until(lambda: worker.aborted == [worker.requests[0].stream])

    uvloop.run(main())


def test_keys_hold_behind_the_back_door_too(demo_model: ResolvedModel, tmp_path: Path) -> None:
    async def main() -> None:
        async with two_frontends(demo_model, tmp_path, api_key=("first-key", "second-key")) as (one, other):
            worker = await one.worker()
            await until(lambda: other.frontend.models.ready, 30)
            asked = {"x_request_id": "w", "last_event_id": "0", "authorization": "Bearer first-key"}
            first = await one.ask("POST", "/v1/chat/completions", CHAT, **asked)
            assert first.status == 200
            theirs = await other.ask("POST", "/v1/chat/completions", CHAT, **asked)
            assert theirs.body == first.body
            asked["authorization"] = "Bearer second-key"
            stranger = await other.ask("POST", "/v1/chat/completions", CHAT, **asked)
            assert stranger.status == 200
            assert len(worker.requests) == 2, "another tenant's answer is nobody else's"
            (door,) = [path for path in (tmp_path / "m").iterdir() if one.frontend._neighbours._own == path]
            reader, writer = await asyncio.open_unix_connection(str(door))
            reply = await Connection(reader, writer).ask("POST", "/v1/chat/completions", CHAT, last_event_id="0")
            assert reply.status == 401
            writer.close()

    uvloop.run(main())


def test_a_key_that_only_holds_here_yet_is_served_here(demo_model: ResolvedModel, tmp_path: Path) -> None:
    async def main() -> None:
        meeting = tmp_path / "m"
        async with (
            running(demo_model, meeting_folder=meeting, api_key=("old-key",)) as one,
            running(demo_model, beside=one, meeting_folder=meeting, api_key=("old-key", "new-key")) as other,
        ):
            worker = await one.worker()
            await until(lambda: other.frontend.models.ready, 30)
            asked = {"x_request_id": "w", "last_event_id": "0", "authorization": "Bearer new-key"}
            reply = await other.ask("POST", "/v1/chat/completions", CHAT, **asked)
            assert reply.status == 200
            assert len(worker.requests) == 1

    uvloop.run(main())


def test_a_first_request_sent_twice_starts_one_answer_while_others_are_asked(
    demo_model: ResolvedModel, tmp_path: Path
) -> None:
    async def main() -> None:
        async with running(demo_model, meeting_folder=tmp_path / "m") as it:
            worker = await it.worker(answers=False)
            doors: list[asyncio.StreamWriter] = []
            slow = await asyncio.start_unix_server(lambda _, door: doors.append(door), tmp_path / "m" / "slow.sock")
            async with slow, it.connection() as first, it.connection() as second:
                for connection in (first, second):
                    headers = {"x_request_id": "mine", "last_event_id": "0"}
                    await connection.send("POST", "/v1/chat/completions", STREAM, **headers)
                await until(lambda: len(doors) == 2)
                for door in doors:
                    door.close()
                await until(lambda: it.frontend.dispatcher.faults.resumed == 1 and bool(worker.requests))
                generate(worker, 0, 6, end=True)
                answers = await asyncio.gather(first.read(), second.read(), return_exceptions=True)
                (whole,) = [answer for answer in answers if isinstance(answer, Reply)]
                assert events_of(whole.body)[-1][1] == "[DONE]"
                assert len(worker.requests) == 1

    uvloop.run(main())


def test_a_frontend_that_was_succeeded_stays_for_those_who_may_come_back(
    demo_model: ResolvedModel, tmp_path: Path
) -> None:
    async def main() -> None:
        async with two_frontends(demo_model, tmp_path) as (one, other):
            worker = await one.worker(answers=False)
            await until(lambda: other.frontend.models.ready, 30)
            seen = await broken_after(one, worker, 2)
            leaving = asyncio.ensure_future(one.frontend.stop(20.0, succeeded=True))
            await asyncio.sleep(0.2)
            async with other.connection() as again:
                headers = {"x_request_id": "mine", "last_event_id": str(seen[-1][0])}
                await again.send("POST", "/v1/chat/completions", STREAM, **headers)
                await until(lambda: one.frontend.dispatcher.faults.resumed == 1)
                generate(worker, 2, 6, end=True)
                assert events_of((await again.read()).body)[-1][1] == "[DONE]"
            assert not leaving.done(), "it may be asked once more"
            one.frontend._resumption.close()
            await asyncio.wait_for(leaving, 10)

    uvloop.run(main())


def test_a_frontend_that_was_succeeded_stays_no_longer_than_its_handover(
    demo_model: ResolvedModel, tmp_path: Path
) -> None:
    async def main() -> None:
        async with running(demo_model, meeting_folder=tmp_path / "m") as it, it.connection() as slow:
            worker = await it.worker(answers=False)
            await slow.send("POST", "/v1/chat/completions", STREAM, x_request_id="mine", last_event_id="0")
            await until(lambda: bool(worker.requests))
            left_s: list[float] = []

            async def settle(ends_at: float) -> None:
                left_s.append(ends_at - asyncio.get_running_loop().time())

            it.frontend._resumption.settle = settle  # type: ignore[method-assign]
            assert not await it.frontend.stop(0.2, succeeded=True)
            assert left_s[0] <= 0.0, "all of it was given to a client that did not end"

    uvloop.run(main())
