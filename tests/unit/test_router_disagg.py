"""Where a prompt is computed: the plan, the price inside it, and the static modes."""

import msgspec
import pytest

from headwater.errors import ConfigError
from headwater.frontend.prefills import Prefills
from headwater.perf.model import StepModel, StepShape
from headwater.protocol.cluster import Instance
from headwater.protocol.request import EngineRequest, SamplingParams
from headwater.router.disagg import DisaggSettings, PrefillChoice, choose_prefill
from headwater.router.request import RouteRequest
from headwater.router.view import ClusterView
from headwater.router.worker import WorkerView, time_class
from headwater.scheduler.limits import SchedulerLimits
from headwater.sim.describe import MODEL, instance
from headwater.types import Role

LIMITS = SchedulerLimits(10_000, 16, 100_000, 1 << 20, 256, 2048)


def cluster(*roles: Role, paired: bool = False) -> tuple[ClusterView, list[WorkerView]]:
    """Prefill 0.1 ms a token, a decode step 10 ms, 0.1 MB of KV a token."""
    view = ClusterView()
    model = StepModel()
    shapes = [StepShape(tokens, tokens * tokens / 2) for tokens in (64, 1024, 2048)]
    shapes += [StepShape(0, 0, number, number * 500) for number in (1, 16, 64)]
    model.believe([(shape, 0.1 * shape.prefill_tokens + 10.0 * (shape.decode_sequences > 0)) for shape in shapes], 100)
    for number, role in enumerate(roles):
        made = described(f"w{number}", role, paired)
        view.put(made)
        view.set_connected(made.worker_id, True)
    view.set_costs(time_class(described("w0", "both")), model, 2048)
    return view, [worker for worker in view.workers if worker.instance.role != "prefill"]


def described(worker_id: str, role: Role, paired: bool = False) -> Instance:
    made = instance(worker_id, LIMITS)
    card = msgspec.structs.replace(made.card, kv_bytes_per_token=100_000)
    return msgspec.structs.replace(made, role=role, card=card, paired=paired)


def choose(
    view: ClusterView, decoder: WorkerView, tokens: int, settings: DisaggSettings | None = None, loose: bool = False
) -> PrefillChoice:
    request = RouteRequest(MODEL, tokens, 100)
    return choose_prefill(settings or DisaggSettings(), request, decoder, view.prefillers(MODEL), loose)


def test_a_decode_worker_has_its_prompts_computed_elsewhere() -> None:
    view, (decoder,) = cluster("decode", "prefill", "prefill")
    choice = choose(view, decoder, 2000)
    assert choice.remote
    assert choice.reason == "the plan"
    assert len(choice.options) == 3
    assert choice.chosen.total_ms == pytest.approx(sum(choice.chosen.price))


def test_the_idle_prefill_worker_is_chosen() -> None:
    view, (decoder,) = cluster("decode", "prefill", "prefill")
    busy = view.worker("w1")
    assert busy is not None
    view.book(busy, 8000, 10)
    assert choose(view, decoder, 2000).chosen.worker_id == "w2"


def test_idle_prefill_workers_take_turns_by_what_they_were_sent() -> None:
    view, (decoder,) = cluster("decode", "prefill", "prefill", "prefill")
    chosen: list[str] = []
    for tokens in (2000, 500, 500, 500, 500):
        worker = view.worker(choose(view, decoder, tokens).chosen.worker_id)
        assert worker is not None
        chosen.append(worker.worker_id)
        view.release(view.book(worker, tokens, 1))
    assert chosen == ["w1", "w2", "w3", "w2", "w3"]


def test_what_is_left_after_the_cache_may_not_be_worth_a_hand_off() -> None:
    view, (decoder,) = cluster("decode", "prefill")
    request = RouteRequest(MODEL, 2000, 100, cached_tokens={"w0": 1990})
    choice = choose_prefill(DisaggSettings(), request, decoder, view.prefillers(MODEL), loose=False)
    assert not choice.remote
    assert choice.chosen.cached_tokens == 1990
    assert choose(view, decoder, 2000).remote


def test_without_prefill_workers_everything_is_local() -> None:
    view, workers = cluster("decode", "both")
    assert not any(choose(view, worker, 5000).remote for worker in workers)


def test_a_worker_of_both_roles_asks_for_the_price() -> None:
    view, (both,) = cluster("both", "prefill")
    assert not choose(view, both, 1000).remote, "idle: computing here saves the hand-off"
    for _ in range(20):
        view.prefilled(view.book(both, 500, 100))
    assert choose(view, both, 1000).remote, "here twenty answers would stand still"


def test_only_a_loose_plan_is_left_for_the_price() -> None:
    view, (decoder,) = cluster("decode", "prefill")
    prefiller = view.worker("w1")
    assert prefiller is not None
    for _ in range(5):
        view.book(prefiller, 8000, 10)
    assert choose(view, decoder, 1000).remote
    assert not choose(view, decoder, 1000, loose=True).remote


def test_prefill_workers_do_all_of_it_while_nobody_decodes() -> None:
    view, _ = cluster("prefill", "prefill")
    assert [worker.worker_id for worker in view.eligible(MODEL)] == ["w0", "w1"]
    assert not choose(view, view.eligible(MODEL)[0], 5000, DisaggSettings("always")).remote
    view.put(described("w0", "decode"))
    assert [worker.worker_id for worker in view.eligible(MODEL)] == ["w0"]


def test_static_modes_ask_for_no_price() -> None:
    view, (both,) = cluster("both", "prefill")
    assert choose(view, both, 50, DisaggSettings("always")).remote
    assert not choose(view, both, 9000, DisaggSettings("never")).remote
    threshold = DisaggSettings("threshold", threshold_tokens=800)
    assert [choose(view, both, tokens, threshold).remote for tokens in (799, 800)] == [False, True]


def test_a_slow_link_is_part_of_the_price() -> None:
    view, (both,) = cluster("both", "prefill")
    for _ in range(20):
        view.prefilled(view.book(both, 500, 100))
    assert choose(view, both, 1000).remote
    assert not choose(view, both, 1000, DisaggSettings(link_bytes_per_ms=1e4)).remote


@pytest.mark.parametrize("settings", [DisaggSettings(), DisaggSettings("never"), DisaggSettings("threshold", 9000)])
@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize("tokens", [20, 2000])
def test_an_engine_that_works_in_pairs_computes_no_prompt_whatever_is_asked_for(
    settings: DisaggSettings, loose: bool, tokens: int
) -> None:
    view, (decoder,) = cluster("decode", "prefill", "prefill", paired=True)
    busy = view.worker("w1")
    assert busy is not None
    view.book(busy, 8000, 10)
    choice = choose(view, decoder, tokens, settings, loose)
    assert (choice.remote, choice.chosen.worker_id) == (True, "w2")


def test_a_prefill_worker_stands_in_for_decoders_that_are_gone_unless_it_works_in_pairs() -> None:
    alone, _ = cluster("prefill")
    assert [worker.worker_id for worker in alone.eligible(MODEL)] == ["w0"]
    paired, _ = cluster("prefill", paired=True)
    assert paired.eligible(MODEL) == []


def test_a_choice_can_be_shown() -> None:
    view, (decoder,) = cluster("decode", "prefill")
    shown = choose(view, decoder, 2000).describe()
    assert shown["remote"] is True
    assert msgspec.json.decode(msgspec.json.encode(shown)) == shown


def test_a_request_says_what_its_prompt_would_cost_where_it_decodes() -> None:
    view, (decoder,) = cluster("decode", "prefill")
    prefills, asked = Prefills(view, DisaggSettings()), RouteRequest(MODEL, 2000, 100)
    choice = prefills.choose(asked, decoder)
    assert choice is not None
    request = EngineRequest(1, "r", MODEL, b"", SamplingParams())
    prefills.name(choice, [request])
    assert request.prefill is not None
    assert request.prefill.here_ms == choice.options[0].total_ms > 0
    assert request.prefill.expected_ms == choice.chosen.price.own_ms + choice.chosen.price.handoff_ms


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="no way to decide"):
        DisaggSettings("sometimes")  # type: ignore[arg-type]
