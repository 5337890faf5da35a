"""The frontend's side of a cluster: discovery, models, dispatch and loss, over both kinds of planes."""

import asyncio
import contextlib
from hashlib import sha256
from pathlib import Path

import pytest
from frontend_rig import Rig, Sink
from scripted_worker import ARTIFACTS, ScriptedWorker, scripted_card, until

from headwater.errors import (
    Draining,
    InvalidRequest,
    ModelNotFound,
    NoWorkers,
    Overloaded,
    WorkerLost,
)
from headwater.frontend.loading import ModelLoading
from headwater.perf.model import StepModel, StepShape
from headwater.protocol.cluster import CatalogueEntry
from headwater.protocol.events import FrontendLoad, LoadReport
from headwater.protocol.frames import ArtifactChunk
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.router.worker import time_class
from headwater.runtime.registry.base import Outage


def test_a_worker_that_appears_is_connected_its_model_built_and_served(play) -> None:
    async def scenario(rig: Rig) -> None:
        await until(lambda: rig.models.synced)
        with pytest.raises(NoWorkers):
            rig.models.get("m")
        (worker,) = await rig.serving("w1")
        with pytest.raises(ModelNotFound, match="'n' does not exist; there is m"):
            rig.models.get("n")
        built = rig.models.get("m")
        assert built.artifacts == ARTIFACTS
        streams, (sink,) = rig.submit()
        await until(lambda: bool(worker.requests))
        assert worker.requests[0].stream == streams[0]
        assert rig.worker_of(streams[0]) == "w1"
        worker.step(SequenceOutput(streams[0], [5, 6], num_cached_tokens=16))
        worker.step(SequenceOutput(streams[0], [7], "stop", stop_token_id=2))
        await until(lambda: len(sink.outputs) == 2)
        assert sink.token_ids == [5, 6, 7]
        assert rig.dispatcher.num_streams == 0
        assert rig.view.workers[0].booked_sequences == 0
        worker.step(SequenceOutput(streams[0], [8]))
        await asyncio.sleep(0.05)
        assert sink.token_ids == [5, 6, 7], "late output of a stream that ended is ignored"

    play(scenario)


def test_requests_spread_over_workers_and_sequences_of_one_request_stay_together(play) -> None:
    async def scenario(rig: Rig) -> None:
        workers = await rig.serving("w1", "w2", "w3")
        for _ in range(6):
            rig.submit()
        rig.submit(n=4)
        await until(lambda: sum(len(worker.requests) for worker in workers) == 10)
        assert sorted(len(worker.requests) for worker in workers) == [2, 2, 6]

    play(scenario)


def test_a_sink_that_cannot_take_output_is_told_and_holds_up_nobody(play) -> None:
    class Broken(Sink):
        def on_output(self, output: SequenceOutput) -> None:
            raise RuntimeError("no good")

    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        streams, sinks = rig.submit(n=3, sinks=[Broken(), Sink(), Broken()])
        await until(lambda: len(worker.requests) == 3)
        worker.step(
            SequenceOutput(streams[0], [5]), SequenceOutput(streams[1], [6]), SequenceOutput(streams[2], [7], "stop")
        )
        await until(lambda: sinks[0].error is not None and sinks[2].error is not None)
        assert {sinks[0].error.code, sinks[2].error.code} == {"internal_error"}
        assert sinks[1].token_ids == [6]
        await until(lambda: worker.aborted == streams[:1])
        worker.finish(streams[1])
        await until(lambda: rig.dispatcher.num_streams == 0)
        assert rig.view.workers[0].booked_sequences == 0

    play(scenario)


def test_an_abort_reaches_the_worker_and_silences_the_sink(play) -> None:
    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        streams, sinks = rig.submit(n=3)
        await until(lambda: len(worker.requests) == 3)
        rig.dispatcher.abort(streams[:2])
        rig.dispatcher.abort(streams[:2])
        rig.dispatcher.abort([10_000])
        await until(lambda: worker.aborted == streams[:2])
        worker.step(*(SequenceOutput(stream, [1]) for stream in streams))
        await until(lambda: bool(sinks[2].outputs))
        assert [len(sink.outputs) for sink in sinks] == [0, 0, 1]
        assert rig.view.workers[0].booked_sequences == 1

    play(scenario)


def test_a_worker_whose_connection_broke_comes_back_while_its_lease_stands(play) -> None:
    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        connection = rig.cluster.connection("w1")
        assert connection is not None
        connection._on_broken(WorkerLost("cut by the test"))
        assert rig.view.eligible("f1") == []
        await until(lambda: bool(rig.view.eligible("f1")))
        streams, (sink,) = rig.submit()
        await until(lambda: any(request.stream == streams[0] for request in worker.requests))
        worker.finish(streams[0])
        await until(lambda: bool(sink.outputs))

    play(scenario)


def test_a_worker_that_gives_up_its_lease_may_finish_but_gets_nothing_new(play) -> None:
    async def scenario(rig: Rig) -> None:
        first, second = await rig.serving("w1", "w2")
        streams, (sink,) = rig.submit()
        leaver = first if rig.worker_of(streams[0]) == "w1" else second
        await until(lambda: bool(leaver.requests))
        await leaver.give_up_lease()
        await until(lambda: len(rig.view.eligible("f1")) == 1)
        leaver.step(SequenceOutput(streams[0], [1]))
        leaver.finish(streams[0], [2])
        await until(lambda: len(sink.outputs) == 2)
        assert sink.error is None
        for _ in range(4):
            rig.submit()
        assert len(leaver.requests) == 1

    play(scenario)


def test_draining_and_starting_workers_get_nothing_and_ready_ones_do(play) -> None:
    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        await worker.set_state("draining")
        await until(lambda: not rig.view.eligible("f1"))
        with pytest.raises(NoWorkers, match="m cannot be served"):
            rig.models.get("m")
        await worker.set_state("ready")
        await until(lambda: bool(rig.view.eligible("f1")))
        assert rig.models.get("m").card.name == "m"

    play(scenario)


def test_a_catalogued_model_without_workers_is_unavailable_not_unknown(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.registry.put_model(CatalogueEntry("m", scripted_card()))
        await until(lambda: rig.models.names() == ["m"])
        with pytest.raises(NoWorkers) as caught:
            rig.models.get("m")
        assert caught.value.retry_after_s > 0
        assert not rig.models.ready
        assert "m" in rig.models.missing()
        (worker,) = await rig.serving("w1")
        rig.models.get("m")
        await worker.close()
        await until(lambda: not rig.models.ready)
        with pytest.raises(NoWorkers):
            rig.models.get("m")
        await rig.registry.remove_model("m")
        await until(lambda: rig.models.names() == [])
        with pytest.raises(NoWorkers, match="no worker has registered a model yet"):
            rig.models.get("m")

    play(scenario)


def test_a_model_that_cannot_be_built_is_tried_again_and_says_why(play) -> None:
    async def scenario(rig: Rig) -> None:
        rig.build_failures = 1
        await rig.worker("w1")
        await until(lambda: rig.models.missing() == {"m": "no good"})
        with pytest.raises(NoWorkers, match="no good"):
            rig.models.get("m")
        await until(lambda: rig.models.ready)

    play(scenario)


@pytest.mark.parametrize("failures", [0, 1])
def test_a_model_that_is_just_being_built_can_be_waited_for(play, failures: int) -> None:
    async def scenario(rig: Rig) -> None:
        rig.build_failures = failures
        rig.may_build.clear()
        worker = await rig.worker("w1")
        await until(lambda: rig.models.missing() == {"m": "its tokenizer is being loaded"} and bool(rig.eligible()))
        assert [card.name for card in rig.models.cards()] == ["m"]
        with pytest.raises(ModelLoading) as caught:
            rig.models.get("m")
        await worker.set_state("draining")
        await until(lambda: not rig.eligible())
        with pytest.raises(NoWorkers) as plain:
            rig.models.get("m")
        assert not isinstance(plain.value, ModelLoading), "nobody could answer when it is built"
        await worker.set_state("ready")
        await until(lambda: bool(rig.eligible()))
        rig.may_build.set()
        await asyncio.wait_for(caught.value.settled.wait(), 10)
        if failures:
            with pytest.raises(NoWorkers, match="no good") as failed:
                rig.models.get("m")
            assert not isinstance(failed.value, ModelLoading), "who knows how long it takes"
            assert rig.models.cards() == []
        await until(lambda: rig.models.ready)
        assert rig.models.get("m").card.name == "m"

    play(scenario)


def test_files_are_fetched_in_parts_verified_and_kept(play, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        contents = {"tokenizer.json": bytes(range(256)) * 40_000}
        card = scripted_card(contents=contents)
        first = await rig.worker("w1", card, contents=contents)
        await until(lambda: rig.models.ready)
        assert rig.models.get("m").artifacts == contents
        assert [fetch.offset for fetch in first.fetches] == [0, 4 * 2**20, 8 * 2**20]
        kept = tmp_path / "cache" / sha256(contents["tokenizer.json"]).hexdigest()
        assert kept.read_bytes() == contents["tokenizer.json"]
        await first.close()
        await until(lambda: rig.models.names() == [])
        second = await rig.worker("w2", card, contents=contents)
        await until(lambda: rig.models.ready)
        assert second.fetches == []
        await second.close()
        await until(lambda: rig.models.names() == [])
        kept.write_bytes(b"\0" * len(contents["tokenizer.json"]))
        third = await rig.worker("w3", card, contents=contents)
        await until(lambda: rig.models.ready)
        assert third.fetches, "a damaged copy is not used"
        assert rig.models.get("m").artifacts == contents

    play(scenario, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    "damage",
    [
        lambda chunk: ArtifactChunk(chunk.digest, chunk.offset, chunk.total, b"x" * len(chunk.data)),
        lambda chunk: ArtifactChunk(chunk.digest, chunk.offset, chunk.total, b""),
        lambda chunk: ArtifactChunk(chunk.digest, chunk.offset, chunk.total, chunk.data + b"x"),
        lambda chunk: ArtifactChunk(chunk.digest, chunk.offset + 1, chunk.total, chunk.data),
        lambda chunk: ArtifactChunk(chunk.digest, chunk.offset, chunk.total * 1000, chunk.data),
    ],
    ids=["content", "empty", "longer", "offset", "total"],
)
def test_a_worker_that_sends_wrong_files_is_not_believed_and_another_is_asked(play, damage) -> None:
    async def scenario(rig: Rig) -> None:
        liar = ScriptedWorker("w1", rig.planes)
        liar.damage = damage
        rig.workers.append(liar)
        await liar.start(rig.registry)
        await until(lambda: bool(liar.fetches))
        await asyncio.sleep(0.05)
        assert not rig.models.ready
        await rig.worker("w2")
        await until(lambda: rig.models.ready)
        assert rig.models.get("m").artifacts == ARTIFACTS

    play(scenario)


def test_the_catalogue_decides_between_versions_of_a_model(play) -> None:
    async def scenario(rig: Rig) -> None:
        old, new = scripted_card(), scripted_card(fingerprint="f2")
        await rig.registry.put_model(CatalogueEntry("m", old))
        for number in range(2):
            await rig.worker(f"new{number}", new)
        await until(lambda: rig.models.ready)
        assert rig.models.get("m").card.fingerprint == "f2", "the only one that is up"
        last_old = await rig.worker("old", old)
        await until(lambda: rig.models.get("m").card.fingerprint == "f1")
        await rig.registry.put_model(CatalogueEntry("m", new))
        await until(lambda: rig.models.get("m").card.fingerprint == "f2")
        streams, _ = rig.submit()
        assert str(rig.worker_of(streams[0])).startswith("new")
        await last_old.close()
        assert len(rig.models.cards()) == 1

    play(scenario)


def test_errors_of_workers_arrive_as_errors_of_the_tree(play) -> None:
    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        streams, sinks = rig.submit(n=2)
        await until(lambda: len(worker.requests) == 2)
        worker.refuse(streams[0], "overloaded", "1024 sequences wait here")
        worker.refuse(streams[1], "invalid_value", "no such grammar")
        await until(lambda: all(sink.error is not None for sink in sinks))
        assert isinstance(sinks[0].error, Overloaded)
        assert isinstance(sinks[1].error, InvalidRequest)
        assert str(sinks[0].error) == "1024 sequences wait here"
        assert rig.view.workers[0].booked_sequences == 0

    play(scenario)


def test_a_sequence_that_a_worker_refuses_goes_to_another(play) -> None:
    async def scenario(rig: Rig) -> None:
        workers = {worker.worker_id: worker for worker in await rig.serving("w1", "w2")}
        streams, (sink,) = rig.submit()
        first = workers[str(rig.worker_of(streams[0]))]
        await until(lambda: bool(first.requests))
        first.refuse(streams[0], "draining", "this worker is draining")
        await until(lambda: all(worker.requests for worker in workers.values()))
        (second,) = (worker for worker in workers.values() if worker is not first)
        assert rig.worker_of(streams[0]) == second.worker_id
        assert {w.worker_id: w.booked_sequences for w in rig.view.workers} == {first.worker_id: 0, second.worker_id: 1}
        second.finish(second.requests[0].stream, [7])
        await until(lambda: sink.token_ids == [7])
        assert sink.error is None

    play(scenario)


def test_a_sequence_that_every_worker_refuses_ends_with_the_last_refusal(play) -> None:
    async def scenario(rig: Rig) -> None:
        for worker in await rig.serving("w1", "w2"):
            worker.on_submit = lambda request, worker=worker: worker.refuse(
                request.stream, "overloaded", f"{worker.worker_id} is full"
            )
        _, (sink,) = rig.submit()
        await until(lambda: sink.error is not None)
        assert isinstance(sink.error, Overloaded)
        assert sum(len(worker.requests) for worker in rig.workers) == 2
        assert all(worker.booked_sequences == 0 for worker in rig.view.workers)

    play(scenario)


def test_a_worker_may_register_before_it_has_loaded_its_model(play) -> None:
    async def scenario(rig: Rig) -> None:
        worker = ScriptedWorker("w1", rig.planes)
        rig.workers.append(worker)
        loaded, worker.card = worker.card, scripted_card("some/path.gguf", fingerprint="", contents={})
        await worker.start(rig.registry, "starting")
        await until(lambda: rig.cluster.connection("w1") is not None and rig.cluster.connection("w1").connected)
        assert rig.models.names() == []
        worker.card = loaded
        await worker.set_state("ready")
        await until(lambda: rig.models.ready)
        assert rig.models.names() == ["m"]

    play(scenario)


def test_a_sink_that_fails_does_not_hold_up_the_others(play, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        streams, sinks = rig.submit(n=3)
        await until(lambda: len(worker.requests) == 3)

        def fail(output: SequenceOutput) -> None:
            raise RuntimeError("a bug in the layer above")

        sinks[1].on_output = fail
        worker.step(*(SequenceOutput(stream, [1]) for stream in streams))
        await until(lambda: worker.aborted == [streams[1]])
        assert [len(sink.outputs) for sink in sinks] == [1, 0, 1]
        assert rig.view.workers[0].booked_sequences == 2

    play(scenario)


def test_the_number_of_open_sequences_is_bounded(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1")
        rig.submit(n=8)
        with pytest.raises(Overloaded, match="at most 10"):
            rig.submit(n=3)
        rig.submit(n=2)

    play(scenario, max_streams=10)


def test_a_burst_before_the_first_token_ever_is_bounded_by_what_the_time_model_expects(play) -> None:
    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        model = StepModel()
        model.believe([(StepShape(tokens, tokens * tokens / 2), 100.0) for tokens in (1, 20, 400)], 100.0)
        rig.view.set_costs(time_class(rig.view.workers[0].instance), model, 512)
        taken = 0
        with contextlib.suppress(Overloaded):
            while taken < 50:
                rig.submit()
                taken += 1
        assert 5 <= taken <= 7, "ten a second, and 0.7 of the second allowed"
        await until(lambda: len(worker.requests) == taken)

    play(scenario, first_token_s=1.0)


def test_closing_ends_open_streams_and_refuses_new_ones(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1")
        card = rig.models.get("m").card
        _, (sink,) = rig.submit()
        rig.dispatcher.close()
        assert isinstance(sink.error, Draining)
        with pytest.raises(Draining):
            rig.dispatcher.submit(card, [EngineRequest(0, "r", "m", b"", SamplingParams())], [Sink()])

    play(scenario)


def test_load_reports_reach_the_view(play) -> None:
    async def scenario(rig: Rig) -> None:
        (worker,) = await rig.serving("w1")
        view = rig.view.workers[0]
        await until(lambda: view.load is not None)
        others = FrontendLoad("fe-2", 1, 3, 500, 0.0, 2000)
        load = LoadReport(
            num_running=3,
            num_waiting=1,
            waiting_prefill_tokens=500,
            kv_blocks_total=100,
            kv_blocks_free=40,
            frontends=[others],
        )
        worker.publish(load)
        await until(lambda: view.load is not None and view.load.num_running == 3)
        assert view.foreign_tokens >= 500

    play(scenario)


def test_a_registry_outage_changes_nothing(play) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.serving("w1")
        rig.cluster.apply(Outage(False, "disk full"))
        assert not rig.cluster.registry_reachable
        rig.submit()
        rig.cluster.apply(Outage(True))
        assert rig.cluster.registry_reachable

    play(scenario)


def test_a_stranger_at_a_workers_address_is_not_taken_for_it(play) -> None:
    async def scenario(rig: Rig) -> None:
        worker = ScriptedWorker("w1", rig.planes)
        rig.workers.append(worker)
        await worker.start(rig.registry)
        stranger = ScriptedWorker("w2", rig.planes)
        rig.workers.append(stranger)
        address = await stranger._listener.listen("w2", stranger._on_frame, lambda peer: None)
        assert worker._instance is not None
        record = worker._instance
        from msgspec.structs import replace

        await worker._lease.update(replace(record, worker_id="w1"))
        impostor = replace(record, worker_id="w9", request_address=address)
        await rig.registry.register(impostor)
        await until(lambda: rig.cluster.connection("w9") is not None and rig.cluster.connection("w9").last_error)
        assert "w2 answers where w9 was expected" in str(rig.cluster.connection("w9").last_error)
        assert rig.cluster.connection("w9").refuses, "that is no silence"
        assert [worker.worker_id for worker in rig.view.eligible("f1")] == ["w1"]

    play(scenario)
