"""Stream table, load reports and artifacts of a worker."""

import asyncio
import hashlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.protocol.cluster import Artifact
from headwater.protocol.events import LoadReport, StepTiming
from headwater.protocol.frames import FetchArtifact
from headwater.protocol.request import SequenceOutput
from headwater.runtime.conformance import eventually
from headwater.worker.artifacts import MAX_CHUNK_BYTES, ArtifactStore
from headwater.worker.load import MAX_TIMINGS, LoadReporter
from headwater.worker.streams import StreamTable

PEERS = (b"p", b"q")


class Streams(RuleBasedStateMachine):
    """The table against a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = StreamTable()
        self.model: dict[tuple[bytes, int], int] = {}
        self.used: set[int] = set()

    @rule(peer=st.sampled_from(PEERS), stream=st.integers(0, 5))
    def open(self, peer: bytes, stream: int) -> None:
        handle = self.table.open(peer, stream)
        if (peer, stream) in self.model:
            assert handle is None
        else:
            assert handle is not None
            assert handle not in self.used
            self.used.add(handle)
            self.model[peer, stream] = handle

    @rule(peer=st.sampled_from(PEERS), streams=st.lists(st.integers(0, 6), max_size=4))
    def take(self, peer: bytes, streams: list[int]) -> None:
        expected = [self.model.pop((peer, s)) for s in dict.fromkeys(streams) if (peer, s) in self.model]
        assert self.table.take(peer, streams) == expected

    @rule(peer=st.sampled_from(PEERS))
    def peer_gone(self, peer: bytes) -> None:
        expected = {handle for (owner, _), handle in self.model.items() if owner == peer}
        assert set(self.table.take_all(peer)) == expected
        self.model = {key: handle for key, handle in self.model.items() if key[0] != peer}

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        handles = data.draw(st.lists(st.integers(0, 40), unique=True, max_size=6))
        ending = data.draw(st.sets(st.sampled_from(handles))) if handles else set()
        outputs = [SequenceOutput(h, [h], "stop" if h in ending else None) for h in handles]
        routed = self.table.route(outputs)
        by_handle = {handle: key for key, handle in self.model.items()}
        expected = {by_handle[h]: h for h in handles if h in by_handle}
        assert {(peer, out.stream): out.token_ids[0] for peer, outs in routed.items() for out in outs} == expected
        for key, handle in expected.items():
            if handle in ending:
                del self.model[key]

    @invariant()
    def same(self) -> None:
        assert len(self.table) == len(self.model)
        listed = {(peer, stream) for peer, streams in self.table.open_streams().items() for stream in streams}
        assert listed == set(self.model)
        assert set(self.table.open_streams()) == {peer for peer, _ in self.model}, "nothing is kept of who has gone"


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=60, deadline=None)


def report(steps: int, *durations: float) -> LoadReport:
    return LoadReport(1, 0, 0, 10, 9, steps=steps, timings=[StepTiming(0, 0, 1, 8, ms) for ms in durations])


def test_load_reports_are_thinned_out_and_lose_no_timing() -> None:
    async def check() -> None:
        sent: list[LoadReport] = []
        reporter = LoadReporter(sent.append, interval_s=0.05)
        for number in range(20):
            reporter.offer(report(number, float(number)))
        assert [found.steps for found in sent] == [0]
        await asyncio.sleep(0.08)
        assert [found.steps for found in sent] == [0, 19]
        assert [timing.duration_ms for found in sent for timing in found.timings] == [float(n) for n in range(20)]
        await asyncio.sleep(0.06)
        assert len(sent) == 2
        reporter.offer(report(20))
        assert [found.steps for found in sent] == [0, 19, 20]
        reporter.offer(report(21))
        reporter.close()
        await asyncio.sleep(0.08)
        assert len(sent) == 3

    asyncio.run(check())


def test_timings_of_a_report_are_bounded() -> None:
    async def check() -> None:
        sent: list[LoadReport] = []
        reporter = LoadReporter(sent.append, interval_s=0.01)
        for number in range(2000):
            reporter.offer(report(number, float(number)))
        assert len(reporter._timings) <= MAX_TIMINGS
        await asyncio.sleep(0.03)
        assert [timing.duration_ms for timing in sent[-1].timings][-1] == 1999.0
        assert len(sent[-1].timings) == MAX_TIMINGS

    asyncio.run(check())


def test_who_joins_late_is_told_of_steps_with_and_without_prefill() -> None:
    async def check() -> None:
        reporter = LoadReporter(lambda _: None)
        assert reporter.recall() == []
        prefill = LoadReport(1, 0, 0, 10, 9, timings=[StepTiming(64, 2080, 0, 0, 500.0)])
        for one in (prefill, *[report(number, float(number)) for number in range(2000)]):
            reporter.offer(one)
        (recalled,) = reporter.recall()
        durations = [timing.duration_ms for timing in recalled.timings]
        assert 500.0 in durations, "decodes do not crowd out prefills"
        assert 1999.0 in durations
        assert len(durations) <= MAX_TIMINGS
        reporter.close()

    asyncio.run(check())


def test_a_report_is_repeated_without_its_timings_and_never_in_place_of_a_newer_one() -> None:
    async def check() -> None:
        sent: list[LoadReport] = []
        reporter = LoadReporter(sent.append, interval_s=0.05)
        reporter.repeat()
        assert sent == []
        reporter.offer(report(1, 5.0))
        reporter.repeat()
        await eventually(lambda: len(sent) == 2, "it is repeated")
        reporter.offer(report(2, 6.0))
        reporter.repeat()
        await eventually(lambda: len(sent) >= 3, "the newer one is told")
        assert [(found.steps, len(found.timings)) for found in sent[:3]] == [(1, 1), (1, 0), (2, 1)]
        reporter.close()

    asyncio.run(check())


def test_the_time_that_a_silent_engine_got_no_processor_is_told_once() -> None:
    async def check() -> None:
        sent: list[LoadReport] = []
        reporter = LoadReporter(sent.append, interval_s=0.01)
        reporter.offer(report(1))
        for number, starved_ms in enumerate((120.0, 0.0), 2):
            reporter.repeat(starved_ms)
            await eventually(lambda number=number: len(sent) == number, "it is repeated")
        assert [found.starved_ms for found in sent] == [0.0, 120.0, 0.0]
        assert [found.starved_ms for found in reporter.recall()] == [0.0]
        reporter.close()

    asyncio.run(check())


BIG = bytes(range(256)) * (MAX_CHUNK_BYTES // 256 + 10)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BIG)
    artifacts = [Artifact("big", digest(BIG), len(BIG)), Artifact("small", digest(b"abc"), 3)]
    return ArtifactStore(artifacts, {digest(BIG): path, digest(b"abc"): b"abc"})


def test_artifacts_are_read_in_bounded_parts(store: ArtifactStore) -> None:
    data = b""
    while len(data) < len(BIG):
        chunk = store.read(FetchArtifact(digest(BIG), len(data), 1 << 40))
        assert chunk.error is None
        assert 0 < len(chunk.data) <= MAX_CHUNK_BYTES
        assert (chunk.offset, chunk.total) == (len(data), len(BIG))
        data += chunk.data
    assert data == BIG
    assert store.read(FetchArtifact(digest(b"abc"), 1, 1)).data == b"b"
    assert store.read(FetchArtifact(digest(b"abc"), 3, 5)).data == b""


@pytest.mark.parametrize(
    ("wanted", "offset", "length"),
    [
        (digest(b"abc"), -1, 1),
        (digest(b"abc"), 4, 1),
        (digest(b"abc"), 1 << 62, 1),
        (digest(b"abc"), 0, -1),
        ("../../etc/passwd", 0, 10),
        ("", 0, 10),
        ("x" * 1000, 0, 10),
    ],
)
def test_what_is_out_of_bounds_is_an_error(store: ArtifactStore, wanted: str, offset: int, length: int) -> None:
    chunk = store.read(FetchArtifact(wanted, offset, length))
    assert chunk.data == b""
    assert chunk.error is not None
    assert chunk.error.http_status == 400
    assert len(chunk.digest) <= 128
    msgspec.msgpack.encode(chunk)


def test_a_file_that_shrank_or_vanished_is_an_error(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BIG[:10])
    shrunk = store.read(FetchArtifact(digest(BIG), 0, 100))
    assert shrunk.error is not None
    assert "shorter" in shrunk.error.message
    path.unlink()
    vanished = store.read(FetchArtifact(digest(BIG), 0, 100))
    assert vanished.error is not None
    assert str(tmp_path) not in vanished.error.message
