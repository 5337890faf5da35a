"""The mocker's tokens, times and texts. Its behaviour as an engine is in the conformance suite."""

import asyncio
import hashlib
import json
import math
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from kv_checking_executor import request
from tokenizers import Tokenizer

from headwater.config.schema import EngineConfig
from headwater.engines.base import EngineInfo
from headwater.engines.mocker.engine import MockerEngine
from headwater.engines.mocker.executor import MockerExecutor, StepTimes
from headwater.engines.mocker.marks import KvMarks
from headwater.engines.mocker.words import Vocabulary, read_vocabulary
from headwater.errors import InvalidRequest, ModelError
from headwater.protocol.request import EngineRequest, StructuredSpec
from headwater.scheduler.plan import Sequence, Slice, StepPlan
from headwater.weights import ResolvedModel

WORDS = tuple(range(100, 400))
BLOCKS_EACH = 32
TIMES = StepTimes(prefill_per_token=0.5, decode_base=4.0, decode_per_sequence=0.25, decode_per_kv_token=0.01)


def sequence(one: EngineRequest, generated: Iterable[int] = ()) -> Sequence:
    tokens = array("I", one.prompt)
    num_prompt = len(tokens)
    tokens.extend(generated)
    blocks = list(range(one.stream * BLOCKS_EACH, (one.stream + 1) * BLOCKS_EACH))
    return Sequence(one.stream, one, tokens, num_prompt, block_table=blocks)


def new_executor() -> MockerExecutor:
    return MockerExecutor(TIMES, WORDS, KvMarks(16 * BLOCKS_EACH, 16), 16)


def plan_of(*sequences: Sequence) -> StepPlan:
    """All that is not computed yet."""
    slices = [Slice(s, s.num_computed_tokens, s.num_tokens - s.num_computed_tokens, True) for s in sequences]
    for one in sequences:
        one.num_computed_tokens = one.num_tokens
    return StepPlan(tuple(slices), 0)


def generate(executor: MockerExecutor, one: EngineRequest, count: int, generated: Iterable[int] = ()) -> list[int]:
    running = sequence(one, generated)
    executor.admit(running)
    for _ in range(count):
        running.token_ids.append(executor.execute(plan_of(running)).token_ids[0])
    executor.release(running)
    return list(running.token_ids[running.num_prompt_tokens :])


def test_tokens_follow_from_prompt_seed_and_position_alone() -> None:
    first, second = new_executor(), new_executor()
    whole = generate(first, request(1, [1, 2, 3]), 200)
    assert set(whole) <= set(WORDS)
    assert len(set(whole)) > 100
    assert generate(first, request(9, [1, 2, 3], priority=3, temperature=0.3), 200) == whole
    assert generate(second, request(1, [1, 2, 3]), 120, whole[:80]) == whole
    assert generate(first, request(1, [1, 2, 4]), 200) != whole
    assert generate(first, request(1, [1, 2, 3], seed=5), 200) != whole


def test_a_batch_is_what_its_members_are_alone() -> None:
    executor = new_executor()
    requests = [request(stream, [stream]) for stream in range(1, 4)]
    alone = [generate(executor, one, 1)[0] for one in requests]
    running = [sequence(one) for one in requests]
    for one in running:
        executor.admit(one)
    assert executor.execute(plan_of(*running)).token_ids == alone
    chunk = StepPlan((Slice(running[0], 0, 1, False), Slice(running[1], 0, 1, True)), 0)
    assert executor.execute(chunk).token_ids == alone[1:2]


def test_kv_that_is_not_what_it_should_be_shows() -> None:
    prompt = list(range(100, 150))
    first, second = (KvMarks(64, 16) for _ in range(2))
    whole = generate(MockerExecutor(TIMES, WORDS, first, 16), request(0, prompt), 20)
    there, here = first.memory(0, 0), second.memory(0, 0)
    for block in range(4):
        here.block(block)[:] = there.block(block)
    for damaged in (None, 2):
        if damaged is not None:
            here.block(damaged)[0] ^= 1
        moved = sequence(request(0, prompt), whole[:15])
        moved.num_computed_tokens = moved.num_tokens - 1
        executor = MockerExecutor(TIMES, WORDS, second, 16)
        executor.admit(moved)
        assert (executor.execute(plan_of(moved)).token_ids[0] == whole[15]) == (damaged is None)


def test_step_times_add_up() -> None:
    prefill = StepPlan((), 0, num_prefill_tokens=100)
    mixed = StepPlan((), 8, num_prefill_tokens=100, decode_context_tokens=1000)
    assert TIMES.duration_ms(prefill) == 50.0
    assert TIMES.duration_ms(mixed) == 50.0 + 4.0 + 2.0 + 10.0
    config = EngineConfig(mocker_prefill_ms_per_token=1.0, mocker_decode_base_ms=2.0)
    assert StepTimes.of(config).duration_ms(mixed) == pytest.approx(100 + 2.0 + 8 * 0.05 + 1000 * 0.00001)


def test_logprobs_are_a_distribution_and_only_for_those_who_ask() -> None:
    executor = new_executor()
    asked, plain, top_none = sequence(request(1, [1], logprobs=5)), sequence(request(2, [2])), None
    top_none = sequence(request(3, [3], logprobs=0))
    for one in (asked, plain, top_none):
        executor.admit(one)
    result = executor.execute(plan_of(asked, plain, top_none))
    assert result.logprobs is not None
    first, second, third = result.logprobs
    assert second is None
    assert first is not None
    assert third is not None
    assert (third.top_ids, third.top_logprobs) == ([], [])
    assert len(set(first.top_ids)) == 5
    assert first.top_ids[0] == result.token_ids[0]
    assert first.logprob == first.top_logprobs[0] == pytest.approx(math.log(0.5))
    assert sum(math.exp(logprob) for logprob in first.top_logprobs) < 1
    executor.release(asked)
    executor.release(top_none)
    plain.token_ids.append(result.token_ids[1])
    assert executor.execute(plan_of(plain)).logprobs is None


def test_structured_output_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="structured output") as refused:
        new_executor().admit(sequence(request(1, [1], structured=StructuredSpec("json_object", param="guided_json"))))
    assert refused.value.param == "guided_json"


def tokenizer_json(vocab: Any, added: Iterable[int] = ()) -> bytes:
    return json.dumps({"model": {"vocab": vocab}, "added_tokens": [{"id": n} for n in added]}).encode()


@pytest.mark.parametrize(
    ("vocab", "words"),
    [
        ({"<s>": 0, "Ġthe": 1, "Ġ": 2, "Ġcat": 3, "ing": 4}, (1, 3)),
        ([["<s>", 0.0], ["▁the", -1.0], ["▁", -2.0], ["▁cat", -3.0]], (1, 3)),
        ({"<s>": 0, "the": 1, "##s": 2}, (1,)),
        ({"<s>": 0, "é": 1}, (1,)),
    ],
)
def test_words_are_picked_from_every_kind_of_vocabulary(vocab: Any, words: tuple[int, ...]) -> None:
    assert read_vocabulary(tokenizer_json(vocab, added=[0, 9])) == Vocabulary(10, words)


@pytest.mark.parametrize("content", [b"{}", b"no json", tokenizer_json({}), tokenizer_json({"<s>": 0}, added=[0])])
def test_a_useless_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_vocabulary(content)


class Silent:
    def on_step(self, outputs: Any) -> None: ...

    def on_events(self, events: Any) -> None: ...

    def on_failed(self, error: Any) -> None: ...


def info_of(**config: Any) -> EngineInfo:
    async def start() -> EngineInfo:
        engine = MockerEngine(EngineConfig(engine="mocker", **config))
        try:
            return await engine.start(Silent(), lambda _: None)
        finally:
            await engine.close()

    return asyncio.run(start())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json({"<s>": 0, "Ġthe": 1, "Ġcat": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 0], "bos_token_id": 1}))
    return tmp_path


def test_a_tokenizer_folder_is_enough_and_no_model_is_looked_for(folder: Path) -> None:
    info = info_of(tokenizer=str(folder), model="someone/Big-Model")
    card = info.card
    assert (card.name, card.vocab_size, card.bos_token_id, card.eos_token_ids) == ("big-model", 3, 1, [2, 0])
    contents = {artifact.name: info.artifacts[artifact.digest] for artifact in card.artifacts}
    assert contents["chat_template.jinja"] == b"{{ messages }}"
    assert contents["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert {hashlib.sha256(bytes(c)).hexdigest() for c in contents.values() if isinstance(c, bytes)} == set(
        info.artifacts
    )
    assert info_of(tokenizer=str(folder / "tokenizer.json")).card.fingerprint == card.fingerprint


def test_sizes_follow_the_configuration(folder: Path) -> None:
    plain = info_of(tokenizer=str(folder), served_model_name=("a", "b"))
    assert plain.card.served_names == ["a", "b"]
    assert (plain.kv_blocks, plain.card.max_model_len, plain.max_num_batched_tokens) == (16_384, 131_072, 8_192)
    small = info_of(tokenizer=str(folder), num_kv_blocks=10, max_model_len=1000, max_num_batched_tokens=100)
    assert (small.kv_blocks, small.card.max_model_len, small.max_num_batched_tokens) == (10, 160, 100)
    assert info_of(tokenizer=str(folder), kv_cache_memory=1 << 30).kv_blocks == 1024


@pytest.mark.model
def test_output_on_the_demo_model_reads_as_words(demo_model: ResolvedModel) -> None:
    vocabulary = read_vocabulary(demo_model.tokenizer_json)
    text = Tokenizer.from_str(demo_model.tokenizer_json.decode()).decode(list(vocabulary.words[:500]))
    assert all(word.isascii() and word.islower() for word in text.split())
    assert len(text.split()) == 500
