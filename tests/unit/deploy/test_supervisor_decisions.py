"""The supervisor's decisions: scripted cases, and a machine that feeds it any order of events."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.deploy.actions import (
    Action,
    AllReady,
    Finish,
    GaveUp,
    Kill,
    Part,
    Restarting,
    Rolled,
    Start,
    Stopping,
    Terminate,
)
from headwater.deploy.restarts import RestartLimits
from headwater.deploy.supervision import Limits, Supervision

F0, W0, W1, W2 = Part("frontend", 0), *(Part("worker", number) for number in range(3))
LIMITS = Limits(restarts=RestartLimits(max_restarts=2), ready_timeout_s=100.0, drain_timeout_s=30.0, exit_grace_s=5.0)


def running() -> Supervision:
    core = Supervision([F0, W0, W1], LIMITS)
    core.begin(0.0)
    for part in (F0, W0):
        assert core.ready(part, 1.0) == []
    assert core.ready(W1, 2.0) == [AllReady()]
    core.serving()
    return core


def test_everything_starts_frontends_first() -> None:
    core = Supervision([F0, W0, W1], LIMITS)
    assert core.begin(0.0) == [Start(F0), Start(W0), Start(W1)]


def test_a_dead_worker_comes_back_after_its_delay() -> None:
    core = running()
    assert core.exited(W0, 10.0, -9, "killed") == [Restarting(W0, "killed", 0.5)]
    assert core.tick(10.4) == []
    assert core.next_deadline() == 10.5
    assert core.tick(10.5) == [Start(W0)]
    assert core.next_deadline() is None


def test_a_worker_that_hangs_is_killed_and_comes_back_as_a_dead_one_does() -> None:
    core = running()
    assert core.hung(W0, F0, 5.0) == [Kill(W0)]
    assert core.hung(W0, F0, 6.0) == [Kill(W0)], "said again, and it still lives"
    assert core.exited(W0, 10.0, -9, "hung") == [Restarting(W0, "hung", 0.5)]
    assert core.hung(W0, F0, 10.1) == [], "it has ended since"
    core.tick(10.5)
    assert core.hung(W0, F0, 10.6) == [], "its successor has only begun"
    assert core.hung(W2, F0, 10.6) == []


def test_one_that_is_leaving_has_the_time_it_was_given() -> None:
    core = running()
    core.restart(5.0)
    assert core.hung(W0, F0, 5.0) == []
    core = running()
    core.stop(5.0)
    assert core.hung(W0, F0, 5.0) == []


def test_a_frontend_that_alone_reaches_no_worker_has_none_killed() -> None:
    f1 = Part("frontend", 1)
    core = Supervision([F0, f1, W0], LIMITS)
    core.begin(0.0)
    for part in (F0, f1, W0):
        core.ready(part, 1.0)
    core.serving()
    assert core.hung(W0, F0, 200.0) == []
    assert core.hung(W0, F0, 320.0) == []
    assert core.hung(W0, f1, 570.0) == [], "the other has not said so any more"
    assert core.hung(W0, F0, 600.0) == [Kill(W0)]
    core.exited(W0, 601.0, -9, "hung")
    core.tick(610.0)
    core.ready(W0, 611.0)
    assert core.hung(W0, f1, 612.0) == [], "what was said of the former process counts no more"
    core.exited(f1, 620.0, 1, "boom")
    assert core.hung(W0, F0, 621.0) == [Kill(W0)], "who does not serve has no say"


def test_a_crash_loop_ends_and_the_others_go_on() -> None:
    core = running()
    for now in (10.0, 20.0):
        core.exited(W0, now, 1, "boom")
        core.tick(now + 5)
    actions = core.exited(W0, 30.0, 1, "boom")
    assert actions == [GaveUp(W0, "boom (failed 3 times in a row)")]
    assert not core.stopping
    assert core.status(W1) == "ready"


def test_the_rest_goes_on_without_the_store_which_stays_in_a_rolling_restart_and_leaves_with_the_workers() -> None:
    store = Part("store", 0)
    core = Supervision([F0, store, W0], Limits(restarts=RestartLimits(max_restarts=0)))
    core.begin(0.0)
    for part in (F0, store, W0):
        core.ready(part, 1.0)
    core.serving()
    rolled = [*core.restart(2.0), *core.exited(W0, 3.0, 0, ""), *core.ready(W0.successor, 4.0)]
    rolled += [*core.ready(F0.successor, 5.0), *core.exited(F0, 6.0, 0, "")]
    assert Rolled() in rolled
    assert store not in [getattr(action, "part", None) for action in rolled]
    core.stop(7.0)
    assert core.exited(F0.successor, 8.0, 0, "") == [Terminate(W0.successor), Terminate(store)]
    lost = Supervision([F0, store, W0], Limits(restarts=RestartLimits(max_restarts=0)))
    lost.begin(0.0)
    lost.ready(store, 1.0)
    assert [type(action) for action in lost.exited(store, 2.0, 1, "boom")] == [GaveUp]
    assert not lost.stopping


def test_a_store_that_cannot_be_as_it_is_configured_ends_a_start_and_nothing_that_serves() -> None:
    store = Part("store", 0)
    wrong = Supervision([F0, store, W0], LIMITS)
    wrong.begin(0.0)
    why = "no store is left; store-0: the folder is taken"
    assert wrong.exited(store, 1.0, 2, "the folder is taken")[1] == Stopping(why)
    wrong.exited(F0, 2.0, 0, "")
    assert wrong.exited(W0, 3.0, 0, "") == [Finish(2, why)]
    served = Supervision([F0, store, W0], Limits(restarts=RestartLimits(max_restarts=0)))
    served.begin(0.0)
    served.ready(store, 1.0)
    assert [type(action) for action in served.exited(store, 2.0, 2, "the disk is full")] == [GaveUp]
    assert not served.stopping


def test_when_the_last_worker_is_given_up_the_frontend_drains_and_it_ends_with_1() -> None:
    core = Supervision([F0, W0], Limits(restarts=RestartLimits(max_restarts=0)))
    core.begin(0.0)
    actions = core.exited(W0, 1.0, 1, "boom")
    assert [type(action) for action in actions] == [GaveUp, Stopping, Terminate]
    (finish,) = core.exited(F0, 2.0, 0, "")
    assert isinstance(finish, Finish)
    assert finish.code == 1
    assert "no worker is left; worker-0: boom" in finish.reason


def test_a_configuration_that_cannot_work_is_not_tried_again() -> None:
    core = Supervision([F0, W0], LIMITS)
    core.begin(0.0)
    assert core.exited(W0, 1.0, 2, "no such model")[0] == GaveUp(W0, "no such model")
    (finish,) = core.exited(F0, 2.0, 0, "")
    assert isinstance(finish, Finish)
    assert finish.code == 2


def test_the_same_exit_after_having_been_ready_is_tried_again() -> None:
    core = running()
    assert core.exited(W0, 3.0, 2, "folder gone for a moment") == [Restarting(W0, "folder gone for a moment", 0.5)]


def test_workers_outlive_frontends_while_draining() -> None:
    core = running()
    assert core.stop(10.0) == [Stopping("asked to stop"), Terminate(F0)]
    assert core.tick(44.9) == []
    assert core.exited(F0, 20.0, 0, "") == [Terminate(W0), Terminate(W1)]
    assert core.exited(W0, 20.1, 0, "") == []
    assert core.exited(W1, 20.2, 0, "") == [Finish(0, "asked to stop")]


def test_what_does_not_leave_in_time_is_killed() -> None:
    core = running()
    core.stop(10.0)
    assert core.tick(45.0) == [Kill(F0)]
    assert core.tick(50.0) == []
    core.exited(F0, 45.1, -9, "")
    assert core.tick(50.1) == [Kill(W0), Kill(W1)]


def test_asked_twice_everything_is_killed_now() -> None:
    core = running()
    core.stop(10.0)
    assert core.stop(10.5) == [Kill(F0), Kill(W0), Kill(W1)]


def test_stop_during_back_off_starts_nothing() -> None:
    core = running()
    core.exited(W0, 10.0, 1, "boom")
    core.stop(10.1)
    assert core.tick(100.0) == [Kill(F0)]


def test_no_progress_in_time_ends_with_3_but_progress_buys_time() -> None:
    core = Supervision([F0, W0], LIMITS)
    core.begin(0.0)
    core.ready(F0, 1.0)
    core.progressed(W0, 90.0)
    assert core.tick(189.0) == []
    stopping, terminate = core.tick(190.0)
    assert isinstance(stopping, Stopping)
    assert "no progress for 100 s (waiting for worker-0)" in stopping.reason
    assert terminate == Terminate(F0)
    core.exited(F0, 190.1, 0, "")
    (finish,) = core.exited(W0, 190.2, -9, "")
    assert isinstance(finish, Finish)
    assert finish.code == 3


def test_what_held_up_the_start_is_in_the_reason() -> None:
    core = Supervision([F0, W0, W1, W2], LIMITS)
    core.begin(0.0)
    core.ready(F0, 1.0)
    for part in (W0, W2):
        core.waits(part, "there is no server")
    core.exited(W1, 2.0, 1, "the key is wrong")
    core.tick(2.5)
    core.progressed(W2, 3.0)
    stopping = core.tick(103.0)[0]
    assert isinstance(stopping, Stopping)
    assert stopping.reason.endswith("(waiting for worker-0: there is no server, worker-1: the key is wrong, worker-2)")


def test_with_one_worker_given_up_the_rest_is_ready() -> None:
    core = Supervision([F0, W0, W1], Limits(restarts=RestartLimits(max_restarts=0)))
    core.begin(0.0)
    core.ready(F0, 1.0)
    core.ready(W0, 1.0)
    assert core.exited(W1, 2.0, 1, "boom") == [GaveUp(W1, "boom (failed 1 times in a row)"), AllReady()]


def test_a_process_that_left_as_told_is_replaced_at_once_and_not_counted_as_a_failure() -> None:
    core = running()
    for now in (10.0, 20.0, 30.0, 40.0):
        assert core.exited(W0, now, 0, "exit code 0") == [Restarting(W0, "exit code 0", 0.0)]
        assert core.tick(now) == [Start(W0)]
        core.ready(W0, now + 1)


def test_a_rolling_restart_replaces_workers_one_by_one_then_frontends_with_their_successor_first() -> None:
    core = running()
    assert core.restart(10.0) == [Terminate(W0)]
    assert core.restart(10.0) == [], "one at a time"
    assert core.next_deadline() == 45.0, "drain time and grace"
    assert core.exited(W0, 12.0, 0, "left") == [Start(W0.successor)]
    assert core.ready(W0.successor, 13.0) == [Terminate(W1)]
    assert core.tick(48.0) == [Kill(W1)]
    assert core.exited(W1, 48.0, -9, "killed") == [Start(W1.successor)]
    assert core.ready(W1.successor, 50.0) == [Start(F0.successor)]
    assert core.ready(F0.successor, 51.0) == [Terminate(F0, succeeded=True), Rolled()]
    assert not core.rolling
    assert core.next_deadline() == 51.0 + 600.0 + 5.0, "there is no hurry"
    assert core.exited(F0, 300.0, 0, "left") == []
    assert core.next_deadline() is None
    assert core.restart(70.0) == [Terminate(W0.successor)]


def test_a_rolling_restart_ends_when_a_frontend_cannot_be_replaced_and_the_old_one_stays() -> None:
    core = Supervision([F0], LIMITS)
    core.begin(0.0)
    core.ready(F0, 1.0)
    assert core.restart(10.0) == [Start(F0.successor)]
    assert core.exited(F0.successor, 11.0, 1, "no") == [Rolled("frontend-0 could not be replaced: no")]
    assert core.status(F0) == "ready"
    assert core.exited(F0, 20.0, -9, "killed") == [Restarting(F0, "killed", 0.5)]


def test_a_worker_that_does_not_start_again_at_once_is_tried_as_always() -> None:
    core = running()
    core.restart(10.0)
    core.exited(W0, 12.0, 0, "left")
    assert core.exited(W0.successor, 13.0, 1, "boom") == [Restarting(W0.successor, "boom", 0.5)]
    assert core.tick(14.0) == [Start(W0.successor)]
    assert core.ready(W0.successor, 15.0) == [Terminate(W1)]
    core.exited(W1, 16.0, 0, "left")
    core.exited(W1.successor, 17.0, 2, "no such model")
    assert not core.rolling


def test_stopping_ends_a_rolling_restart() -> None:
    core = running()
    core.restart(10.0)
    core.stop(11.0)
    core.exited(F0, 12.0, 0, "left")
    core.exited(W1, 12.0, 0, "left")
    assert core.exited(W0, 13.0, 0, "left") == [Finish(0, "asked to stop")]


class AnyOrder(RuleBasedStateMachine):
    """Processes that start, become ready, fail and obey (or not) in any order, beside the decisions."""

    @initialize(frontends=st.integers(1, 2), workers=st.integers(1, 3), restarts=st.integers(0, 3))
    def begin(self, frontends: int, workers: int, restarts: int) -> None:
        parts = [Part("frontend", i) for i in range(frontends)] + [Part("worker", i) for i in range(workers)]
        self.core = Supervision(parts, Limits(restarts=RestartLimits(max_restarts=restarts)))
        self.now = 0.0
        self.alive: set[Part] = set()
        self.killed: set[Part] = set()
        self.finish: Finish | None = None
        self.stopped = False
        self.take(self.core.begin(self.now))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.finish is None, "nothing may follow Finish"
            match action:
                case Start(part):
                    assert part not in self.alive
                    assert not self.stopped, "started while stopping"
                    self.alive.add(part)
                    self.killed.discard(part)
                case Terminate(part) | Kill(part):
                    assert part in self.alive
                    if isinstance(action, Kill):
                        self.killed.add(part)
                case Stopping():
                    assert not self.stopped
                    self.stopped = True
                case Finish():
                    assert not self.alive
                    self.finish = action

    @precondition(lambda self: self.finish is None and self.alive)
    @rule(data=st.data(), code=st.sampled_from([0, 1, 2, -9]))
    def exit(self, data: Any, code: int) -> None:
        part = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(part)
        self.killed.discard(part)
        self.take(self.core.exited(part, self.now, code, "reason"))

    @precondition(lambda self: self.finish is None and self.alive)
    @rule(data=st.data())
    def ready(self, data: Any) -> None:
        self.take(self.core.ready(data.draw(st.sampled_from(sorted(self.alive))), self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 700.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.core.tick(self.now))

    @rule()
    def restart(self) -> None:
        self.take(self.core.restart(self.now))

    @rule()
    def stop(self) -> None:
        again = self.stopped
        self.take(self.core.stop(self.now))
        if again:
            assert self.killed == self.alive

    @rule()
    def serving(self) -> None:
        self.core.serving()

    @invariant()
    def consistent(self) -> None:
        self.core.check()
        assert self.core.finished == (self.finish is not None)
        if self.finish is None:
            waiting = self.core.next_deadline() is not None
            assert self.alive or waiting, "nothing runs and nothing is due: it would wait for ever"

    def teardown(self) -> None:
        """Once stopped, obeying every kill always ends it."""
        if not hasattr(self, "core") or self.finish is not None:
            return
        self.take(self.core.stop(self.now))
        while self.finish is None:
            self.now += 1.0
            self.take(self.core.tick(self.now))
            for part in sorted(self.killed & self.alive):
                self.alive.discard(part)
                self.take(self.core.exited(part, self.now, -9, "killed"))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
