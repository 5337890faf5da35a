"""Who does not move on: bounds from expected and seen steps, own stalls, repeated reports."""

import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from test_runtime_cpu_wait import Threads

from headwater.frontend.connection import WorkerConnection
from headwater.frontend.starved import StarvedHere
from headwater.frontend.vigil import Vigil, VigilLimits, longest_silence_ms
from headwater.perf.model import StepModel, StepShape
from headwater.protocol.events import LoadReport, StepTiming
from headwater.router.view import ClusterView
from headwater.router.worker import WorkerView, time_class
from headwater.runtime.cpu_wait import CpuWait
from headwater.runtime.registry.conformance import example_instance

LIMITS = VigilLimits(hang_timeout_s=2.0, unknown_timeout_s=30.0, canary_interval_s=10.0, look_s=0.25)
REPORT = LoadReport(1, 0, 0, 100, 90)


def watched(step_ms: float | None = 10.0) -> tuple[Vigil, WorkerView]:
    view = ClusterView()
    for worker_id in ("w", "x"):
        view.put(example_instance(worker_id, max_num_batched_tokens=512))
        view.set_connected(worker_id, True)
    worker = view.worker("w")
    assert worker is not None
    if step_ms is not None:
        model = StepModel()
        for sequences in (1, 2, 4, 8):
            model.believe([(StepShape(decode_sequences=sequences, decode_context_tokens=100), step_ms)], 100.0)
        view.set_costs(time_class(worker.instance), model, 512)
    vigil = Vigil(view, LIMITS)
    vigil.add("w", 0.0)
    return vigil, worker


def busy(vigil: Vigil, worker: WorkerView) -> None:
    vigil._view.book(worker, 100, 10)


def test_an_idle_worker_never_hangs() -> None:
    vigil, _ = watched()
    assert vigil.hanging(1000.0) == []


@pytest.mark.parametrize(("step_ms", "least_s"), [(10.0, 2.0), (900.0, 4.5), (None, 30.0)])
def test_the_bound_is_five_steps_or_the_floor(step_ms: float | None, least_s: float) -> None:
    vigil, worker = watched(step_ms)
    busy(vigil, worker)
    bound_s = vigil.bound_s(worker)
    assert least_s <= bound_s <= 2.5 * least_s, "five steps, of which one may prefill besides"
    assert vigil.hanging(100.0) == [], "its work has just come"
    assert vigil.hanging(100.0 + bound_s - 0.3) == []
    ((found, silent_s),) = vigil.hanging(100.0 + bound_s + 0.3)
    assert found == "w"
    assert silent_s == pytest.approx(bound_s + 0.3)
    assert step_ms is None or longest_silence_ms(worker) >= step_ms * 0.9


def test_slow_steps_seen_of_late_widen_the_bound_for_a_while() -> None:
    vigil, worker = watched()
    busy(vigil, worker)
    slow = msgspec.structs.replace(REPORT, steps=1, turns=1, timings=[StepTiming(0, 0, 1, 100, 1000.0)])
    vigil.reported("w", slow, 10.0)
    assert vigil.bound_s(worker) == pytest.approx(5.0)
    vigil.reported("w", msgspec.structs.replace(REPORT, steps=2, turns=2), 10.0)
    assert 4.5 < vigil.bound_s(worker) < 5.0
    for turn in range(3, 103):
        vigil.reported("w", msgspec.structs.replace(REPORT, steps=turn, turns=turn), 10.0)
    assert vigil.bound_s(worker) == pytest.approx(2.0)


def test_steps_and_turns_of_the_loop_are_signs_of_life_and_repetitions_are_not() -> None:
    vigil, worker = watched()
    busy(vigil, worker)
    vigil.hanging(0.0)
    for second in range(1, 10):
        vigil.reported("w", msgspec.structs.replace(REPORT, turns=second), float(second))
    assert vigil.hanging(10.0) == []
    for second in range(10, 13):
        vigil.reported("w", msgspec.structs.replace(REPORT, turns=9), float(second))
    assert vigil.hanging(12.0)
    vigil.stepped("w", 12.0)
    assert vigil.hanging(12.5) == []


def test_an_own_stall_is_nobodys_fault() -> None:
    vigil, worker = watched()
    busy(vigil, worker)
    vigil.hanging(0.0)
    vigil.forgive(10.0, 10.5)
    assert vigil.hanging(11.0) == []
    assert vigil.hanging(12.5)
    vigil.stepped("w", 20.0)
    vigil.forgive(8.0, 20.1)
    assert vigil.hanging(21.5) == []
    assert vigil.hanging(22.0), "it was heard of after the stall, and is silent since then"
    idle, _ = watched()
    idle.forgive(5.0, 6.0)
    assert idle.due_for_canary(14.0) == []
    assert idle.due_for_canary(15.0) == ["w"]


def test_time_without_a_processor_is_no_silence_up_to_a_limit() -> None:
    vigil, worker = watched()
    busy(vigil, worker)
    vigil.hanging(0.0)
    vigil.reported("w", REPORT, 0.0)
    for starved_s in (0.5, 1.5, 2.5):
        vigil.reported("w", msgspec.structs.replace(REPORT, starved_ms=1e3 * starved_s), 0.5 + starved_s)
    assert vigil.hanging(4.0) == [], "silent for 4 s, of which it was not let for 2.5 s"
    ((_, silent_s),) = vigil.hanging(4.5)
    assert silent_s == pytest.approx(2.0), "it went on for 2 s without being held up, and said nothing"
    vigil.reported("w", msgspec.structs.replace(REPORT, turns=1), 5.0)
    assert vigil.hanging(6.5) == []
    assert vigil.hanging(7.0), "another silence, of which nothing is excused: stopped, for instance"
    vigil.reported("w", msgspec.structs.replace(REPORT, turns=1, starved_ms=1e6), 7.0)
    assert vigil.hanging(14.0) == []
    assert vigil.hanging(15.0), "there is an end to every excuse"


def test_a_worker_that_owes_a_canary_an_answer_is_judged_like_one_at_work() -> None:
    vigil, _ = watched()
    vigil.reported("w", REPORT, 99.0)
    vigil.asked("w", 100.0)
    assert vigil.hanging(101.5) == []
    vigil.reported("w", msgspec.structs.replace(REPORT, starved_ms=1000.0), 101.5)
    assert vigil.hanging(102.5) == []
    assert vigil.hanging(103.0)
    vigil.answered("w")
    assert vigil.hanging(104.0) == []


def test_canaries_are_due_when_idle_and_again_after_an_interval() -> None:
    vigil, worker = watched()
    assert vigil.due_for_canary(9.0) == []
    assert vigil.due_for_canary(10.0) == ["w"]
    assert vigil.due_for_canary(15.0) == []
    vigil.reported("w", msgspec.structs.replace(REPORT, steps=5), 18.0)
    assert vigil.due_for_canary(21.0) == [], "another frontend's work is as good a sign"
    busy(vigil, worker)
    vigil.hanging(40.0)
    assert vigil.due_for_canary(40.0) == []


def test_the_last_one_is_put_aside_when_nobody_should_wait_for_it_any_longer() -> None:
    vigil, worker = watched()
    busy(vigil, worker)
    assert vigil.may_be_put_aside("w", 2.5)
    vigil._view.set_connected("x", False)
    assert not vigil.may_be_put_aside("w", 59.0)
    assert vigil.may_be_put_aside("w", 61.0)
    assert not vigil.may_be_put_aside("nobody", 1000.0)


def test_the_last_one_with_long_steps_has_five_times_the_patience() -> None:
    vigil, worker = watched(10_000.0)
    busy(vigil, worker)
    vigil._view.set_connected("x", False)
    assert not vigil.may_be_put_aside("w", 5 * vigil.bound_s(worker) - 1.0)
    assert vigil.may_be_put_aside("w", 5 * vigil.bound_s(worker) + 1.0)


# Engines of which nothing is heard by nature


@pytest.mark.parametrize("step_ms", [500.0, None])
def test_a_prompt_computed_in_silence_has_the_time_of_all_its_steps(step_ms: float | None) -> None:
    """32 chunks of 512 tokens, of which no news comes before the first token."""
    vigil, worker = watched(step_ms)
    vigil._view.book(worker, 32 * 512, 10)
    told_s, quiet = vigil.bound_s(worker), msgspec.structs.replace(REPORT, quiet_prefill=True)
    worker.load = quiet
    bound_s = vigil.bound_s(worker)
    assert bound_s >= 32 * 30.0 if step_ms is None else bound_s > 10 * told_s
    worker.load = msgspec.structs.replace(quiet, waiting_prefill_tokens=64 * 512)
    assert vigil.bound_s(worker) > 1.5 * bound_s, "another frontend's prompt is before ours"


def test_a_short_prompt_computed_in_silence_has_as_long_as_one_of_an_unknown_worker() -> None:
    """Those who do not go through us may be served there first."""
    vigil, worker = watched()
    busy(vigil, worker)
    worker.load = msgspec.structs.replace(REPORT, quiet_prefill=True)
    assert vigil.bound_s(worker) == LIMITS.unknown_timeout_s


def test_once_all_its_prompts_are_done_its_silence_counts_as_anybodys() -> None:
    vigil, worker = watched()
    vigil._view.book(worker, 0, 10)
    worker.load = msgspec.structs.replace(REPORT, quiet_prefill=True)
    assert vigil.bound_s(worker) == LIMITS.hang_timeout_s


def test_a_whole_answer_may_take_long_and_not_for_ever() -> None:
    vigil, worker = watched()
    busy(vigil, worker)
    worker.load = msgspec.structs.replace(REPORT, quiet_prefill=True, num_whole=1)
    assert vigil.bound_s(worker) == LIMITS.whole_answer_s
    worker.load = msgspec.structs.replace(REPORT, num_whole=0)
    assert vigil.bound_s(worker) < 10.0


def test_whole_answers_behind_a_long_prompt_have_the_time_of_the_prompt() -> None:
    vigil, worker = watched(20_000.0)
    vigil._view.book(worker, 32 * 512, 10)
    worker.load = msgspec.structs.replace(REPORT, quiet_prefill=True)
    prompt_s = vigil.bound_s(worker)
    assert prompt_s > LIMITS.whole_answer_s
    worker.load = msgspec.structs.replace(worker.load, num_whole=1)
    assert vigil.bound_s(worker) == prompt_s


def test_a_relayed_stream_may_stand_still_in_its_middle() -> None:
    """Servers hold back what they have not parsed, as the arguments of a tool."""
    vigil, worker = watched()
    vigil._view.book(worker, 0, 10)
    worker.load = msgspec.structs.replace(REPORT, quiet_prefill=True, relays=True)
    assert vigil.bound_s(worker) == LIMITS.unknown_timeout_s


def test_an_idle_worker_that_is_silent_by_nature_and_does_not_answer_its_canary_is_put_aside() -> None:
    """Its report on the canary widens the bound that the time for the answer is held against."""
    vigil, worker = watched()
    worker.load = msgspec.structs.replace(REPORT, quiet_prefill=True)
    longest_s = vigil.longest_answer_s(worker)
    worker.load = msgspec.structs.replace(worker.load, waiting_prefill_tokens=1)
    assert vigil.may_be_put_aside("w", longest_s)


# Not expected back


def out_of_service(hopeless_s: float = 120.0) -> Vigil:
    vigil, _ = watched()
    vigil.limits = replace(LIMITS, hopeless_s=hopeless_s)
    vigil.reported("w", msgspec.structs.replace(REPORT, steps=7, turns=9), 1.0)
    vigil.put_out("w", 10.0)
    return vigil


def test_one_that_stays_silent_is_hopeless_and_named_again_after_as_long() -> None:
    vigil = out_of_service()
    vigil.put_out("w", 100.0)  # its connection is lost besides
    assert vigil.hopeless(130.0) == []
    assert vigil.hopeless(131.0) == [("w", 121.0)]
    assert vigil.hopeless(250.0) == []
    assert vigil.hopeless(252.0) == [("w", 121.0)]


def test_whoever_is_back_or_gone_or_never_to_be_given_up_is_not_hopeless() -> None:
    back, gone, never = out_of_service(), out_of_service(), out_of_service(0.0)
    back.add("w", 20.0)
    gone.remove("w")
    assert [vigil.hopeless(1000.0) for vigil in (back, gone, never)] == [[], [], []]


@pytest.mark.parametrize("change", [{"steps": 8}, {"turns": 10}, {"generated_tokens": 1}])
def test_one_that_moves_on_is_not_hopeless_however_late_its_canary_is_answered(change: dict[str, int]) -> None:
    """An overloaded worker computes what others have sent before."""
    vigil = out_of_service()
    load = msgspec.structs.replace(REPORT, steps=7, turns=9)
    vigil.reported("w", load, 100.0)
    assert vigil.hopeless(131.0), "a repeated report proves nothing"
    vigil = out_of_service()
    vigil.reported("w", msgspec.structs.replace(load, **change), 100.0)
    assert vigil.hopeless(219.0) == []
    vigil.stepped("w", 219.0)
    assert vigil.hopeless(338.0) == []
    assert vigil.hopeless(340.0)


def test_our_own_stall_makes_nobody_hopeless() -> None:
    vigil = out_of_service()
    vigil.forgive(1000.0, 1020.0)
    assert vigil.hopeless(1020.0) == []
    assert vigil.hopeless(1141.0)


def test_one_that_gets_no_processor_is_hopeless_later_and_not_never() -> None:
    vigil = out_of_service()
    load = msgspec.structs.replace(REPORT, steps=7, turns=9)
    vigil.reported("w", msgspec.structs.replace(load, starved_ms=50_000.0), 60.0)
    assert vigil.suspects(69.0) == []
    assert vigil.suspects(71.0) == [("w", 10.0)]
    vigil.excuse("w", 60.0)
    assert vigil.hopeless(189.0) == []
    assert vigil.hopeless(191.0) == [("w", 181.0)]
    vigil.excuse("w", 1e6)
    assert vigil.hopeless(191.0 + 599.0) == []
    assert vigil.hopeless(191.0 + 601.0)


class Here:
    """Connections to workers of this host, whose threads wait as the test says."""

    def __init__(self, folder: Path, host: str = "") -> None:
        self.threads = Threads(folder)
        instance = example_instance("w", host=host or socket.gethostname(), pid=4242)
        connection = WorkerConnection(instance, lambda address: None, None)  # type: ignore[arg-type, return-value]
        self.asked: list[int] = []
        self.starved = StarvedHere({"w": connection}.get, self._wait_of)

    def _wait_of(self, pid: int) -> CpuWait:
        self.asked.append(pid)
        return CpuWait(self.threads.folder)


def test_a_worker_of_this_host_that_cannot_even_say_so_is_seen_to_starve(tmp_path: Path) -> None:
    here = Here(tmp_path)
    vigil, worker = watched()
    busy(vigil, worker)
    vigil.hanging(0.0)
    here.threads.waited("1", 50.0)
    here.starved.look(vigil, 0.9)
    assert here.asked == [], "half of the patience comes first"
    here.starved.look(vigil, 1.1)
    assert here.asked == [4242]
    here.threads.waited("1", 51.5)
    here.starved.look(vigil, 2.6)
    assert vigil.hanging(2.6) == []
    here.starved.look(vigil, 3.3)
    assert vigil.hanging(3.3), "it could have gone on since, and stands still"
    vigil.stepped("w", 4.0)
    here.starved.look(vigil, 4.1)
    here.threads.waited("1", 60.0)
    here.starved.look(vigil, 5.1)
    assert vigil.hanging(6.0), "another silence, of which the first half has passed: what was before it does not count"
    vigil.stepped("w", 10.0)
    here.threads.waited("1", 70.0)
    here.starved.look(vigil, 11.1)
    assert vigil.hanging(12.0), "nor where nobody has looked in between"


def test_processes_of_other_hosts_are_not_looked_for_here(tmp_path: Path) -> None:
    here = Here(tmp_path, host="elsewhere")
    vigil, worker = watched()
    busy(vigil, worker)
    vigil.hanging(0.0)
    here.starved.look(vigil, 1.9)
    assert here.asked == []
