"""vLLM's offline interface on our own engine with the demo model."""

from collections.abc import Iterator

import pytest

from headwater.compat.vllm import LLM, SamplingParams, StructuredOutputsParams
from headwater.errors import ConfigError, ContextTooLong, InvalidRequest
from headwater.weights import ResolvedModel

pytestmark = pytest.mark.model

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(demo_model: ResolvedModel) -> Iterator[LLM]:
    with LLM(num_kv_blocks=64, max_num_seqs=4, threads=1, enforce_eager=True) as made:
        yield made


def test_chat(llm: LLM) -> None:
    (answer,) = llm.chat(CAPITAL, SamplingParams(temperature=0, max_tokens=24))
    (output,) = answer.outputs
    assert "Paris" in output.text
    assert (output.finish_reason, output.stop_reason, answer.finished) == ("stop", None, True)
    assert answer.prompt is not None
    assert "capital of France" in answer.prompt
    two = llm.chat([CAPITAL, CAPITAL], GREEDY)
    assert [one.outputs[0].token_ids for one in two] == [output.token_ids[:8]] * 2


def test_texts_and_ids_alike(llm: LLM) -> None:
    text = "The capital of France is"
    (by_text,) = llm.generate(text, GREEDY)
    ids = by_text.prompt_token_ids
    for prompts in (ids, [ids], {"prompt": text}, [{"prompt_token_ids": ids}]):
        (again,) = llm.generate(prompts, GREEDY)
        assert again.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert len(by_text.outputs[0].token_ids) == 8
    assert by_text.outputs[0].finish_reason == "length"


def test_many_prompts_keep_their_order(llm: LLM) -> None:
    prompts = [f"{number} and {number} make" for number in range(24)]
    answers = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=1 + n % 3) for n in range(24)])
    assert [answer.prompt for answer in answers] == prompts
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [1 + n % 3 for n in range(24)]
    assert len({answer.request_id for answer in answers}) == 24


def test_choices_stops_and_logprobs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (answer,) = llm.generate("Once upon a time", SamplingParams(n=3, seed=1, max_tokens=6, logprobs=2))
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    for output in answer.outputs:
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        chosen = [position[token] for position, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert output.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
        assert "".join(one.decoded_token or "" for one in chosen) == output.text
    engine, aborted = llm._thread._engine, list[int]()
    abort = engine.abort
    monkeypatch.setattr(engine, "abort", lambda streams: (aborted.extend(streams), abort(streams)))
    (stopped,) = llm.generate("Count: 1, 2, 3,", SamplingParams(temperature=0, max_tokens=32, stop=[" 5"]))
    assert stopped.outputs[0].stop_reason == " 5"
    assert " 5" not in stopped.outputs[0].text
    assert len(aborted) == 1, "the engine does not go on behind a stop string"


def test_structured(llm: LLM) -> None:
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["red", "blue"]))
    (answer,) = llm.generate("Roses are", params)
    assert answer.outputs[0].text in ("red", "blue")


def test_what_is_not_offered_is_refused(llm: LLM) -> None:
    for params in (SamplingParams(prompt_logprobs=1), SamplingParams(bad_words=["x"])):
        with pytest.raises(InvalidRequest, match="not offered"):
            llm.generate("x", params)
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate("x", SamplingParams(temperature=-1))
    with pytest.raises(ContextTooLong):
        llm.generate([[5] * 5000], GREEDY)
    with pytest.raises(InvalidRequest, match="2 sampling parameters for 1"):
        llm.generate("x", [GREEDY, GREEDY])
    with pytest.raises(InvalidRequest, match="media"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": b""}}, GREEDY)
    with pytest.raises(ConfigError, match="speculative_config"):
        LLM(speculative_config={"model": "x"})
    with pytest.raises(InvalidRequest, match="prompts is of type int"):
        llm.generate(5, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"LLM\.beam_search is not offered here"):
        llm.beam_search(["x"], None)
    assert not hasattr(llm, "embed")
    assert llm.generate("still", GREEDY)[0].finished


def test_the_models_own_sampling_is_the_default(llm: LLM) -> None:
    assert isinstance(llm.get_default_sampling_params(), SamplingParams)
    assert llm.generate([], GREEDY) == []
