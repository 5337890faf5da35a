"""A frontend process that logs what it served: finished, aborted and refused requests, and not a word of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from api_client import CHAT, answer_at_once
from scripted_worker import ScriptedWorker, until
from test_frontend_process import frontend, play

from headwater.protocol.request import SequenceOutput
from headwater.sim.request_log import from_log, read_log

__all__ = ["play"]

SECRET = "the launch code is 0000 " * 40


def test_requests_are_recorded_with_what_came_of_them(play: Callable[..., None]) -> None:
    async def scenario(folder: Path, worker: ScriptedWorker) -> None:
        path = folder / "requests.jsonl"
        async with frontend(folder, "--record-requests", str(path)) as process:
            await process.until_ready()
            worker.on_submit = lambda request: answer_at_once(worker, request)
            asked = {**CHAT, "messages": [{"role": "user", "content": SECRET}]}
            async with process.connection() as client:
                assert (await client.ask("POST", "/v1/chat/completions", asked)).status == 200
                assert (await client.ask("POST", "/v1/chat/completions", asked)).status == 200
            worker.on_submit = None
            async with process.connection() as client:
                await client.send("POST", "/v1/chat/completions", {**asked, "stream": True})
                await until(lambda: len(worker.requests) == 3)
                worker.step(SequenceOutput(worker.requests[2].stream, [504], num_cached_tokens=0))
                await client.reader.readuntil(b"data: ")
            await until(lambda: bool(worker.aborted))
            process.child.terminate()
            assert await process.child.wait() == 0
        rows = list(read_log(path))
        assert [row.outcome for row in rows] == ["finished", "finished", "aborted"]
        assert [row.output_tokens for row in rows] == [3, 3, 1]
        assert [row.worker for row in rows] == ["w1"] * 3
        assert [row.cached_tokens for row in rows] == [16, 16, 0]
        assert rows[0].blocks == rows[1].blocks != ""
        assert rows[0].prompt_tokens == len(worker.requests[0].prompt) // 4
        for row in rows:
            assert row.ttft_ms is not None
            assert 0 < row.ttft_ms <= row.e2e_ms
        assert b"launch" not in path.read_bytes()
        assert len(from_log(rows, rows[0].block_size)) == 3

    play(scenario)


def test_what_no_worker_takes_is_recorded_as_refused(play: Callable[..., None]) -> None:
    async def scenario(folder: Path, worker: ScriptedWorker) -> None:
        path = folder / "requests.jsonl"
        async with frontend(folder, "--record-requests", str(path)) as process:
            await process.until_ready()
            async with process.connection() as client:
                elsewhere = {**CHAT, "nvext": {"backend_instance_id": "nobody"}}
                assert (await client.ask("POST", "/v1/chat/completions", elsewhere)).status == 400
            process.child.terminate()
            assert await process.child.wait() == 0
        (row,) = read_log(path)
        assert (row.outcome, row.output_tokens, row.worker, row.ttft_ms) == ("refused", 0, "", None)

    play(scenario)


def test_a_file_that_cannot_be_written_ends_the_start(play: Callable[..., None]) -> None:
    async def scenario(folder: Path, worker: ScriptedWorker) -> None:
        with pytest.raises(AssertionError, match="cannot record requests"):
            async with frontend(folder, "--record-requests", str(folder / "no" / "file")):
                pass

    play(scenario)
