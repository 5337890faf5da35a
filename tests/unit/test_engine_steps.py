"""What a step of an engine that tells its numbers of tokens is reckoned to have computed."""

from headwater.engines.external import OpenStream
from headwater.engines.steps import PrefillProgress
from headwater.protocol.events import StepTiming
from headwater.protocol.request import EngineRequest, SamplingParams


def open_stream(number: int, prompt: int, generated: int = 0, *, cached: int = 0) -> OpenStream:
    request = EngineRequest(number, f"r{number}", "m", bytes(4 * prompt), SamplingParams(max_tokens=9))
    request.expected_cached_tokens = cached
    return OpenStream(request, prompt, 1.0, num_generated=generated)


def test_decodes_attend_to_all_that_they_have() -> None:
    streams = {1: open_stream(1, 10, 2), 2: open_stream(2, 20, 1)}
    assert PrefillProgress().timing(0, 2, 5.0, streams) == StepTiming(0, 0, 2, 12 + 21, 5.0)


def test_prompts_are_computed_in_the_order_of_arrival_and_go_on_where_they_were() -> None:
    progress, streams = PrefillProgress(), {1: open_stream(1, 10, cached=4), 2: open_stream(2, 20)}
    assert progress.timing(8, 0, 5.0, streams) == StepTiming(8, 6 * 4 + 21 + 3, 0, 0, 5.0)
    assert progress.timing(8, 0, 5.0, streams) == StepTiming(8, 8 * 2 + 36, 0, 0, 5.0)
    progress.timing(0, 0, 5.0, streams)
    assert progress.timing(2, 0, 5.0, streams) == StepTiming(2, 2 * 4 + 3, 0, 0, 5.0), "nothing was left to compute"


def test_prompts_that_are_done_are_forgotten_also_while_others_follow() -> None:
    progress = PrefillProgress()
    for number in range(100):
        progress.timing(10, 0, 5.0, {number: open_stream(number, 10)})
    assert len(progress._done) == 1
