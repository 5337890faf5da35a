"""What a frontend asks of an engine: one `EngineRequest` per sequence (n > 1 is n requests)."""

from typing import Literal, Self

import msgspec

from headwater.errors import HeadwaterError

StructuredKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


class StructuredSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on the output text.

    `spec` is the JSON text of the schema, the regular expression, the JSON text of the list of choices, or the
    Lark/GBNF grammar; empty for `json_object`.
    """

    kind: StructuredKind
    spec: str = ""
    param: str = "response_format"
    """Field of the client's request that asks for it, for whoever has to refuse it."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen. Ranges are checked in the frontend and again by the engine.

    A draw depends on (seed, position) alone. Without a seed the frontend draws one, so that a moved or
    preempted sequence continues as it would have.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None
    """Number of most likely tokens reported beside the chosen one; None: no logprobs at all."""
    stop_token_ids: list[int] = []
    """In addition to the model's own end tokens."""
    ignore_eos: bool = False
    structured: StructuredSpec | None = None
    seed_drawn: bool = False
    """The client gave no seed. An engine to which a seed is costly may then do without."""

    @property
    def goes_past_end(self) -> bool:
        """Whether the model's end tokens do not end it. A complete structured output ends, whatever else is asked."""
        return self.ignore_eos and self.structured is None


class RelayedRequest(msgspec.Struct, frozen=True):
    """What a client sent, for a worker that speaks the client's protocol."""

    path: str
    body: bytes


class RemotePrefill(msgspec.Struct, frozen=True, omit_defaults=True):
    """Another worker that is to compute the prompt for the one that gets the request."""

    worker_id: str
    address: str
    """Of its request plane."""
    expected_ms: float = 0.0
    """From the asking to the first token, as whoever chose it expects; 0: no idea."""
    expected_cached_tokens: int = 0
    """Of the prompt, at that worker."""
    frontend_id: str = ""
    """Who chose it, and counts with it."""
    bootstrap: str = ""
    """`HOST:PORT` where its engine listens, for engines that move KV in pairs."""
    here_ms: float = 0.0
    """Price of computing the prompt at the worker that gets the request instead; 0: no idea."""


class Pairing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the engines of a prefill and a decode worker, which both get a request, find each other to move its KV."""

    host: str
    """Where the prefill worker's engine listens for the other one."""
    port: int
    room: int
    """Of this request alone, drawn by the decode worker."""
    frontend_id: str = ""
    """Who chose the prefill worker."""


class ExportOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """The KV blocks of a request are read by whoever sends it: only for workers among themselves."""

    first_block: int
    """Blocks before it are there already."""
    hold_s: float
    """How long blocks stay for the reader at most, from when the request arrives."""
    fingerprint: str
    """Of the reader's model; as in its card, like the following."""
    kv_layout: str
    dtype: str
    block_size: int
    frontend_id: str = ""
    """Who chose the worker."""
    hears_waits: bool = False
    """Whether the reader understands `PrefillWaits`."""


class EngineRequest(msgspec.Struct, omit_defaults=True):
    """One sequence to generate.

    `stream` names it on one connection (on the wire: chosen by the frontend; towards the engine: by the worker
    shell). `prompt` holds the token ids, 4 bytes each, little-endian. `block_ids` holds the ids of its full
    blocks, 16 bytes each, in order (may be empty: the engine then hashes itself).
    """

    stream: int
    request_id: str
    model: str
    prompt: bytes
    sampling: SamplingParams
    block_ids: bytes = b""
    namespace: bytes = b""
    """Key of the block identity (see `headwater.kv.identity`): same namespace, shared prefixes."""
    resumed_tokens: bytes = b""
    """Token ids already generated elsewhere: they count as output, not as prompt."""
    priority: int = 0
    """Higher is served first."""
    deadline: float | None = None
    """Epoch seconds after which the answer is worthless."""
    arrival: float = 0.0
    """Epoch seconds when the frontend accepted it."""
    session_id: str | None = None
    adapter: str | None = None
    expected_cached_tokens: int = 0
    """Of the prompt, as whoever chose the worker expects."""
    tenant: str = ""
    """To whose account its blocks go in the cache tiers: a tenant, or a group that shares; empty: nobody's."""
    kv_share: float = 1.0
    """The most of a tier that this account may fill while others want room."""
    relay: RelayedRequest | None = None
    """For relayed models: the request itself; `prompt` is then its text, to weigh it and to find its like."""
    prefill: RemotePrefill | None = None
    """Where the prompt is to be computed, if not here."""
    export: ExportOrder | None = None
    pairing: Pairing | None = None
    """For engines that move KV in pairs, at both of them."""
    step_tokens: int = 0
    """Its prompt is computed only in steps that compute so many prompt tokens at most, so that whoever comes next does
    not wait long for the step's end; 0: in any."""

    ticket: bytes = b""
    """Towards an engine that moves KV by itself: what the prefill of this request has ended with."""


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `HeadwaterError` on the wire."""

    code: str
    message: str
    http_status: int = 500
    retryable: bool = False
    param: str | None = None

    @classmethod
    def of(cls, error: HeadwaterError) -> Self:
        """The wire form of an error."""
        param: str | None = getattr(error, "param", None)
        return cls(error.code, error.message, error.http_status, error.retryable, param)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, after penalties and before temperature and cuts."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class SequenceOutput(msgspec.Struct, array_like=True):
    """What one step produced for one sequence. The last one of a sequence has a `finish_reason`."""

    stream: int
    token_ids: list[int]
    finish_reason: str | None = None
    """One of `headwater.types.FinishReason`."""
    stop_token_id: int | None = None
    """The end or stop token that ended it (not among `token_ids`)."""
    num_cached_tokens: int | None = None
    """In the first output only: prompt tokens that were not computed again."""
    logprobs: list[TokenLogprobs] | None = None
    """As many as `token_ids`."""
    error: ErrorInfo | None = None
    relayed: bytes = b""
    """Of a relayed answer: the next piece of its body; `token_ids` then only counts its events."""
    ticket: bytes = b""
    """Of an exported request at an engine that moves KV by itself: by which another one finds it."""

    @classmethod
    def failed(cls, stream: int, error: HeadwaterError) -> Self:
        """The last output of a sequence that is not served, or no further."""
        return cls(stream, [], "error", error=ErrorInfo.of(error))
