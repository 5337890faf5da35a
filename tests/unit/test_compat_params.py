"""vLLM's `SamplingParams` as fields of a request."""

from headwater.compat.vllm import SamplingParams


def test_an_empty_list_of_stops_is_none() -> None:
    assert "stop" not in SamplingParams(stop=[]).body(chat=False)
    assert SamplingParams(stop=["x"]).body(chat=False)["stop"] == ["x"]


def test_log_probabilities_are_asked_for_as_each_endpoint_has_them() -> None:
    params = SamplingParams(logprobs=2)
    assert params.body(chat=False)["logprobs"] == 2
    chat = params.body(chat=True)
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 2)
