"""Step times judged by when tokens come."""

from headwater.engines.external import OpenStream
from headwater.engines.pace import Pace
from headwater.protocol.events import StepTiming
from headwater.protocol.request import EngineRequest, RemotePrefill, SamplingParams, SequenceOutput

CHUNK = 64


def open_stream(number: int, prompt: int, generated: int = 0, *, cached: int = 0) -> OpenStream:
    request = EngineRequest(number, f"r{number}", "m", bytes(4 * prompt), SamplingParams(max_tokens=9))
    request.expected_cached_tokens = cached
    return OpenStream(request, prompt, 1.0, num_generated=generated)


def tokens(*numbers: int) -> list[SequenceOutput]:
    return [SequenceOutput(number, [5]) for number in numbers]


def test_a_burst_of_decodes_took_the_time_since_the_one_before() -> None:
    pace, streams = Pace(CHUNK), {1: open_stream(1, 10, 2), 2: open_stream(2, 20, 1)}
    assert pace.observe(tokens(1, 2), streams, 5.0) is None, "nothing came before"
    assert pace.observe([], streams, 5.1) is None
    assert pace.observe(tokens(1, 2), streams, 5.25) == StepTiming(0, 0, 2, 12 + 21, 250.0)
    assert pace.observe(tokens(1), streams, 7.5) is None, "too long for a step"
    pace.forget()
    assert pace.observe(tokens(1), streams, 7.6) is None


def test_a_burst_beside_a_prompt_says_nothing() -> None:
    pace, streams = Pace(CHUNK), {1: open_stream(1, 10, 2), 2: open_stream(2, 20)}
    assert pace.observe(tokens(1), streams, 5.0) is None
    assert pace.observe(tokens(1), streams, 5.1) is None
    assert pace.observe(tokens(1, 2), streams, 5.2) is None


def test_a_prompt_alone_took_the_time_since_it_was_sent() -> None:
    assert Pace(CHUNK).observe(tokens(1), {1: open_stream(1, 10, cached=4)}, 1.5) == StepTiming(
        6, 6 * 4 + 6 * 7 // 2, 0, 0, 500.0
    )
    assert Pace(CHUNK).observe(tokens(1), {1: open_stream(1, CHUNK)}, 1.5) is not None
    assert Pace(CHUNK).observe(tokens(1), {1: open_stream(1, CHUNK + 1)}, 1.5) is None, "in several steps"
    assert Pace(CHUNK).observe(tokens(1), {1: open_stream(1, 10, cached=10)}, 1.5) is None
    elsewhere = open_stream(1, 10)
    elsewhere.request.prefill = RemotePrefill("w", "tcp://w")
    assert Pace(CHUNK).observe(tokens(1), {1: elsewhere}, 1.5) is None
