"""One sequence's text: ends, counts, and log probabilities that stay with their text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.frontend.openai.model import ServedModel
from headwater.frontend.postprocess.sequence import Delta, SequenceText, TextOptions
from headwater.frontend.postprocess.stop import StopMatcher, StopStrings
from headwater.protocol.request import SequenceOutput, TokenLogprobs
from headwater.weights import ResolvedModel
from openai_twin import served_demo, token_ids


@pytest.fixture(scope="module")
def model(demo_model: ResolvedModel) -> ServedModel:
    return served_demo(demo_model)


def sequence(model: ServedModel, stops: list[str] | None = None, **options: object) -> SequenceText:
    chosen = TextOptions(**options)  # type: ignore[arg-type]
    matcher = StopMatcher(StopStrings(stops), include=chosen.include_stop) if stops else None
    return SequenceText(chosen, model.detokenizer(b"", skip_special_tokens=True), matcher)


def step(
    ids: list[int], finish: str | None = None, *, logged: bool = False, stop_id: int | None = None
) -> SequenceOutput:
    entries = [TokenLogprobs(-float(token_id), 1) for token_id in ids] if logged else None
    return SequenceOutput(1, ids, finish, stop_token_id=stop_id, logprobs=entries)


def run(text: SequenceText, ids: list[int], sizes: list[int], *, logged: bool = False) -> list[Delta]:
    """Steps of the given sizes until the ids or the sequence end."""
    deltas: list[Delta] = []
    start = 0
    for size in [*sizes, len(ids)]:
        part = ids[start : start + size]
        start += size
        deltas.append(text.push(step(part, "length" if start >= len(ids) else None, logged=logged)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def test_natural_end_counts_the_end_token(model: ServedModel) -> None:
    text = sequence(model)
    ids = token_ids(model, "Hello there")
    assert text.push(step(ids)).text == "Hello there"
    last = text.push(step([], "stop", stop_id=2))
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", None)
    assert text.num_tokens == len(ids) + 1
    assert not text.stopped


def test_stop_token_that_the_client_named_is_the_reason(model: ServedModel) -> None:
    text = sequence(model, stop_token_ids=frozenset((28,)))
    assert text.push(step([], "stop", stop_id=28)).stop_reason == 28


def test_stop_token_is_written_on_request(model: ServedModel) -> None:
    full_stop = token_ids(model, ".")[0]
    text = sequence(model, include_stop=True, stop_token_ids=frozenset((full_stop,)))
    delta = text.push(step(token_ids(model, "Done"), "stop", stop_id=full_stop))
    assert (delta.text, delta.stop_reason) == ("Done.", full_stop)


def test_stop_string_ends_it_at_once_and_drops_later_tokens(model: ServedModel) -> None:
    text = sequence(model, ["\n\n"])
    first, second = token_ids(model, "one\n"), token_ids(model, "\ntwo three")
    delta = text.push(step(first + second))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("one", "stop", "\n\n")
    assert text.stopped
    assert text.num_tokens == len(delta.token_ids) < len(first + second)


def test_stop_string_that_would_have_come_at_the_end_is_given_back(model: ServedModel) -> None:
    text = sequence(model, ["END"])
    assert text.push(step(token_ids(model, "the EN"))).text == "the "
    assert text.push(step([], "length")).text == "EN"


def test_stop_strings_wait_for_min_tokens(model: ServedModel) -> None:
    ids = token_ids(model, "a b a b a b")
    text = sequence(model, [" b"], min_tokens=3)
    deltas = run(text, ids, [1] * len(ids))
    assert "".join(delta.text for delta in deltas) == "a b a"
    assert text.num_tokens == 4


def test_unfinished_character_at_the_end_becomes_a_replacement(model: ServedModel) -> None:
    text = sequence(model)
    ids = token_ids(model, "ok 🜲")[:-1]
    assert "".join(delta.text for delta in run(text, ids, [1] * len(ids))) == "ok \ufffd"


@settings(deadline=None)
@given(
    body=st.text("ab 🙂é\n", max_size=30),
    stops=st.lists(st.sampled_from(["ab", "🙂", "b\n", " a"]), max_size=2),
    sizes=st.lists(st.integers(1, 4), max_size=20),
)
def test_logged_tokens_are_those_whose_text_is_shown(
    model: ServedModel, body: str, stops: list[str], sizes: list[int]
) -> None:
    ids = token_ids(model, body)
    if not ids:
        return
    deltas = run(sequence(model, stops), ids, sizes, logged=True)
    shown = "".join(delta.text for delta in deltas)
    logged = [entry for delta in deltas for entry in delta.logged]
    stopped = deltas[-1].finish_reason == "stop"
    assert [entry.token_id for entry in logged] == ids[: len(logged)]
    assert all(entry.logprobs.logprob == -float(entry.token_id) for entry in logged)
    assert stopped or len(logged) == len(ids)
    offsets = [entry.offset for entry in logged]
    assert offsets == sorted(offsets)
    assert not stopped or all(offset < len(shown) for offset in offsets)
    for number, offset in enumerate(offsets):
        before = model.tokenizer.decode(ids[:number], skip_special_tokens=True).rstrip("\ufffd")
        assert len(before) == offset


def test_logged_tokens_leave_with_their_text(model: ServedModel) -> None:
    text = sequence(model, ["END"])
    held = text.push(step(token_ids(model, " EN"), logged=True))
    assert (held.text, [entry.offset for entry in held.logged]) == (" ", [0])
    let_go = text.push(step(token_ids(model, "ough"), logged=True))
    assert let_go.text == "ENough"
    assert len(let_go.logged) == len(token_ids(model, "ough"))
