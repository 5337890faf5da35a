"""The real model through scheduler, executor and CPU kernels, against transformers in float32."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_core import Core, Result, request
from tokenizers import Tokenizer

from headwater.engines.native.base import FlatBatch
from headwater.engines.native.checkpoints import open_checkpoint
from headwater.engines.native.cpu.backend import CpuBackend, CpuOptions
from headwater.engines.native.structured.guidance import GuidanceCompiler
from headwater.protocol.request import EngineRequest, StructuredSpec
from headwater.weights import ResolvedModel
from model_fixtures import reference_logits

pytestmark = pytest.mark.model

NEW_TOKENS = 64
NUM_BLOCKS = 400
SYSTEM = "<|im_start|>system\nYou are a patient assistant who explains things in short sentences.<|im_end|>\n"
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rivers.",
    "Name three prime numbers larger than 100.",
    "Explain why the sky is blue.",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish.",
    "Write a short poem about a cat named Bob.",
    "List the planets of the solar system.",
]
TEXTS = [
    "Once upon a time",
    "The quick brown fox",
    "def fibonacci(n):\n    ",
    '{"name": "',
    "In 1492, Columbus",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,\n\n",
    "The derivative of x squared is",
    "SELECT name FROM users WHERE",
    "Zwei plus zwei ist",
    "import numpy as np\n\nx = np.",
    "A",
]


@pytest.fixture(scope="module")
def tokenizer(demo_model: ResolvedModel) -> Tokenizer:
    return Tokenizer.from_str(demo_model.tokenizer_json.decode())


@pytest.fixture(scope="module")
def backend(demo_model: ResolvedModel) -> Iterator[CpuBackend]:
    opened = CpuBackend(open_checkpoint(demo_model), CpuOptions(max_model_len=2048))
    opened.allocate_kv(NUM_BLOCKS, 16)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[EngineRequest]:
    """Twenty prompts; eight share a system prompt of more than one block."""
    chats = [f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    prompts = [tokenizer.encode(text).ids for text in chats + TEXTS]
    return [
        request(number, prompt, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
        for number, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def mixed(backend: CpuBackend, requests: list[EngineRequest]) -> dict[int, Result]:
    """All twenty in one batch: chunked prefill, prefix hits, and a pool too small for all at once."""
    core = Core(backend, num_blocks=60, max_num_batched_tokens=48)
    results = core.run(requests[:10], later={12: requests[10:]})
    load = core.core.load()
    assert load.preemptions > 0
    assert load.cached_tokens > 0
    return results


def test_greedy_equals_transformers_token_for_token(
    demo_reference: Any, requests: list[EngineRequest], mixed: dict[int, Result]
) -> None:
    """If each token is the argmax given all before it, then greedy decoding gives the same text."""
    for each in requests:
        prompt = np.frombuffer(each.prompt, np.uint32).tolist()
        tokens = mixed[each.stream].tokens
        assert len(tokens) == NEW_TOKENS
        expected = reference_logits(demo_reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(-1).tolist(), each.stream
        own = [entry.logprob for entry in mixed[each.stream].logprobs]
        theirs = expected.log_softmax(-1).max(-1).values.tolist()
        assert own == pytest.approx(theirs, abs=1e-3)


def test_alone_gives_the_same_bits_as_mixed(
    backend: CpuBackend, requests: list[EngineRequest], mixed: dict[int, Result]
) -> None:
    for each in requests:
        core = Core(backend, prefix_caching=False, max_num_batched_tokens=512)
        alone = core.run([each])[each.stream]
        assert alone.tokens == mixed[each.stream].tokens
        assert alone.logprobs == mixed[each.stream].logprobs


def test_a_moved_stream_continues_bit_for_bit(
    backend: CpuBackend, requests: list[EngineRequest], mixed: dict[int, Result]
) -> None:
    """What decode steps computed there is rebuilt by prefill here."""
    whole, expected = requests[4], mixed[4]
    kept = expected.tokens[:40]
    moved = EngineRequest(
        4, "moved", "m", whole.prompt, whole.sampling, resumed_tokens=np.array(kept, np.uint32).tobytes()
    )
    rest = Core(backend).run([moved])[4]
    assert rest.tokens == expected.tokens[40:]
    assert rest.logprobs == expected.logprobs[40:]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def test_json_schema_outputs_always_parse_and_validate(
    backend: CpuBackend, demo_model: ResolvedModel, tokenizer: Tokenizer
) -> None:
    """Hot sampling, a pool that preempts, and each stream moved once in the middle of its document."""
    eos = demo_model.eos_token_ids
    compiler = GuidanceCompiler(demo_model.tokenizer_json, backend.config.vocab_size, eos)
    spec = StructuredSpec("json_schema", json.dumps(PERSON))
    prompt = tokenizer.encode("<|im_start|>user\nDescribe a person.<|im_end|>\n<|im_start|>assistant\n").ids
    sampling = {"max_tokens": 300, "temperature": 1.5, "structured": spec}
    core = Core(backend, eos=eos, compiler=compiler, num_blocks=24, max_num_batched_tokens=48)
    results = core.run([request(seed, [*prompt, 10 + seed], seed=seed, **sampling) for seed in range(8)])
    assert core.core.load().preemptions > 0
    for seed, result in results.items():
        assert result.finish_reason == "stop", result
        value = json.loads(tokenizer.decode(result.tokens))
        assert list(value) == ["name", "age", "tags"]
        assert len(value["name"]) <= 12
        assert 0 <= value["age"] <= 120
        assert set(value["tags"]) <= {"red", "green", "blue"}
        kept = result.tokens[: len(result.tokens) // 2]
        moved = request(seed, [*prompt, 10 + seed], kept, seed=seed, **sampling)
        assert Core(backend, eos=eos, compiler=compiler).run([moved])[seed].tokens == result.tokens[len(kept) :]


def all_logits(backend: CpuBackend, ids: list[int]) -> torch.Tensor:
    count = len(ids)
    num_blocks = -(-count // backend.block_size)
    batch = FlatBatch(
        token_ids=np.array(ids, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logit_rows=np.arange(count, dtype=np.int32),
        num_decode=0,
    )
    return backend.forward(batch).clone()


def test_perplexity_equals_transformers(backend: CpuBackend, demo_reference: Any, tokenizer: Tokenizer) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = tokenizer.encode(text).ids[:384]
    targets = torch.tensor(ids[1:])
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], targets).item()
        for logits in (all_logits(backend, ids), reference_logits(demo_reference, ids))
    ]
    assert 0.5 < losses[1] < 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


HASH_IN_ANOTHER_PROCESS = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from test_native_demo_model import open_for_hash, logits_hash
print(logits_hash(open_for_hash(threads=2)))
"""


def open_for_hash(threads: int) -> CpuBackend:
    from headwater.weights import resolve

    opened = CpuBackend(open_checkpoint(resolve(None)), CpuOptions(threads=threads, max_model_len=2048))
    opened.allocate_kv(NUM_BLOCKS, 16)
    return opened


def logits_hash(backend: CpuBackend) -> str:
    ids = np.random.default_rng(0).integers(0, 49_152, 40).tolist()
    return hashlib.sha256(all_logits(backend, ids).numpy().tobytes()).hexdigest()


def test_logits_are_the_same_bits_in_another_process_with_other_threads(backend: CpuBackend) -> None:
    own = logits_hash(backend)
    here = Path(__file__).parent
    command = [sys.executable, "-c", HASH_IN_ANOTHER_PROCESS, str(here), str(here.parent)]
    other = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert other.stdout.strip() == own
