"""A random walk over the scheduler: adds, aborts, deadlines, failures and steps on pools that are too small.

After every event the scheduler's own invariants hold; every plan passes the KV-checking executor; every sequence that
ends by itself has the tokens of an unbroken run.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_checking_executor import KvCheckingExecutor, expected_tokens, request

from headwater.errors import Overloaded, RequestError
from headwater.kv.identity import namespace
from headwater.kv.resident import ResidentBlocks
from headwater.protocol.request import EngineRequest, SequenceOutput
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.scheduler import Scheduler

MAX_WAITING = 6


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        spare_tokens=st.integers(0, 10),
        prefix_caching=st.booleans(),
    )
    def begin(
        self, num_blocks: int, block_size: int, max_num_seqs: int, spare_tokens: int, prefix_caching: bool
    ) -> None:
        self.limits = SchedulerLimits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=40,
            vocab_size=50,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + block_size + spare_tokens,
            max_waiting=MAX_WAITING,
            prefix_caching=prefix_caching,
            eos_token_ids=frozenset({11}),
            namespace=namespace("model", "layout"),
        )
        self.scheduler = Scheduler(self.limits)
        self.executor = KvCheckingExecutor(self.limits)
        self.resident = ResidentBlocks()
        self.requests: dict[int, EngineRequest] = {}
        """Open ones."""
        self.tokens: dict[int, list[int]] = {}
        self.now = 0.0
        self.streams = 0

    @rule(
        letters=st.lists(st.sampled_from([3, 4]), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        priority=st.integers(0, 2),
        life=st.none() | st.integers(1, 12),
        num_resumed=st.integers(0, 3),
        ignore_eos=st.booleans(),
    )
    def add(
        self,
        letters: list[int],
        max_tokens: int,
        min_tokens: int,
        priority: int,
        life: int | None,
        num_resumed: int,
        ignore_eos: bool,
    ) -> None:
        self.streams += 1
        one = request(
            self.streams,
            letters,
            max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=ignore_eos,
            priority=priority,
            deadline=None if life is None else self.now + life,
        )
        whole, _ = expected_tokens(one, self.limits)
        one.resumed_tokens = request(0, whole[:num_resumed]).prompt
        waiting = self.scheduler.load().num_waiting
        fits = len(letters) + 1 <= min(self.limits.max_model_len, self.limits.capacity_tokens)
        try:
            self.scheduler.add(one, self.now)
        except RequestError:
            assert not fits
        except Overloaded:
            assert waiting >= MAX_WAITING
        else:
            assert fits
            self.requests[self.streams] = one
            self.tokens[self.streams] = whole[:num_resumed]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.abort([stream])
        self.forget(stream)

    @rule()
    def step(self) -> None:
        self.now += 1
        plan = self.scheduler.schedule(self.now)
        if plan is None:
            self.take(self.scheduler.take_outputs())
            assert not self.requests
            assert self.scheduler.num_free_blocks == self.limits.num_blocks
        else:
            self.take(self.scheduler.commit(plan, self.executor.execute(plan), self.now))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def step_with_surprises(self, data: st.DataObject) -> None:
        """While the step runs one sequence is aborted; another fails in the executor."""
        plan = self.scheduler.schedule(self.now)
        if plan is None:
            self.take(self.scheduler.take_outputs())
            return
        result = self.executor.execute(plan)
        streams = sorted(self.requests)
        aborted = data.draw(st.none() | st.sampled_from(streams))
        failed = data.draw(st.none() | st.sampled_from([piece.sequence.stream for piece in plan.slices]))
        if aborted is not None:
            self.scheduler.abort([aborted])
            self.forget(aborted)
        if failed is not None:
            result.failures[failed] = "it cannot go on"
        self.take(self.scheduler.commit(plan, result, self.now), failed)

    def take(self, outputs: list[SequenceOutput], failed: int | None = None) -> None:
        assert len({output.stream for output in outputs}) == len(outputs)
        for output in outputs:
            one = self.requests[output.stream]
            first = len(self.tokens[output.stream]) == len(one.resumed_tokens) // 4
            assert (output.num_cached_tokens is not None) == first
            self.tokens[output.stream] += output.token_ids
            if output.finish_reason == "error":
                assert output.error is not None
                late = one.deadline is not None and one.deadline <= self.now
                assert late or output.stream == failed
                self.forget(output.stream)
            elif output.finish_reason is not None:
                self.check_whole(one, output)
                self.forget(output.stream)
            else:
                assert len(output.token_ids) == 1

    def check_whole(self, one: EngineRequest, last: SequenceOutput) -> None:
        resumed = one.resumed_tokens
        one.resumed_tokens = b""
        whole, reason = expected_tokens(one, self.limits)
        one.resumed_tokens = resumed
        assert self.tokens[one.stream] == whole
        complete_on_arrival = not last.token_ids and last.stop_token_id is None
        assert last.finish_reason == ("length" if complete_on_arrival else reason)

    def forget(self, stream: int) -> None:
        del self.requests[stream]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        load = self.scheduler.load()
        assert self.scheduler.num_open == load.num_running + load.num_waiting
        assert load.num_running <= self.limits.max_num_seqs
        assert load.kv_blocks_free == self.scheduler.num_free_blocks
        for event in self.scheduler.drain_events():
            self.resident.apply(event)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.requests:
                break
            self.step()
        assert not self.requests, "no end in sight"
        assert self.scheduler.num_free_blocks == self.limits.num_blocks


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
