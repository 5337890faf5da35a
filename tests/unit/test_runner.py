"""The native executor under a real scheduler and the CPU backend, on a tiny random model.

The heart: whatever else runs, in whatever chunks, from cached prefixes, after preemptions or on another engine, a
sequence gets the same tokens and the same log-probabilities, bit for bit.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_reference import RandomCheckpoint, reference_logits, small
from hypothesis import given, settings
from hypothesis import strategies as st
from native_core import Core, Result, request
from numpy.typing import NDArray

from headwater.engines.native.base import FlatBatch
from headwater.engines.native.cpu.backend import CpuBackend, CpuOptions
from headwater.engines.native.structured.base import DeadEndError
from headwater.errors import InvalidRequest
from headwater.protocol.request import EngineRequest, StructuredSpec

EOS = 3
CONFIG = small(eos_token_ids=(EOS,))
NUM_BLOCKS = 60
BLOCK = 16


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuBackend]:
    opened = CpuBackend(
        RandomCheckpoint(CONFIG, torch.bfloat16), CpuOptions(weights_cache=tmp_path_factory.mktemp("w"))
    )
    opened.allocate_kv(NUM_BLOCKS, BLOCK)
    yield opened
    opened.close()


SAMPLINGS: list[dict[str, Any]] = [
    {"logprobs": 20},
    {"temperature": 1.0, "seed": 1, "logprobs": 5},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 0},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3, "logprobs": 3},
    {"temperature": 1.3, "seed": 3, "top_k": 30, "min_p": 0.01, "min_tokens": 8},
    {},
]


def random_requests(seed: int, count: int, *, ignore_eos: bool = False) -> list[EngineRequest]:
    """Prompts of many lengths; some share long prefixes."""
    generator = np.random.default_rng(seed)
    shared = generator.integers(4, 256, 100).tolist()
    requests = []
    for stream in range(count):
        own = generator.integers(4, 256, int(generator.integers(1, 70))).tolist()
        prompt = shared[: int(generator.integers(0, 100))] + own if generator.random() < 0.5 else own
        sampling = SAMPLINGS[stream % len(SAMPLINGS)]
        max_tokens = int(generator.integers(8, 60))
        requests.append(request(stream, prompt, max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling))
    return requests


def alone(backend: CpuBackend, requests: Sequence[EngineRequest]) -> dict[int, Result]:
    results = {}
    for each in requests:
        core = Core(backend, eos=(EOS,), prefix_caching=False, max_num_batched_tokens=512)
        results |= core.run([each])
    return results


def content(results: dict[int, Result]) -> dict[int, tuple[Any, ...]]:
    """All but what may differ: how much came from the cache."""
    return {stream: (r.tokens, r.logprobs, r.finish_reason, r.stop_token_id) for stream, r in results.items()}


def test_greedy_follows_the_reference_decoder(backend: CpuBackend) -> None:
    prompt = list(range(10, 40))
    result = Core(backend).run([request(1, prompt, max_tokens=30)])[1]
    expected = reference_logits(RandomCheckpoint(CONFIG, torch.bfloat16), prompt + result.tokens)
    assert result.tokens == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert result.finish_reason == "length"


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([8 + BLOCK, 40, 100, 500]),
    num_blocks=st.sampled_from([14, 20, NUM_BLOCKS]),
    prefix_caching=st.booleans(),
    arrivals=st.lists(st.integers(0, 30), min_size=6, max_size=6),
)
def test_any_schedule_gives_the_same_bits(
    backend: CpuBackend, seed: int, budget: int, num_blocks: int, prefix_caching: bool, arrivals: list[int]
) -> None:
    requests = random_requests(seed, 6)
    later: dict[int, list[EngineRequest]] = {}
    for step, each in zip(arrivals, requests, strict=True):
        later.setdefault(step, []).append(each)
    core = Core(
        backend,
        eos=(EOS,),
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    assert content(core.run([], later)) == content(alone(backend, requests))


def test_preemption_chunks_and_prefix_hits_did_happen_and_changed_nothing(backend: CpuBackend) -> None:
    shared = list(range(10, 80))
    growing = [
        request(stream, [stream + 4] * 5, max_tokens=150, ignore_eos=True, **s) for stream, s in enumerate(SAMPLINGS)
    ]
    sharing = [request(10 + stream, [*shared, 200 + stream], max_tokens=20, ignore_eos=True) for stream in range(6)]
    core = Core(backend, eos=(EOS,), num_blocks=24, max_num_seqs=12, max_num_batched_tokens=12 + BLOCK)
    results = core.run(growing, later={3: sharing[:3], 120: sharing[3:]})
    load = core.core.load()
    assert load.preemptions >= 3
    assert load.cached_tokens >= 3 * 64
    assert content(results) == content(alone(backend, growing + sharing))


def test_twins_share_the_blocks_they_both_computed(backend: CpuBackend) -> None:
    """A block that a twin has computed already is given up for the older one, and soon holds something else."""
    twins = [request(stream, [9] * 5, max_tokens=100, ignore_eos=True, logprobs=1) for stream in range(3)]
    waves = {
        step: [request(step + number, [step + number] * 5, max_tokens=25, ignore_eos=True) for number in range(3)]
        for step in (20, 40, 60, 80)
    }
    core = Core(backend, eos=(EOS,), num_blocks=24)
    results = core.run(twins, waves)
    assert core.core.load().preemptions == 0
    assert content(results) == content(alone(backend, twins + [each for wave in waves.values() for each in wave]))


def test_a_moved_sequence_continues_as_it_would_have(backend: CpuBackend) -> None:
    """Resumed on a fresh engine after any number of tokens: same rest, penalties and seeds included."""
    for whole in random_requests(5, 6, ignore_eos=True):
        expected = alone(backend, [whole])[whole.stream]
        for moved_after in (1, 7):
            prompt = np.frombuffer(whole.prompt, np.uint32).tolist()
            kept = expected.tokens[:moved_after]
            moved = EngineRequest(
                whole.stream,
                "moved",
                "m",
                whole.prompt,
                whole.sampling,
                resumed_tokens=np.array(kept, np.uint32).tobytes(),
            )
            rest = Core(backend, eos=(EOS,)).run([moved])[whole.stream]
            assert rest.tokens == expected.tokens[moved_after:], prompt
            assert rest.logprobs == expected.logprobs[moved_after:]


class Recording(CpuBackend):
    """Keeps what it was given."""

    batches: list[FlatBatch]

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        self.batches.append(batch)
        return super().forward(batch)


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recording]:
    opened = Recording(RandomCheckpoint(CONFIG, torch.bfloat16), CpuOptions(weights_cache=tmp_path))
    opened.batches = []
    opened.allocate_kv(NUM_BLOCKS, BLOCK)
    yield opened
    opened.close()


def test_batches_are_flat_decodes_first_and_only_sampling_rows_want_logits(recording: Recording) -> None:
    core = Core(recording, max_num_seqs=4, max_num_batched_tokens=36)
    core.run([request(1, range(50, 60), max_tokens=20)], later={2: [request(2, range(100, 170), max_tokens=3)]})
    assert recording.batches[0].token_ids.tolist() == list(range(50, 60))
    assert recording.batches[0].logit_rows.tolist() == [9]
    mixed = next(batch for batch in recording.batches if len(batch.token_ids) > 1 and batch.num_decode == 1)
    assert mixed.query_starts.tolist() == [0, 1, 33]
    assert mixed.positions.tolist() == [11, *range(32)]
    assert mixed.context_lens.tolist() == [12, 32]
    assert mixed.logit_rows.tolist() == [0], "the chunk does not end its prompt"
    used = mixed.block_tables
    assert set(used[0, :1].tolist()).isdisjoint(used[1, :2].tolist())


def test_a_prefill_step_without_sampling_rows(recording: Recording) -> None:
    core = Core(recording, max_num_seqs=1, max_num_batched_tokens=17)
    results = core.run([request(1, range(4, 100), max_tokens=2)])
    assert [len(batch.logit_rows) for batch in recording.batches[:5]] == [0] * 5
    assert len(results[1].tokens) == 2


class Poisoned(CpuBackend):
    """Loses its mind over one token."""

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        logits = super().forward(batch)
        for row, position in enumerate(batch.logit_rows):
            if batch.token_ids[position] == 255:
                logits[row, 9] = torch.nan
        return logits


def test_bad_numbers_end_one_sequence_only(tmp_path: Path) -> None:
    poisoned = Poisoned(RandomCheckpoint(CONFIG, torch.bfloat16), CpuOptions(weights_cache=tmp_path))
    poisoned.allocate_kv(NUM_BLOCKS, BLOCK)
    core = Core(poisoned)
    results = core.run(
        [request(1, [7, 8], max_tokens=5), request(2, [7, 255], max_tokens=5), request(3, [7, 9], max_tokens=5)]
    )
    assert results[2].finish_reason == "error"
    assert results[2].error is not None
    assert "logit" in results[2].error.message
    assert [results[stream].finish_reason for stream in (1, 3)] == ["length", "length"]
    assert core.scheduler.num_free_blocks == NUM_BLOCKS
    poisoned.close()


class UpTo:
    """A constraint that knows no way on after some tokens, all below 20."""

    def __init__(self, limit: int) -> None:
        self.num_tokens = 0
        self.complete = False
        self._limit = limit

    def advance(self, tokens: Sequence[int]) -> None:
        assert all(token < 20 for token in tokens)
        self.num_tokens += len(tokens)

    def mask(self, logits: NDArray[np.float32]) -> None:
        if self.num_tokens == self._limit:
            raise DeadEndError("structured output: no way on")
        logits[20:] = -np.inf


class UpToCompiler:
    def prepare(self, spec: StructuredSpec) -> None:
        self.compile(spec)

    def compile(self, spec: StructuredSpec) -> UpTo:
        if not spec.spec.isdigit():
            raise InvalidRequest("regex: not a number", param="guided_regex")
        return UpTo(int(spec.spec))


def test_constraints_mask_and_dead_ends_end_one_sequence_only(backend: CpuBackend) -> None:
    core = Core(backend, compiler=UpToCompiler())
    results = core.run(
        [
            request(1, [7, 8], max_tokens=6, structured=StructuredSpec("regex", "4")),
            request(2, [7, 9], max_tokens=6, structured=StructuredSpec("regex", "9")),
            request(3, [7, 9], max_tokens=6, structured=StructuredSpec("regex", "nine", "guided_regex")),
            request(4, [7, 9], max_tokens=6),
        ]
    )
    assert results[1].finish_reason == "error"
    assert len(results[1].tokens) == 4
    assert results[1].error is not None
    assert "no way on" in results[1].error.message
    assert results[2].finish_reason == "length"
    assert max(results[1].tokens + results[2].tokens) < 20
    assert results[3].error is not None
    assert results[3].error.param == "guided_regex"
    assert results[4].finish_reason == "length"


def test_structured_output_without_a_compiler_is_refused(backend: CpuBackend) -> None:
    result = Core(backend).run([request(1, [7], structured=StructuredSpec("json_object", param="x"))])[1]
    assert result.error is not None
    assert (result.error.http_status, result.error.param) == (400, "x")


def test_bad_parameters_are_refused_and_leave_nothing_behind(backend: CpuBackend) -> None:
    core = Core(backend)
    result = core.run([request(1, [7], temperature=-1.0)])[1]
    assert result.error is not None
    assert result.error.param == "temperature"
    assert not core.core.has_work


def test_abort_frees_blocks_within_a_step_in_every_state(backend: CpuBackend) -> None:
    core = Core(backend, max_num_seqs=2, max_num_batched_tokens=18)
    core.submit(*(request(stream, range(4, 104), max_tokens=50, ignore_eos=True) for stream in range(3)))
    core.step()  # 0 prefills, 1 and 2 wait
    assert core.scheduler.num_free_blocks < NUM_BLOCKS
    core.core.abort([0])
    core.step()
    for _ in range(30):
        core.step()
    assert core.results[1].tokens, "1 decodes"
    core.core.abort([1, 2])
    assert core.scheduler.num_free_blocks == NUM_BLOCKS
    assert not core.core.has_work
    core.step()
    assert 0 not in core.results
    assert core.results[1].finish_reason is None
