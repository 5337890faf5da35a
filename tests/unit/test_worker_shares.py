"""What each frontend has at a worker, against a plain recount."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headwater.protocol.events import FrontendLoad
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.worker.shares import FrontendShares

Step = tuple[str, int, int, int]


def request(tokens: int, cached: int) -> EngineRequest:
    return EngineRequest(0, "r", "m", b"\0\0\0\0" * tokens, SamplingParams(), expected_cached_tokens=cached)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "token", "finish", "abort", "gone"]),
            st.integers(0, 2),
            st.integers(1, 500),
            st.integers(-10, 600),
        ),
        max_size=60,
    )
)
def test_sums_are_those_of_the_open_sequences(steps: Sequence[Step]) -> None:
    shares = FrontendShares()
    kept: dict[int, tuple[int, EngineRequest, bool]] = {}
    for handle, (what, frontend, tokens, cached) in enumerate(steps):
        known = list(kept)[tokens % len(kept)] if kept else 10_000
        if what == "open":
            kept[handle] = (frontend, request(tokens, cached), True)
            shares.opened(b"%d" % frontend, handle, kept[handle][1])
        elif what == "token":
            shares.stepped([SequenceOutput(known, [1])])
            if known in kept:
                kept[known] = (*kept[known][:2], False)
        elif what == "finish":
            shares.stepped([SequenceOutput(known, [1], "stop")])
            kept.pop(known, None)
        elif what == "abort":
            shares.closed([known, 20_000])
            kept.pop(known, None)
        else:
            own = [number for number, (owner, _, _) in kept.items() if owner == frontend]
            shares.closed(own)
            shares.gone(b"%d" % frontend)
            for number in own:
                del kept[number]
        assert sorted(shares.loads(lambda peer: peer.decode()), key=lambda load: load.frontend_id) == recount(kept)


def recount(kept: dict[int, tuple[int, EngineRequest, bool]]) -> list[FrontendLoad]:
    loads = []
    for frontend in range(3):
        mine = [(asked, prefilling) for owner, asked, prefilling in kept.values() if owner == frontend]
        if not mine:
            continue
        pairs = 0.0
        new_tokens = context = 0
        for asked, prefilling in mine:
            tokens = len(asked.prompt) // 4
            cached = max(0, min(asked.expected_cached_tokens, tokens))
            context += tokens
            if prefilling:
                new_tokens += tokens - cached
                pairs += sum(range(cached + 1, tokens + 1))
        prefilling_ones = sum(prefilling for _, prefilling in mine)
        loads.append(
            FrontendLoad(str(frontend), prefilling_ones, len(mine) - prefilling_ones, new_tokens, pairs, context)
        )
    return loads
