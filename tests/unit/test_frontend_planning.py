"""The planning of roles beside a frontend: real view, real decisions, a real process that decides."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from headwater.clock import RealClock
from headwater.errors import InvalidRequest
from headwater.frontend.plan_pages import PlanPages
from headwater.frontend.planning import Planning, PlanningSettings
from headwater.perf.model import StepModel, StepShape
from headwater.planner.decide import PlannerSettings
from headwater.planner.objective import Objective
from headwater.planner.observe import pool_of, served_of
from headwater.protocol.events import FrontendLoad, LoadReport
from headwater.router.decisions import DecisionLog, DecisionRecord
from headwater.router.view import ClusterView
from headwater.router.worker import time_class
from headwater.scheduler.limits import SchedulerLimits
from headwater.sim.describe import MODEL, instance
from headwater.types import Role

LIMITS = SchedulerLimits(20_000, 16, 100_000, 1 << 20, 256, 2048)
SETTINGS = PlanningSettings(
    replace(PlannerSettings(objective=Objective(3000.0, 20.0)).every(100.0), max_jobs=200, window_ms=60_000.0)
)


def view_of(num_workers: int, *, adaptive: bool = True, role: Role = "both") -> ClusterView:
    """Workers whose steps are known: about a 70B model."""
    view = ClusterView(frontend_id="fe-b")
    for number in range(num_workers):
        made = msgspec.structs.replace(instance(f"w{number}", LIMITS), adaptive=adaptive, role=role)
        view.put(made)
        view.set_connected(made.worker_id, True)
        worker = view.worker(made.worker_id)
        assert worker is not None
        view.book(worker, 100, 10)
    model: StepModel = view.perf.steps(time_class(made))
    shapes = [StepShape(tokens, tokens * tokens / 2) for tokens in (64, 1024, 2048)]
    shapes += [StepShape(0, 0, number, number * 500) for number in (1, 16, 64)]
    model.believe([(shape, 0.05 * shape.prefill_tokens + 12.0 * (shape.decode_sequences > 0)) for shape in shapes], 100)
    return view


def prefill_heavy(log: DecisionLog, clock: RealClock, num: int = 200) -> None:
    """The last half minute: long prompts, short answers, decodes slowed down by them."""
    now = clock.epoch()
    for number in range(num):
        record = DecisionRecord(f"r{number}", MODEL, now - 30 + 30 * number / num, 3000, 1)
        record.worker_id, record.outcome = f"w{number % 4}", "finished"
        record.ttft_ms, record.output_tokens, record.e2e_ms = 250.0, 150, 250.0 + 149 * 30.0
        log.add(record)


def planning(view: ClusterView, log: DecisionLog, told: dict[str, Role]) -> Planning:
    return Planning(view, log, RealClock(), told.__setitem__, SETTINGS)


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    for _ in range(int(within_s / 0.05)):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError


def test_adaptive_workers_are_given_roles_and_told_until_they_have_them() -> None:
    view, log, told = view_of(4), DecisionLog(), dict[str, Role]()
    prefill_heavy(log, RealClock())

    async def work() -> None:
        plans = planning(view, log, told)
        plans.start()
        try:
            await until(lambda: len(told) == 4)
            assert sorted(told.values())[0] == "decode"
            assert "prefill" in told.values()
            for worker_id, role in told.items():
                known = view.worker(worker_id)
                assert known is not None
                view.put(msgspec.structs.replace(known.instance, role=role))
            told.clear()
            await asyncio.sleep(0.5)
            assert not told
            document = PlanPages(plans).document()
            assert document["models"][MODEL]["changes"] == 1
            msgspec.json.encode(document)
        finally:
            await plans.close()
            await plans.close()

    asyncio.run(work())


@pytest.mark.parametrize("why", ["fixed roles", "one worker", "another frontend plans", "nothing was asked here"])
def test_nobody_is_told_anything(why: str) -> None:
    view = view_of(1 if why == "one worker" else 4, adaptive=why != "fixed roles")
    if why == "another frontend plans":
        load = LoadReport(1, 0, 0, 100, 50, frontends=[FrontendLoad("fe-a", 0, 1, 0, 0.0, 10)])
        view.report("w0", load)
    if why == "nothing was asked here":
        for worker in view.workers:
            view.set_connected(worker.worker_id, False)
            view.set_connected(worker.worker_id, True)
    log, told = DecisionLog(), dict[str, Role]()
    prefill_heavy(log, RealClock())

    async def work() -> None:
        plans = planning(view, log, told)
        plans.start()
        await asyncio.sleep(0.5)
        await plans.close()

    asyncio.run(work())
    assert not told


def test_adaptive_workers_do_both_when_the_last_that_decoded_is_gone() -> None:
    view, told = view_of(2, role="prefill"), dict[str, Role]()

    async def work() -> None:
        plans = planning(view, DecisionLog(), told)
        plans.start()
        await until(lambda: told == {"w0": "both", "w1": "both"}, 10.0)
        await plans.close()

    asyncio.run(work())


def test_workers_of_unknown_speed_are_not_planned() -> None:
    view = view_of(2)
    workers = view.workers
    assert pool_of(workers, {}, 1e6) is None
    assert pool_of(workers, {time_class(workers[0].instance): StepModel()}, 1e6) is None
    pool = pool_of(workers, {time_class(workers[0].instance): view.perf.steps(time_class(workers[0].instance))}, 1e6)
    assert pool is not None
    assert pool[0].kv_tokens == LIMITS.capacity_tokens


def test_decisions_become_traffic() -> None:
    log = DecisionLog()
    prefill_heavy(log, RealClock(), 10)
    waiting = DecisionRecord("late", MODEL, RealClock().epoch(), 500, 1)
    waiting.worker_id, waiting.outcome = "w0", "running"
    log.add(waiting)
    log.add(DecisionRecord("refused", MODEL, RealClock().epoch(), 500, 1))
    served = served_of(log, {f"w{number}" for number in range(4)})
    assert len(served) == 11
    assert [one.at_ms for one in served] == sorted(one.at_ms for one in served)
    assert served[0].tpot_ms == pytest.approx(30.0)
    assert served[-1].output_tokens == 0


def test_roles_can_be_insisted_on_until_the_planner_may_choose_again() -> None:
    view, told = view_of(2), dict[str, Role]()
    plans = planning(view, DecisionLog(), told)
    page = PlanPages(plans)
    page.set(b'{"roles": {"w0": "prefill", "w1": "decode"}}')
    assert told == {"w0": "prefill", "w1": "decode"}
    assert page.document()["pinned"] == told
    page.set(b'{"roles": null}')
    assert page.document()["pinned"] == {}


def test_roles_that_are_insisted_on_while_a_decision_is_made_hold() -> None:
    view, log, told = view_of(4), DecisionLog(), dict[str, Role]()
    prefill_heavy(log, RealClock())

    async def work() -> None:
        plans = planning(view, log, told)
        plans.start()
        try:
            await until(lambda: MODEL in plans.plans)
            plans.pin(
                {worker.worker_id: "decode" if worker.worker_id == "w3" else "prefill" for worker in view.workers}
            )
            for worker in view.workers:
                view.put(msgspec.structs.replace(worker.instance, role=told.pop(worker.worker_id)))
            await until(lambda: plans.plans[MODEL].last is not None)
            await asyncio.sleep(0)
            assert not told
        finally:
            await plans.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"roles": {"w0": "prefill", "w1": "prefill"}}', "nobody would decode"),
        (b'{"roles": {"w9": "decode"}}', "is not here"),
        (b'{"roles": {"w0": "boss"}}', 'roles has "boss" for "w0", expected one of both, prefill, decode'),
        (b'{"roles": {"w0": 5}}', 'roles has 5 for "w0", expected a string'),
        (b'{"roles": ["w0"]}', "roles is an array of 1, expected an object or null"),
        (b'{"roles": null, "rolls": {}}', 'unknown field "rolls"; did you mean roles?'),
        (b"{}", "roles is missing, expected an object or null"),
        (b"[", "the body is not valid JSON"),
    ],
)
def test_roles_that_cannot_be_are_refused(body: bytes, message: str) -> None:
    told = dict[str, Role]()
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        PlanPages(planning(view_of(2), DecisionLog(), told)).set(body)
    assert not told


def test_workers_with_a_fixed_role_are_left_alone() -> None:
    told = dict[str, Role]()
    with pytest.raises(InvalidRequest, match="role of its own"):
        PlanPages(planning(view_of(2, adaptive=False), DecisionLog(), told)).set(b'{"roles": {"w0": "prefill"}}')
