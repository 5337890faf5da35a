"""What the registry holds: model cards, the model catalogue, and who serves what."""

from typing import Literal

import msgspec

from headwater.types import Role


class Artifact(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of the model that a frontend needs, fetched from any worker by digest."""

    name: str
    """`tokenizer.json`, `chat_template.jinja`, `tokenizer_config.json`, ..."""
    digest: str
    """SHA-256, hex."""
    size: int


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything a frontend or router must know about a model, from the worker that loaded it."""

    name: str
    """First of the served names."""
    served_names: list[str]
    fingerprint: str
    """Hex digest of the weights' identity and the tokenizer: equal fingerprints, exchangeable workers."""
    architecture: str
    dtype: str
    """Arithmetic type of the KV cache and activations, e.g. `float32`."""
    kv_layout: str
    """Tag of the block layout, e.g. `hw1.f32.l30.h3.d64.b16`: equal tags, exchangeable blocks."""
    max_model_len: int
    block_size: int
    vocab_size: int
    bos_token_id: int | None = None
    eos_token_ids: list[int] = []
    artifacts: list[Artifact] = []
    default_sampling: dict[str, float] = {}
    """From generation_config.json: temperature, top_p, top_k, repetition_penalty, ..."""
    kv_bytes_per_token: int = 0
    num_parameters: int = 0
    created: int = 0
    """Epoch seconds; 0 from an engine that does not know, whose worker then says when it was ready."""
    adapters: list[str] = []
    """Those of the served names that are adapters (LoRA) on top of the model."""
    relayed: bool = False
    """Requests reach the worker as clients send them, and its answers pass as they are: there is no tokenizer here."""


class CatalogueEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model this cluster offers, whether or not a worker is alive."""

    name: str
    card: ModelCard


InstanceState = Literal["starting", "ready", "asleep", "draining"]


class Instance(msgspec.Struct, frozen=True, omit_defaults=True):
    """One live worker. It exists as long as its lease does."""

    worker_id: str
    role: Role
    state: InstanceState
    card: ModelCard
    request_address: str
    """ZeroMQ address of the request plane, or `inproc://...`."""
    event_address: str
    engine: str
    """`native`, `mocker`, `vllm`, ..."""
    version: tuple[int, int]
    host: str = ""
    pid: int = 0
    kv_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    hardware: str = ""
    """Class of hardware, for pooling time models, e.g. `cpu-epyc-avx2-1t`."""
    paired: bool = False
    """Its engine moves KV to one like it, which got the request with it: a decode worker of this kind computes no
    prompt, a prefill worker nothing else."""
    bootstrap: str = ""
    """`HOST:PORT` where the engine of a paired prefill worker listens for the other one."""
    adaptive: bool = False
    """Whether its role may be changed by frontends (`SetRole`), as traffic asks for."""
    can_sleep: bool = False
    """Whether its engine has a way to give its device's memory back for a while (`Sleep`)."""
    num_failed_sleeps: int = 0
    """How often it could not, and went on."""
