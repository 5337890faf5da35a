"""An executor for scheduler tests that keeps a KV storage of prefixes and checks every plan against it.

Each KV slot holds the whole token prefix that was written there, so a wrong share, a lost block or a stale table is
seen at the read. The drawn token depends on the prefix alone.
"""

from array import array
from hashlib import blake2b

from headwater.protocol.request import EngineRequest, SamplingParams
from headwater.scheduler.limits import SchedulerLimits
from headwater.scheduler.plan import Sequence, Slice, StepPlan, StepResult

VOCAB = 50


def next_token(prefix: bytes) -> int:
    """From 10 up: small ids are free for prompts and end tokens."""
    return 10 + blake2b(prefix, digest_size=2).digest()[0] % (VOCAB - 10)


def expected_tokens(request: EngineRequest, limits: SchedulerLimits) -> tuple[list[int], str]:
    """What an unbroken, lonely run gives: new tokens and finish reason."""
    sampling = request.sampling
    tokens = array("I", request.prompt + request.resumed_tokens)
    num_prompt = len(request.prompt) // 4
    end = min(num_prompt + sampling.max_tokens, limits.max_model_len, limits.capacity_tokens)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else limits.eos_token_ids)
    drawn: list[int] = []
    while len(tokens) < end:
        token = next_token(tokens.tobytes())
        if token in stops and len(tokens) - num_prompt >= sampling.min_tokens:
            return drawn, "stop"
        tokens.append(token)
        drawn.append(token)
    return drawn, "length"


def request(stream: int, prompt: list[int], max_tokens: int = 4, **fields: object) -> EngineRequest:
    """A request with token ids as lists; sampling fields by name."""
    own = {name: fields.pop(name) for name in list(fields) if name in EngineRequest.__struct_fields__}
    resumed = own.pop("resumed", None) or fields.pop("resumed", [])
    return EngineRequest(
        stream=stream,
        request_id=f"r{stream}",
        model="m",
        prompt=array("I", prompt).tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens, **fields),  # type: ignore[arg-type]
        resumed_tokens=array("I", resumed).tobytes(),
        **own,  # type: ignore[arg-type]
    )


class KvCheckingExecutor:
    """Executes plans over the KV model, asserting what a real executor relies on."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._kv: dict[tuple[int, int], bytes] = {}
        self.computed_tokens = 0
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._check_shape(plan)
        for piece in plan.slices:
            self._check_reads(piece)
        for piece in plan.slices:
            self._write(piece)
        drawn = [next_token(piece.sequence.token_ids.tobytes()) for piece in plan.slices if piece.samples]
        return StepResult(drawn, None, 1.0)

    def _check_shape(self, plan: StepPlan) -> None:
        assert plan.slices
        assert sum(piece.num_tokens for piece in plan.slices) <= self._limits.max_num_batched_tokens
        assert len(plan.slices) <= self._limits.max_num_seqs
        assert len({piece.sequence.stream for piece in plan.slices}) == len(plan.slices)
        assert all(piece.num_tokens == 1 and piece.samples for piece in plan.slices[: plan.num_decode])
        for piece in plan.slices:
            sequence = piece.sequence
            assert piece.num_tokens >= 1
            assert piece.start == sequence.num_computed_tokens
            assert piece.samples == (piece.start + piece.num_tokens == sequence.num_tokens)
        prefills = plan.slices[plan.num_decode :]
        assert plan.num_prefill_tokens == sum(piece.num_tokens for piece in prefills)
        assert plan.decode_context_tokens == sum(piece.start + 1 for piece in plan.slices[: plan.num_decode])
        attended = [sum(range(piece.start + 1, piece.start + piece.num_tokens + 1)) for piece in prefills]
        assert plan.prefill_context_tokens == sum(attended)

    def _check_reads(self, piece: Slice) -> None:
        raw = piece.sequence.token_ids.tobytes()
        for position in range(piece.start):
            slot = self._slot(piece.sequence, position)
            assert self._kv.get(slot) == raw[: (position + 1) * 4], f"wrong KV at position {position}"

    def _write(self, piece: Slice) -> None:
        raw = piece.sequence.token_ids.tobytes()
        for position in range(piece.start, piece.start + piece.num_tokens):
            self._kv[self._slot(piece.sequence, position)] = raw[: (position + 1) * 4]
        self.computed_tokens += piece.num_tokens

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        size = self._limits.block_size
        return sequence.block_table[position // size], position % size
