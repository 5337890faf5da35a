"""Executes step plans: builds the flat batch, runs the forward pass, draws tokens.

Per sequence it keeps what the scheduler does not: the block table as an array, read again only where it may have
changed, and the sampling state. Both follow from the sequence alone. A sequence that cannot go on fails by itself;
only an error of the backend takes the engine down.
"""

import time

import numpy as np
from numpy.typing import NDArray

from headwater.engines.native.base import Backend, FlatBatch
from headwater.engines.native.sampling.sampler import Sampler
from headwater.engines.native.sampling.state import SamplingState, check_sampling
from headwater.engines.native.structured.base import ConstraintCompiler
from headwater.errors import InvalidRequest
from headwater.protocol.request import EngineRequest, StructuredSpec
from headwater.scheduler.plan import Sequence, Slice, StepPlan, StepResult


class NativeExecutor:
    """`headwater.scheduler.plan.Executor` over a backend. Owns the backend; used from one thread."""

    def __init__(
        self,
        backend: Backend,
        eos_token_ids: tuple[int, ...],
        compiler: ConstraintCompiler | None = None,
    ) -> None:
        self._backend = backend
        self._eos_token_ids = eos_token_ids
        self._compiler = compiler
        self._vocab_size = backend.config.vocab_size
        self._sampler = Sampler(self._vocab_size)
        self._running: dict[int, _Running] = {}

    def admit(self, sequence: Sequence) -> None:
        """Check sampling parameters and compile the grammar. Raises `InvalidRequest`."""
        params = sequence.request.sampling
        check_sampling(params, self._vocab_size)
        spec = params.structured
        constraint = None if spec is None else self._compiler_for(spec).compile(spec)
        sampling = SamplingState(sequence, self._vocab_size, self._eos_token_ids, constraint)
        self._running[sequence.stream] = _Running(sampling)

    def prepare(self, request: EngineRequest) -> None:
        """Compile the grammar ahead of `admit`, on another thread than the engine's. Raises `InvalidRequest`."""
        check_sampling(request.sampling, self._vocab_size)
        spec = request.sampling.structured
        if spec is not None:
            self._compiler_for(spec).prepare(spec)

    def execute(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        batch = self._batch(plan)
        logits = self._backend.forward(batch)
        sampling = [part for part in plan.slices if part.samples]
        sampled = self._sampler.sample(logits, [self._running[part.sequence.stream].sampling for part in sampling])
        failures = {sampling[number].sequence.stream: reason for number, reason in sampled.failures.items()}
        duration_ms = (time.perf_counter() - started) * 1000
        return StepResult(sampled.token_ids, sampled.logprobs, duration_ms, failures)

    def release(self, sequence: Sequence) -> None:
        self._running.pop(sequence.stream, None)

    def close(self) -> None:
        self._running.clear()
        self._backend.close()

    def _compiler_for(self, spec: StructuredSpec) -> ConstraintCompiler:
        if self._compiler is None:
            raise InvalidRequest(
                f"{spec.param} asks for structured output, which this worker does not offer: it has no tokenizer.json, "
                "or llguidance is not installed there",
                param=spec.param,
            )
        return self._compiler

    def _batch(self, plan: StepPlan) -> FlatBatch:
        slices = plan.slices
        lengths = np.fromiter((part.num_tokens for part in slices), dtype=np.int32, count=len(slices))
        starts = np.fromiter((part.start for part in slices), dtype=np.int32, count=len(slices))
        query_starts = np.zeros(len(slices) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        samples = np.fromiter((part.samples for part in slices), dtype=np.bool_, count=len(slices))
        return FlatBatch(
            token_ids=_token_ids(slices, plan.num_decode, query_starts),
            positions=np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], lengths),
            query_starts=query_starts,
            context_lens=starts + lengths,
            block_tables=self._block_tables(slices),
            logit_rows=query_starts[1:][samples] - 1,
            num_decode=plan.num_decode,
        )

    def _block_tables(self, slices: tuple[Slice, ...]) -> NDArray[np.int32]:
        rows = [self._running[part.sequence.stream].blocks(part, self._backend.block_size) for part in slices]
        tables = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
        for table, row in zip(tables, rows, strict=True):
            table[: len(row)] = row
        return tables


class _Running:
    """Executor-side state of one sequence."""

    def __init__(self, sampling: SamplingState) -> None:
        self.sampling = sampling
        self._blocks = np.zeros(8, dtype=np.int32)
        self._num_settled = 0
        """Entries that will not change any more, short of a preemption."""
        self._num_preemptions = 0

    def blocks(self, part: Slice, block_size: int) -> NDArray[np.int32]:
        """The block table as an array. Only what may have changed since the last slice is read again."""
        sequence = part.sequence
        if sequence.num_preemptions != self._num_preemptions:
            self._num_preemptions = sequence.num_preemptions
            self._num_settled = 0
        table, settled = sequence.block_table, self._num_settled
        if len(table) > len(self._blocks):
            grown = np.zeros(max(len(table), 2 * len(self._blocks)), dtype=np.int32)
            grown[:settled] = self._blocks[:settled]
            self._blocks = grown
        self._blocks[settled : len(table)] = table[settled:]
        self._num_settled = part.start // block_size
        return self._blocks[: len(table)]


def _token_ids(slices: tuple[Slice, ...], num_decode: int, query_starts: NDArray[np.int32]) -> NDArray[np.int32]:
    token_ids = np.empty(query_starts[-1], dtype=np.int32)
    token_ids[:num_decode] = [part.sequence.token_ids[part.start] for part in slices[:num_decode]]
    for number in range(num_decode, len(slices)):
        part = slices[number]
        token_ids[query_starts[number] : query_starts[number + 1]] = part.sequence.token_ids[
            part.start : part.start + part.num_tokens
        ]
    return token_ids
