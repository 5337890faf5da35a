"""Peers of adjacent minor versions work together: ours with one that speaks 1.0, from either side.

The structs of 1.0 are written down here as they were, so that a change that breaks them is noticed.
"""

import asyncio
from typing import Any

import msgspec
import pytest

from headwater.errors import Unavailable
from headwater.protocol.cluster import Instance
from headwater.protocol.events import LoadReport
from headwater.protocol.frames import Abort, Drain, FrontendFrame, StepFrame, Submit, WorkerFrame
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.runtime.conformance import eventually
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.registry.conformance import example_instance
from headwater.runtime.requests.inproc_transport import InprocAcceptor, InprocDialer
from headwater.runtime.wire import join_frames


class OldSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    structured: Any = None


class OldRequest(msgspec.Struct, omit_defaults=True):
    stream: int
    request_id: str
    model: str
    prompt: bytes
    sampling: OldSampling
    block_ids: bytes = b""
    namespace: bytes = b""
    resumed_tokens: bytes = b""
    priority: int = 0
    deadline: float | None = None
    arrival: float = 0.0
    session_id: str | None = None
    adapter: str | None = None
    expected_cached_tokens: int = 0


class OldOutput(msgspec.Struct, array_like=True):
    stream: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int | None = None
    logprobs: Any = None
    error: Any = None


class OldHello(msgspec.Struct, frozen=True, tag="hello"):
    frontend_id: str
    version: tuple[int, int]


class OldSubmit(msgspec.Struct, frozen=True, tag="sub"):
    requests: list[OldRequest]


class OldAbort(msgspec.Struct, frozen=True, tag="abort"):
    streams: list[int]


class OldFetch(msgspec.Struct, frozen=True, tag="fetch"):
    digest: str
    offset: int
    length: int


class OldPing(msgspec.Struct, frozen=True, tag="ping"):
    nonce: int


class OldWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    worker_id: str
    version: tuple[int, int]


class OldStep(msgspec.Struct, frozen=True, tag="step"):
    outputs: list[OldOutput]


class OldLoad(msgspec.Struct, frozen=True, omit_defaults=True, tag="load"):
    num_running: int
    num_waiting: int
    waiting_prefill_tokens: int
    kv_blocks_total: int
    kv_blocks_free: int
    steps: int = 0
    timings: list[Any] = []


OldFrontendFrame = OldHello | OldSubmit | OldAbort | OldFetch | OldPing
OldWorkerFrame = OldWelcome | OldStep

encode = msgspec.msgpack.encode


def request(stream: int) -> EngineRequest:
    return EngineRequest(
        stream, "r", "m", b"\1\0\0\0", SamplingParams(max_tokens=3, seed=7), resumed_tokens=b"\2\0\0\0"
    )


def test_our_frontend_with_an_older_worker() -> None:
    async def main() -> None:
        planes = InprocPlanes()
        heard: list[OldFrontendFrame] = []
        acceptor = InprocAcceptor(planes.network)

        def on_message(peer: bytes, message: bytes) -> None:
            for frame in msgspec.msgpack.decode(message, type=list[OldFrontendFrame]):
                heard.append(frame)
                if isinstance(frame, OldHello):
                    acceptor.transmit(peer, join_frames([encode(OldWelcome("old", (1, 0)))]))
                if isinstance(frame, OldSubmit):
                    outputs = [OldOutput(each.stream, [5, 6], num_cached_tokens=16) for each in frame.requests]
                    acceptor.transmit(peer, join_frames([encode(OldStep(outputs))]))

        address = acceptor.open(on_message, lambda peer: None)
        got: list[WorkerFrame] = []
        link = planes.link(address, "new")
        assert await link.connect(got.append, lambda error: None, 5) == "old"
        link.send(Submit([request(3)]))
        link.send(Abort([3]))
        with pytest.raises(Unavailable, match=r"speaks protocol 1\.0 and is not understood to drain, which is 1\.1"):
            link.send(Drain(5.0))
        await eventually(lambda: bool(got), "the step")
        assert got == [StepFrame([SequenceOutput(3, [5, 6], num_cached_tokens=16)])]
        asked = next(frame for frame in heard if isinstance(frame, OldSubmit)).requests[0]
        assert (asked.stream, asked.sampling.seed, asked.resumed_tokens) == (3, 7, b"\2\0\0\0")
        await link.close()
        acceptor.close()

    asyncio.run(main())


def test_our_worker_with_an_older_frontend() -> None:
    async def main() -> None:
        planes = InprocPlanes()
        heard: list[tuple[bytes, FrontendFrame]] = []
        listener = planes.listener()
        address = await listener.listen("new", lambda peer, frame: heard.append((peer, frame)), lambda peer: None)
        got: list[OldWorkerFrame] = []
        dialer = InprocDialer(planes.network, address)
        dialer.open(
            lambda message: got.extend(msgspec.msgpack.decode(message, type=list[OldWorkerFrame])), lambda reason: None
        )
        dialer.transmit(join_frames([encode(OldHello("old", (1, 0)))]))
        old = OldRequest(3, "r", "m", b"\1\0\0\0", OldSampling(max_tokens=3, seed=7))
        dialer.transmit(join_frames([encode(OldSubmit([old])), encode(OldAbort([3]))]))
        await eventually(lambda: len(heard) == 2, "both frames")
        submitted = heard[0][1]
        assert isinstance(submitted, Submit)
        assert submitted.requests[0].sampling == SamplingParams(max_tokens=3, seed=7)
        listener.send(heard[0][0], StepFrame([SequenceOutput(3, [5], "stop", stop_token_id=2)]))
        await eventually(lambda: len(got) == 2, "welcome and step")
        step = got[1]
        assert isinstance(step, OldStep)
        assert step.outputs[0] == OldOutput(3, [5], "stop", stop_token_id=2)
        dialer.close()
        await listener.close()

    asyncio.run(main())


def test_records_and_reports_are_read_by_the_other_version() -> None:
    load = LoadReport(1, 2, 3, 100, 90, steps=7, turns=9)
    old = msgspec.msgpack.decode(encode(load), type=OldLoad)
    assert (old.num_running, old.steps) == (1, 7)
    assert msgspec.msgpack.decode(encode(old), type=LoadReport).steps == 7
    record = msgspec.json.decode(msgspec.json.encode(example_instance()))
    record["something_new"] = 1
    assert msgspec.json.decode(msgspec.json.encode(record), type=Instance) == example_instance()
