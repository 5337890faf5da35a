"""Stop strings: the same outcome for any split, nothing shown that a match takes back."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.frontend.postprocess.stop import StopMatcher, StopStrings

ALPHABET = "ab\n🙂"
stops_strategy = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the match that ends first; of several, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stops), include=include)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


@settings(deadline=None)
@given(
    pieces=st.lists(st.text(ALPHABET, max_size=6), max_size=12),
    stops=stops_strategy,
    include=st.booleans(),
)
@example(pieces=["aab", "aaab"], stops=["aaaa", "aab\n", "baaa"], include=False)
@example(pieces=["a", "b", "a", "b"], stops=["abb", "bab"], include=True)
@example(pieces=["xEN", "D"], stops=["END", "D"], include=False)
def test_any_split_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == expected("".join(pieces), stops, include)


@settings(deadline=None)
@given(text=st.text(ALPHABET, max_size=30), stops=stops_strategy)
def test_held_back_is_exactly_what_could_begin_a_match(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops), include=False)
    shown, stop = matcher.push(text)
    if stop is None:
        held = matcher.flush()
        assert shown + held == text
        could = [size for size in range(1, len(text) + 1) if any(s.startswith(text[-size:]) for s in stops)]
        assert len(held) == max(could, default=0)


def test_text_without_any_first_character_passes_at_once() -> None:
    matcher = StopMatcher(StopStrings(["###"]), include=False)
    assert matcher.push("plain words") == ("plain words", None)
    assert matcher.push("a #") == ("a ", None)
    assert matcher.push("# b") == ("## b", None)


@pytest.mark.parametrize(("include", "shown"), [(False, "one "), (True, "one END")])
def test_stop_over_several_tokens(include: bool, shown: str) -> None:
    assert run(["one", " E", "N", "D", " two"], ["END"], include) == (shown, "END")


def test_long_repetitive_stop_strings_cost_little() -> None:
    matcher = StopMatcher(StopStrings(["a" * 1000 + "b" + str(number) for number in range(32)]), include=False)
    shown, stop = matcher.push("a" * 20_000)
    assert (len(shown), stop) == (19_000, None)
