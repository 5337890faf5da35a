"""The default policy's choice, and that its explanation tells what was weighed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_router_view import connected_view, instance

from headwater.perf.model import StepModel, StepShape
from headwater.protocol.events import BlocksStored
from headwater.router.affinity import SessionAffinity
from headwater.router.delay import Delay
from headwater.router.policy import PolicySettings, PricingPolicy
from headwater.router.request import RouteRequest
from headwater.router.router import Router
from headwater.router.view import ClusterView

BLOCKS = b"".join(number.to_bytes(8, "little") + bytes(8) for number in range(1, 65))


def request(num_tokens: int = 1030, *, blocks: int = 64, **rest: object) -> RouteRequest:
    return RouteRequest("f1", num_tokens, 50, block_ids=BLOCKS[: 16 * blocks], **rest)


def view_of(num_workers: int) -> ClusterView:
    return connected_view(*(instance(f"w{number}") for number in range(num_workers)))


def learn(view: ClusterView, chunk_tokens: int = 8192) -> StepModel:
    """5 ms a step, 0.05 a prompt token, 0.1 a decoding sequence, 0.01 per thousand tokens of its context."""
    model = StepModel()
    shapes = [StepShape(tokens, tokens * tokens / 2) for tokens in (1, 100, 1000, 4000, 8000)]
    shapes += [StepShape(0, 0, sequences, 1000.0 * sequences) for sequences in (1, 10, 40)]
    shapes += [StepShape(0, 0, 10, 90_000), StepShape(1000, 0, 10, 10_000), StepShape(2000, 8e6)]
    for _ in range(20):
        for shape in shapes:
            decode_ms = 0.1 * shape.decode_sequences + 1e-5 * shape.decode_context_tokens
            model.observe(shape, 5 + 0.05 * shape.prefill_tokens + decode_ms)
    view.set_costs("/mocker/f1", model, chunk_tokens)
    return model


def test_the_worker_that_holds_the_prefix_is_chosen_until_its_queue_costs_more() -> None:
    view = view_of(4)
    learn(view)
    router = Router(view, Delay())
    view.apply("w2", [BlocksStored(BLOCKS)])
    chosen = []
    for _ in range(40):
        asked = request()
        worker, decision = router.route(asked, "m")
        chosen.append(worker.worker_id)
        view.book(worker, 1030, 50, decision.cached_tokens, asked.keys)
    assert chosen[:3] == ["w2"] * 3
    assert len(set(chosen)) > 1, "a hot prefix replicates by itself"


def test_a_cold_prefix_comes_home_and_its_siblings_stick_together() -> None:
    view = view_of(8)
    router = Router(view, Delay())
    asked = request()
    first, decision = router.route(asked, "m")
    assert first.worker_id == asked.home
    view.book(first, 1030, 50, decision.cached_tokens, asked.keys)
    sibling = request()
    second, decision = router.route(sibling, "m")
    assert second is first
    assert decision.cached_tokens == 1024


def test_a_home_that_is_lost_goes_to_another_and_most_homes_stay() -> None:
    view = view_of(8)
    router = Router(view, Delay())
    names = [f"group-{number}" for number in range(200)]

    def homes() -> dict[str, str | None]:
        found = {}
        for name in names:
            asked = request(prefix_group=name)
            router.look_up(asked)
            found[name] = asked.home
        return found

    before = homes()
    assert len(set(before.values())) == 8
    view.set_connected("w3", False)
    after = homes()
    assert "w3" not in after.values()
    assert all(after[name] == home for name, home in before.items() if home != "w3")


@given(
    loads=st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 64)), min_size=2, max_size=6),
    decode_share=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_winner_is_the_candidate_with_the_lowest_total(loads: list[tuple[int, int]], decode_share: float) -> None:
    view = view_of(len(loads))
    learn(view)
    for number, (tokens, blocks) in enumerate(loads):
        if blocks:
            view.apply(f"w{number}", [BlocksStored(BLOCKS[: 16 * blocks])])
        if tokens:
            view.book(view.workers[number], tokens, 100)
    policy = Delay.configured(PolicySettings(decode_share))
    assert isinstance(policy, PricingPolicy)
    router = Router(view, policy)
    asked = request()
    _, decision = router.route(asked, "m")
    candidates = {candidate.worker_id: candidate for candidate in decision.explain()}
    assert len(candidates) == decision.num_candidates == len(loads)
    best = min(candidate.total for candidate in candidates.values())
    assert candidates[decision.winner].total == pytest.approx(best, rel=1e-9)
    prices = policy.prices(asked, view.eligible("f1"))
    assert prices == pytest.approx([candidates[f"w{number}"].total for number in range(len(loads))], rel=1e-9)
    assert {"first_token_ms", "own_decode_ms", "stall_ms", "slow_down_ms", "worker_time_ms"} <= set(
        candidates[decision.winner].parts
    )


def test_a_latency_sensitive_request_weighs_the_first_token_more() -> None:
    """One worker answers sooner, the other decodes faster: who is in a hurry takes the first."""
    view = view_of(2)
    learn(view)
    crowd = [view.book(view.workers[0], 4000, 100) for _ in range(60)]
    for booking in crowd:
        view.prefilled(booking)
    view.apply("w0", [BlocksStored(BLOCKS)])
    policy = Delay()
    patient, hurried = (policy.prices(looked_up(view, value), view.eligible("f1")) for value in (1.0, 10.0))
    assert hurried[0] - hurried[1] < patient[0] - patient[1]


def looked_up(view: ClusterView, sensitivity: float) -> RouteRequest:
    asked = request(latency_sensitivity=sensitivity)
    view.look_up(asked)
    return asked


def test_prediction_of_the_first_token_needs_known_step_times() -> None:
    view = view_of(1)
    router = Router(view, Delay())
    asked = request()
    worker, _ = router.route(asked, "m")
    assert router.first_token_ms(asked, worker) is None
    model = learn(view)
    assert router.first_token_ms(asked, worker) == pytest.approx(model.prefill_ms(1030))
    view.book(worker, 1000, 10)
    waiting = model.decode_step_ms(1, 1000)
    pairs = 1000 * 1001 / 2 + 1030 * 1031 / 2
    both = model.step_ms(StepShape(2030, pairs))
    assert router.first_token_ms(asked, worker) == pytest.approx(both + waiting)


def test_sessions_come_back_softly_or_for_good() -> None:
    view = view_of(4)
    learn(view)
    soft = Router(view, Delay(), SessionAffinity("soft", ttl_s=10))
    hard = Router(view, Delay(), SessionAffinity("hard", ttl_s=10))
    for router in (soft, hard):
        bound, _ = router.route(request(blocks=0, session_id="s"), "m")
        again, _ = router.route(request(blocks=0, session_id="s"), "m")
        assert again is bound
        view.book(bound, 20_000, 10)
    elsewhere, _ = soft.route(request(blocks=0, session_id="s"), "m")
    assert elsewhere.booked_prefill_tokens == 0, "a small discount does not outweigh a queue"
    stuck = hard.affinity.worker_of("s", 0.0)
    worker, _ = hard.route(request(blocks=0, session_id="s"), "m")
    assert worker.worker_id == stuck
    assert worker.booked_prefill_tokens > 0
    view.set_connected(worker.worker_id, False)
    other, _ = hard.route(request(blocks=0, session_id="s"), "m")
    assert other is not worker
