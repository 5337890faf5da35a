"""A random walk over the scheduler with agents outside that load and read KV blocks, on pools that are too small.

Loaders write garbage into every block that has not arrived, at any time until they stop, and the true content just
before they say that it has arrived: a block given to somebody else too early is seen by the KV-checking executor.
Readers see every announced block with the content it was announced with, until they release it or their time is up.
Some loaders never say anything, and stop only when they are told to: nothing may wait for them beyond the deadline.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from kv_checking_executor import next_token, request
from test_scheduler_machine import MAX_WAITING, SchedulerMachine

from headwater.errors import Overloaded, RequestError
from headwater.protocol.request import SequenceOutput
from headwater.scheduler.outside import BlocksExported, Export, ExportWaits, FirstToken, LoadEnded, LoadStarted

LOAD_S = 6.0
HOLD_S = 9.0


@dataclass
class Loader:
    """One that was told to load; it may write into its blocks until it says that it stopped."""

    tokens: bytes
    first_block: int
    blocks: tuple[int, ...]
    arrived: int
    told_to_end: bool = False


@dataclass
class Reader:
    """One that reads an exported sequence."""

    until: float
    first_block: int
    content: dict[tuple[int, int], bytes] = field(default_factory=dict[tuple[int, int], bytes])
    next_block: int = -1


class ExchangeMachine(SchedulerMachine):
    loaders: dict[int, Loader]
    readers: dict[int, Reader]
    exported: set[int]

    def take_news(self) -> None:
        if not hasattr(self, "loaders"):
            self.loaders, self.readers, self.exported = {}, {}, set()
        size = self.limits.block_size
        for one in self.scheduler.exchange.take_news():
            match one:
                case LoadStarted(stream, first, blocks, num_tokens):
                    assert stream not in self.loaders
                    raw = self.requests[stream].prompt + self.requests[stream].resumed_tokens
                    assert num_tokens == len(raw) // 4
                    assert first + len(blocks) == -(-num_tokens // size)
                    self.loaders[stream] = Loader(raw, first, blocks, first)
                case LoadEnded(stream, _):
                    if stream in self.loaders:
                        self.loaders[stream].told_to_end = True
                    else:
                        self.scheduler.exchange.stopped(stream)
                case BlocksExported(stream, first, blocks):
                    if stream in self.readers:
                        self.export(self.readers[stream], first, blocks)
                case ExportWaits(stream, num_ahead, tokens_ahead):
                    raw = self.requests[stream].prompt + self.requests[stream].resumed_tokens
                    assert num_ahead < len(self.requests)
                    assert tokens_ahead >= len(raw) // 4
                case _:
                    raise AssertionError(one)

    def export(self, reader: Reader, first: int, blocks: tuple[int, ...]) -> None:
        assert first == (reader.first_block if reader.next_block < 0 else reader.next_block)
        reader.next_block = first + len(blocks)
        for block in blocks:
            for offset in range(self.limits.block_size):
                if (block, offset) in self.executor._kv:
                    reader.content[block, offset] = self.executor._kv[block, offset]

    def scribble(self) -> None:
        for loader in self.loaders.values():
            for block in loader.blocks[loader.arrived - loader.first_block :]:
                for offset in range(self.limits.block_size):
                    self.executor._kv[block, offset] = b"garbage"

    def write(self, loader: Loader, num_blocks: int, num_tokens: int) -> None:
        size = self.limits.block_size
        for position in range(loader.arrived * size, min(num_blocks * size, num_tokens)):
            block = loader.blocks[position // size - loader.first_block]
            self.executor._kv[block, position % size] = loader.tokens[: (position + 1) * 4]

    # ---- rules

    @rule(
        letters=st.lists(st.sampled_from([3, 4]), min_size=1, max_size=20),
        max_tokens=st.integers(1, 6),
        priority=st.integers(0, 2),
        life=st.none() | st.integers(4, 20),
        exported=st.booleans(),
        first_block=st.integers(0, 2),
    )
    def add_exchanging(
        self, letters: list[int], max_tokens: int, priority: int, life: int | None, exported: bool, first_block: int
    ) -> None:
        self.take_news()
        self.streams += 1
        deadline = None if life is None else self.now + life
        one = request(self.streams, letters, 1 if exported else max_tokens, priority=priority, deadline=deadline)
        waiting = self.scheduler.load().num_waiting
        fits = len(letters) + 1 <= min(self.limits.max_model_len, self.limits.capacity_tokens)
        until = self.now + HOLD_S
        try:
            if exported:
                self.scheduler.add(one, self.now, export=Export(first_block, until))
            else:
                self.scheduler.add(one, self.now, load_s=LOAD_S)
        except (RequestError, Overloaded):
            assert not fits or waiting >= MAX_WAITING
            return
        self.requests[self.streams] = one
        self.tokens[self.streams] = []
        if exported:
            self.readers[self.streams] = Reader(until, first_block)
            self.exported.add(self.streams)

    @precondition(lambda self: getattr(self, "loaders", None))
    @rule(data=st.data(), how=st.sampled_from(["arrived", "loaded", "prefilled"]))
    def load(self, data: st.DataObject, how: str) -> None:
        self.take_news()
        stream = data.draw(st.sampled_from(sorted(self.loaders)))
        loader = self.loaders[stream]
        if loader.told_to_end:
            del self.loaders[stream]
            self.scheduler.exchange.stopped(stream)
            return
        num_tokens = len(loader.tokens) // 4
        if how == "prefilled":
            self.write(loader, loader.first_block + len(loader.blocks), num_tokens)
            del self.loaders[stream]
            self.scheduler.prefilled(stream, FirstToken(next_token(loader.tokens)))
            self.take(self.scheduler.take_outputs())
            return
        num_blocks = data.draw(st.integers(loader.arrived, num_tokens // self.limits.block_size))
        self.write(loader, num_blocks, num_tokens)
        loader.arrived = min(num_blocks, (num_tokens - 1) // self.limits.block_size)
        if how == "arrived":
            self.scheduler.exchange.arrived(stream, num_blocks)
        else:
            del self.loaders[stream]
            self.scheduler.exchange.loaded(stream, num_blocks)

    @precondition(lambda self: getattr(self, "readers", None))
    @rule(data=st.data(), after=st.sampled_from([None, 2.0]))
    def release(self, data: st.DataObject, after: float | None) -> None:
        self.take_news()
        stream = data.draw(st.sampled_from(sorted(self.readers)))
        until = None if after is None else self.now + after
        self.scheduler.release(stream, until)
        self.requests.pop(stream, None)
        self.take_news()
        reader = self.readers.pop(stream)
        if until is not None and reader.content:
            self.readers[-stream] = Reader(min(until, reader.until), 0, reader.content)

    @rule()
    def step(self) -> None:
        self.now += 1
        self.take_news()
        self.scribble()
        plan = self.scheduler.schedule(self.now)
        self.take_news()
        if plan is None:
            self.take(self.scheduler.take_outputs())
            held = self.scheduler.load().kv_blocks_held
            assert self.loaders or held or not self.requests
            assert self.loaders or self.scheduler.num_free_blocks + held == self.limits.num_blocks
            return
        result = self.executor.execute(plan)
        self.scribble()
        self.take(self.scheduler.commit(plan, result, self.now))
        self.take_news()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def step_with_surprises(self, data: st.DataObject) -> None:
        """While the step runs a sequence is aborted, another fails, and loaders say that they are done."""
        self.take_news()
        plan = self.scheduler.schedule(self.now)
        self.take_news()
        if plan is None:
            self.take(self.scheduler.take_outputs())
            return
        result = self.executor.execute(plan)
        if self.requests and data.draw(st.booleans()):
            self.abort(data)
        if self.loaders:
            self.load(data, data.draw(st.sampled_from(["arrived", "loaded", "prefilled"])))
        self.scribble()
        failed = data.draw(st.none() | st.sampled_from([piece.sequence.stream for piece in plan.slices]))
        if failed is not None:
            result.failures[failed] = "it cannot go on"
        self.take(self.scheduler.commit(plan, result, self.now), failed)
        self.take_news()

    def take(self, outputs: list[SequenceOutput], failed: int | None = None) -> None:
        for output in outputs:
            if output.error is not None and output.error.code == "overloaded":
                assert output.stream in self.exported
                failed = output.stream
        super().take(outputs, failed)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.abort([stream])
        self.forget(stream)
        self.take_news()
        self.readers.pop(stream, None)

    @invariant()
    def readers_see_what_was_announced(self) -> None:
        if not hasattr(self, "readers"):
            return
        for stream, reader in list(self.readers.items()):
            if reader.until <= self.now + 1:
                del self.readers[stream]
                continue
            for slot, content in reader.content.items():
                assert self.executor._kv[slot] == content, f"a block that stream {stream} exports was overwritten"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.take_news()
        for _ in range(2000):
            self.take_news()
            for stream in [stream for stream, loader in self.loaders.items() if loader.told_to_end]:
                del self.loaders[stream]
                self.scheduler.exchange.stopped(stream)
            if not self.requests and self.scheduler.num_free_blocks == self.limits.num_blocks:
                break
            self.step()
        assert not self.requests, "no end in sight"
        assert not self.loaders
        assert self.scheduler.num_free_blocks == self.limits.num_blocks


ExchangeMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestExchangeMachine = ExchangeMachine.TestCase
