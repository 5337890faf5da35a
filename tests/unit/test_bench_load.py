"""The load generator against a real server of our own edge, and its arithmetic."""

import asyncio
import gzip
import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from headwater.bench.arrivals import ClosedLoop, Poisson, TraceTimes
from headwater.bench.http_client import Target
from headwater.bench.load import LoadRun, RequestRecord, RequestShape
from headwater.bench.report import Slo, distribution, percentile, summarise
from headwater.bench.sse import StreamReader
from headwater.bench.traces import TraceWorkload, read_trace
from headwater.bench.workload import LoadRequest, SyntheticWorkload
from headwater.errors import ConfigError
from headwater.frontend.http.base import HttpRequest, Responder
from headwater.frontend.http.limits import HttpLimits
from headwater.frontend.http.server import HttpServer

EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Hel"},"finish_reason":null}]}\n\n',
    b": keep-alive\n\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"lo"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":31,"completion_tokens":2,"total_tokens":33}}\n\n',
    b"data: [DONE]\n\n",
]


class FakeModel:
    """Answers every request with EVENTS, or breaks as its prompt says."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.in_flight = self.most_in_flight = 0

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        body = json.loads(request.body)
        self.bodies.append(body)
        prompt = body["messages"][0]["content"]
        if prompt == "refuse":
            responder.send(429, (), b'{"error":{"message":"too many"}}')
            return
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        responder.start(200, ((b"content-type", b"text/event-stream"),))
        for event in EVENTS:
            responder.write(event)
            await asyncio.sleep(0.001)
            if prompt == "break":
                self.in_flight -= 1
                responder.abort()
                return
        self.in_flight -= 1
        responder.finish()


async def run_against_fake(prompts: list[str], concurrency: int) -> tuple[FakeModel, list[RequestRecord]]:
    model = FakeModel()
    server = HttpServer(model, HttpLimits())
    port = await server.start("127.0.0.1", 0)
    load = LoadRun(Target.parse(f"http://127.0.0.1:{port}/v1"), RequestShape("m"), timeout_s=20)
    try:
        requests = [LoadRequest(prompt, 2) for prompt in prompts]
        records = await load.run(requests, ClosedLoop(concurrency))
    finally:
        load.close()
        await server.stop(5)
    return model, records


def test_a_run_counts_tokens_and_keeps_to_its_concurrency() -> None:
    model, records = asyncio.run(run_against_fake(["hi"] * 40, 4))
    assert len(records) == len(model.bodies) == 40
    assert model.most_in_flight == 4
    for record in records:
        assert record.error is None
        assert (record.prompt_tokens, record.output_tokens, len(record.gaps_s)) == (31, 2, 1)
        assert record.ttft_s is not None
        assert record.e2e_s is not None
        assert 0 < record.ttft_s <= record.e2e_s
    body = model.bodies[0]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"]) == (2, True)


def test_failures_are_records_and_do_not_stop_the_run() -> None:
    _, records = asyncio.run(run_against_fake(["hi", "refuse", "break", "hi"], 1))
    errors = [record.error for record in records]
    assert errors[0] is None
    assert errors[3] is None
    assert "429" in str(errors[1])
    assert "closed the connection" in str(errors[2])


def test_nobody_listening_is_an_error_of_each_request() -> None:
    async def run() -> list[RequestRecord]:
        load = LoadRun(Target("127.0.0.1", 9, tls=False, base_path=""), RequestShape("m"), timeout_s=2)
        return await load.run([LoadRequest("hi", 1)] * 3, ClosedLoop(3))

    assert all("cannot connect" in str(record.error) for record in asyncio.run(run()))


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1))
def test_a_stream_reads_the_same_however_it_is_cut(cuts: list[int]) -> None:
    data = b"".join(EVENTS)
    reader = StreamReader()
    position = 0
    for cut in cuts:
        reader.on_data(data[position : position + cut], 1.0)
        position += cut
    reader.on_data(data[position:], 2.0)
    assert reader.text == "Hello"
    assert (reader.prompt_tokens, reader.completion_tokens, reader.saw_done) == (31, 2, True)
    assert reader.error is None


def test_an_error_event_is_kept() -> None:
    reader = StreamReader()
    reader.on_data(b'data: {"error":{"message":"worker lost"}}\n\n', 1.0)
    assert reader.error is not None
    assert "worker lost" in reader.error


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_lie_between_neighbours(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert ordered[0] <= found <= ordered[-1]
    assert percentile(ordered, 0) == ordered[0]
    assert percentile(ordered, 100) == ordered[-1]


def test_goodput_counts_requests_within_every_limit() -> None:
    fast = RequestRecord(0, ttft_s=0.1, e2e_s=0.5, gaps_s=[0.1] * 4, output_tokens=5, prompt_tokens=10)
    slow_start = RequestRecord(0, ttft_s=0.9, e2e_s=1.3, gaps_s=[0.1] * 4, output_tokens=5, prompt_tokens=10)
    failed = RequestRecord(0, error="HTTP 500")
    report = summarise([fast, slow_start, failed], 2.0, Slo(ttft_ms=500, tpot_ms=150))
    assert (report.completed, report.failed, report.good_requests) == (2, 1, 1)
    assert report.goodput_per_s == 0.5
    assert report.output_tokens_per_s == 5
    assert report.tpot is not None
    assert report.tpot.mean_ms == pytest.approx(100)
    assert report.errors == {"HTTP 500": 1}
    assert distribution([]) is None


def test_synthetic_prompts_share_heads_and_differ_in_tails() -> None:
    workload = SyntheticWorkload(6, input_tokens=50, output_tokens=3, prefix_tokens=40, num_prefixes=2)
    prompts = [request.prompt.split() for request in workload.requests(1.0)]
    assert all(len(prompt) == 50 for prompt in prompts)
    assert prompts[0][:40] == prompts[2][:40] != prompts[1][:40]
    assert len({tuple(prompt) for prompt in prompts}) == 6
    again = [request.prompt.split() for request in workload.requests(1.0)]
    assert again == prompts
    assert [len(request.prompt.split()) for request in workload.requests(0.5)] == [25] * 6


def test_arrivals_follow_their_process() -> None:
    requests = [LoadRequest("x", 1, at_s=float(number)) for number in range(2000)]
    times = [at for at, _ in Poisson(10.0, seed=3).schedule(requests)]
    assert times == sorted(times)
    assert times[-1] / len(times) == pytest.approx(0.1, rel=0.1)
    assert [at for at, _ in TraceTimes().schedule(requests)] == [request.at_s for request in requests]
    assert {at for at, _ in ClosedLoop(2).schedule(requests)} == {0.0}


def test_traces_of_both_kinds_are_read(tmp_path: Path) -> None:
    mooncake = tmp_path / "t.jsonl.gz"
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 9]},
    ]
    mooncake.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    first, second = TraceWorkload(mooncake, speed=3.0).requests(1.0)
    assert (first.output_tokens, second.at_s) == (5, 0.5)
    assert first.prompt.split()[:1024] == second.prompt.split()[:1024]
    assert len(first.prompt.split()) == 1100
    assert first.prompt.split()[1024:1030] != second.prompt.split()[1024:1030]

    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:05.0000000,40,4\n"
    )
    assert [row.input_tokens for row in read_trace(azure)] == [374, 40]
    assert [row.at_s for row in read_trace(azure)][1] == pytest.approx(1.02, abs=0.01)


def test_a_broken_trace_names_its_row(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp":0,"input_length":1,"output_length":1}\n{"timestamp":"x"}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl:2"):
        list(read_trace(path))
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_trace(tmp_path / "missing.csv"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.jsonl", b'{"timestamp":0,"input_length":-5,"output_length":3}', r"t\.jsonl:1: .* >= 0 .*input_length"),
        ("t.jsonl", b'{"timestamp":0,"input_length":5000000000,"output_length":3}', r"<= 16777216 .*input_length"),
        ("t.jsonl", b'{"timestamp":NaN,"input_length":5,"output_length":3}', r"t\.jsonl:1"),
        ("t.jsonl", b'{"timestamp":1e999,"input_length":5,"output_length":3}', r"t\.jsonl:1"),
        ("t.jsonl", b'{"timestamp":0,"input_length":5,"output_length":3,"hash_ids":[1e400]}', r"t\.jsonl:1"),
        ("t.jsonl", b"[" * 100_000, r"t\.jsonl:1"),
        ("t.jsonl", b"\x7fELF\xd0\xff", "cannot read the trace"),
        ("t.csv", b"\x7fELF\xd0\xff", "cannot read the trace"),
        ("t.jsonl.gz", b"not compressed", "cannot read the trace"),
        ("t.csv", b"garbage", r"t\.csv:1: expected the columns TIMESTAMP"),
        ("t.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,-5,3", r"t\.csv:2: .* >= 0"),
        ("t.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00", r"t\.csv:2"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        list(read_trace(tmp_path / name))


def test_targets_are_parsed_strictly() -> None:
    assert Target.parse("https://example.org/v1/").port == 443
    assert Target.parse("localhost:81").base_path == ""
    with pytest.raises(ConfigError):
        Target.parse("ftp://example.org")
