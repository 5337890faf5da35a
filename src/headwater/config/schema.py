"""The configuration model: frozen structs, one per role, with defaults, help and units.

A key `engine.max_num_seqs` has the flag `--max-num-seqs`, the environment twin `HEADWATER_MAX_NUM_SEQS` and the YAML
key `max_num_seqs` under `engine`. Leaf names are unique over all sections, so a flag needs no prefix. Fields typed
`Bytes`, `Count`, `Positive` and `Seconds` accept human units (`20GiB`, `32K`, `500ms`) in all three spellings.
"""

from typing import Annotated, Literal

import msgspec

Bytes = Annotated[int, msgspec.Meta(ge=0, extra={"unit": "bytes"})]
Count = Annotated[int, msgspec.Meta(ge=0, extra={"unit": "count"})]
Positive = Annotated[int, msgspec.Meta(ge=1, extra={"unit": "count"})]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, extra={"unit": "seconds"})]
Secret = Annotated[str, msgspec.Meta(extra={"secret": True})]


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine."""

    model: Annotated[str | None, _doc("Catalogue name, folder, GGUF file or hub id; none: the demo model.")] = None
    revision: Annotated[str | None, _doc("Hub revision (branch, tag or commit) to pin.")] = None
    served_model_name: Annotated[tuple[str, ...], _doc("Names the API answers to; the first is the main one.")] = ()
    engine: Annotated[str, _doc("native, mocker, vllm, sglang, trtllm or a `headwater.engines` entry point.")] = (
        "native"
    )
    tokenizer: Annotated[str | None, _doc("Folder or tokenizer.json when not beside the model.")] = None
    chat_template: Annotated[str | None, _doc("File with a Jinja template that replaces the model's own.")] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("Where to compute.")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _doc("Arithmetic and KV type.")] = "auto"
    deterministic: Annotated[bool, _doc("CUDA: equal runs give equal bits, at a cost; on a CPU they always do.")] = (
        False
    )
    max_model_len: Annotated[Positive | None, _doc("Longest context in tokens; none: the model's own.")] = None
    block_size: Annotated[Positive, _doc("Tokens per KV block.")] = 16
    kv_cache_memory: Annotated[Bytes | None, _doc("Bytes of KV storage; none: chosen from free memory.")] = None
    num_kv_blocks: Annotated[Positive | None, _doc("Number of KV blocks, instead of --kv-cache-memory.")] = None
    max_num_seqs: Annotated[Positive, _doc("Sequences running at once.")] = 64
    max_num_batched_tokens: Annotated[Positive | None, _doc("Tokens per step; none: chosen for the device.")] = None
    max_waiting: Annotated[Count, _doc("Sequences waiting at one worker before it answers `overloaded`.")] = 1024
    enable_prefix_caching: Annotated[bool, _doc("Reuse KV blocks of equal prefixes.")] = True
    tensor_parallel_size: Annotated[Positive, _doc("Devices per engine (native: 1).")] = 1
    threads: Annotated[Positive | None, _doc("Compute threads per worker; none: cores divided among workers.")] = None
    attach: Annotated[tuple[str, ...], _doc("URLs of running OpenAI-compatible servers, one per worker.")] = ()
    attach_as: Annotated[Literal["auto", "vllm", "sglang", "trtllm", "openai"], _doc("Which kind of server.")] = "auto"
    attach_adapters: Annotated[
        tuple[str, ...], _doc("trtllm: LoRA adapters that the attached server may load, NAME=FOLDER there.")
    ] = ()
    attach_kv_events: Annotated[
        tuple[str, ...], _doc("Where the attached servers publish KV events, in their order, if they do not say it.")
    ] = ()
    attach_api_key: Annotated[tuple[Secret, ...], _doc("Keys for those servers, in their order.")] = ()
    kv_staging: Annotated[
        Bytes | None,
        _doc("vllm: host memory that KV passes through to and from other workers; none: 4 GiB where roles are given."),
    ] = None
    engine_args: Annotated[tuple[str, ...], _doc("Words for the own command line of vllm and sglang.")] = ()
    weights_cache: Annotated[str | None, _doc("Folder of prepared weights; none: the user's cache folder.")] = None
    mocker_speedup: Annotated[NonNegative, _doc("Mocker: how much faster than modelled; 0 means infinitely.")] = 1.0
    mocker_prefill_ms_per_token: Annotated[NonNegative, _doc("Mocker: prefill cost.")] = 0.05
    mocker_decode_base_ms: Annotated[NonNegative, _doc("Mocker: cost of a decode step.")] = 5.0
    mocker_decode_ms_per_sequence: Annotated[NonNegative, _doc("Mocker: added per decoding sequence.")] = 0.05
    mocker_decode_ms_per_kv_token: Annotated[NonNegative, _doc("Mocker: added per token of context.")] = 0.00001
    mocker_transfer_gb_per_s: Annotated[NonNegative, _doc("Mocker: KV moved between workers; 0: in no time.")] = 25.0


class FrontendConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP front door."""

    host: Annotated[str, _doc("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")] = 8000
    keys: Annotated[
        str | None, _doc("Keyring of tenants and hashed keys: a file, env:NAME or command:PROGRAM ARGS.")
    ] = None
    api_key: Annotated[
        tuple[Secret, ...], _doc("Keys in plain, with every right; without keys of either kind none is asked for.")
    ] = ()
    operator_key: Annotated[
        Secret | None, _doc("Key for metrics and admin routes alone; `serve` draws one for itself and for `status`.")
    ] = None
    tls_cert: Annotated[str | None, _doc("PEM file with the certificate chain: the port then speaks TLS alone.")] = None
    tls_key: Annotated[str | None, _doc("PEM file with its private key; none: in the same file.")] = None
    tls_client_ca: Annotated[
        str | None, _doc("PEM file of authorities: clients must show a certificate of one of them.")
    ] = None
    tenant_ledger: Annotated[
        str | None, _doc("File that keeps what tenants used; none: beside the file of --keys.")
    ] = None
    usage_log: Annotated[str | None, _doc("File with a line per request: tenant, tokens, accelerator time.")] = None
    audit_log: Annotated[str | None, _doc("File with a line per refusal, admin request and change of keys.")] = None
    cors: Annotated[tuple[str, ...], _doc("Origins allowed by CORS; `*` for any.")] = ()
    trust_tenant_header: Annotated[
        bool, _doc("Believe `x-tenant-id` from plain keys or without keys; in a keyring the scope delegate says so.")
    ] = False
    strict: Annotated[bool, _doc("Refuse unknown request fields instead of ignoring them.")] = False
    max_body: Annotated[Bytes, _doc("Largest request body.")] = 16 * 1024 * 1024
    max_connections: Annotated[Positive, _doc("Open connections per frontend.")] = 10_000
    max_concurrent_requests: Annotated[Positive, _doc("Requests in progress per frontend; more get 429.")] = 4096
    stream_buffer: Annotated[Bytes, _doc("Unread bytes of one stream before it is cut off.")] = 1024 * 1024
    header_timeout: Annotated[Seconds, _doc("Time to send a complete request head.")] = 10.0
    body_timeout: Annotated[Seconds, _doc("Time without progress while a body is read.")] = 20.0
    keepalive_timeout: Annotated[Seconds, _doc("Idle time before a kept-alive connection is closed.")] = 75.0
    request_timeout: Annotated[Seconds, _doc("Longest life of a request; 0: no limit.")] = 0.0
    tokenizer_backend: Annotated[Literal["auto", "fastokens", "tokenizers"], _doc("Tokenizer library.")] = "auto"
    record_requests: Annotated[
        str | None, _doc("File to log served requests in, for a replay: lengths, times, hashes of blocks, no text.")
    ] = None
    record_requests_size: Annotated[Bytes, _doc("Size at which that file is put aside and begun anew.")] = (
        256 * 1024 * 1024
    )
    record_requests_files: Annotated[Count, _doc("How many of those put aside are kept.")] = 3


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How workers are chosen."""

    router_policy: Annotated[
        str, _doc("delay, least_loaded, round_robin, another built-in one, or a `headwater.router` entry point.")
    ] = "delay"
    router_decode_share: Annotated[
        float,
        msgspec.Meta(ge=0, le=1, description="What matters: 0 the time to the first token, 1 that to the last one."),
    ] = 1.0
    router_index_blocks: Annotated[Positive, _doc("Distinct KV blocks the router remembers; about 130 bytes each.")] = (
        8_000_000
    )
    router_queue_backlog: Annotated[
        NonNegative, _doc("More steps of prefill, in more prompts, on all workers: requests wait in line; 0: no line.")
    ] = 3.0
    router_queue_limit: Annotated[Positive, _doc("Requests in line; more are refused.")] = 1024
    router_queue_timeout: Annotated[Seconds, _doc("Longest wait in line.")] = 30.0
    router_first_token_limit: Annotated[
        Seconds, _doc("Refuse at once what would wait longer for its first token, by what is measured; 0: no limit.")
    ] = 0.0
    router_class_limit: Annotated[
        tuple[str, ...], _doc("Requests of a priority class in line: low=N (below 0), normal=N (0), high=N (above 0).")
    ] = ()
    router_session_affinity: Annotated[
        Literal["off", "soft", "hard"], _doc("A session's worker: no matter, preferred among equals, or a must.")
    ] = "soft"
    router_session_ttl: Annotated[Seconds, _doc("How long a session's worker is remembered.")] = 300.0


class RuntimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the parts find and reach each other."""

    registry: Annotated[str | None, _doc("`file:///folder` or `etcd://host:2379`; none: a private folder.")] = None
    bind: Annotated[str, _doc("Address the planes listen on: `ipc` or a host address for tcp.")] = "ipc"
    cluster_key: Annotated[str | None, _doc("File of this process's CURVE keys and the members it lets in.")] = None
    insecure: Annotated[bool, _doc("Allow addresses that others can reach without keys, on a network you trust.")] = (
        False
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _doc("Least severe level logged.")] = "info"
    log_format: Annotated[Literal["text", "json"], _doc("Lines for people or for machines.")] = "text"
    drain_timeout: Annotated[Seconds, _doc("Time for running streams to finish on SIGTERM.")] = 30.0
    handover_timeout: Annotated[
        Seconds, _doc("Time for a frontend's streams to finish when another process has taken its place (SIGUSR1).")
    ] = 600.0


class FaultsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a frontend does about workers that fail and clients that come back."""

    hang_timeout: Annotated[
        Seconds, _doc("Least silence of a busy worker that is a hang, if it is 5 of its steps as well; 0: never.")
    ] = 2.0
    hang_restart: Annotated[
        Seconds, _doc("A worker that answers nothing for so long is killed and started again by `serve`; 0: never.")
    ] = 120.0
    canary_interval: Annotated[Seconds, _doc("Idle time after which a worker is tried with one token; 0: never.")] = (
        30.0
    )
    migration_limit: Annotated[Count, _doc("Times that a stream may go on at another worker.")] = 8
    migration_timeout: Annotated[Seconds, _doc("Longest wait of a stream that no worker can take over.")] = 30.0
    resume_time: Annotated[
        Seconds,
        _doc("How long a broken answer goes on for a client that sent Last-Event-ID and may come back; 0: not."),
    ] = 30.0


class DisaggConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts computed by other workers than those that decode."""

    role: Annotated[
        Literal["both", "prefill", "decode", "adaptive"],
        _doc("What workers are for; adaptive: changed while they run, as traffic asks for."),
    ] = "both"
    disagg: Annotated[
        Literal["plan", "always", "never", "threshold"],
        _doc("Which prompts go to prefill workers: those for which it pays, all, none, long ones."),
    ] = "plan"
    disagg_threshold: Annotated[Count, _doc("With threshold: tokens left to compute from which on a prompt goes.")] = (
        512
    )
    plan_ttft: Annotated[Seconds, _doc("Adaptive roles: objective for the time to the first token; 0: none.")] = 0.0
    plan_tpot: Annotated[Seconds, _doc("Adaptive roles: objective for the time per output token; 0: none.")] = 0.0
    plan_interval: Annotated[Seconds, _doc("Adaptive roles: time between looks at the traffic.")] = 5.0
    transfer_gb_per_s: Annotated[
        float, msgspec.Meta(gt=0, description="Believed speed of KV between workers, in GB/s, for prices.")
    ] = 10.0
    transfer_backends: Annotated[
        tuple[str, ...], _doc("Ways to move KV blocks, the best first; none: all there are (shm, cma, ..., tcp).")
    ] = ()
    transfer_checksums: Annotated[bool, _doc("Check every KV block that was moved; costs 0.15 CPU s per GB.")] = False


class KvConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV blocks kept outside engines: one store per node, for all its workers."""

    kv_host: Annotated[Bytes, _doc("Memory for KV blocks, shared by the workers of this node; 0: none.")] = 0
    kv_disk: Annotated[str | None, _doc("Disk for KV blocks, as /folder:50GiB.")] = None
    kv_object: Annotated[str | None, _doc("Object store for KV blocks, as s3://bucket/prefix?cap=1TiB.")] = None
    kv_peer: Annotated[tuple[str, ...], _doc("Other nodes whose KV blocks are read, as host:port.")] = ()
    kv_listen: Annotated[str | None, _doc("Where other nodes read KV blocks of this one, as host:port.")] = None
    kv_peer_key: Annotated[str | None, _doc("File with the key that nodes share; not needed on one host.")] = None
    kv_policy: Annotated[Literal["lru", "s3fifo", "cost"], _doc("Which KV blocks go first.")] = "lru"
    kv_admission: Annotated[
        Literal["second-use", "all"], _doc("Which KV blocks go to disk and object store: those used twice, or all.")
    ] = "second-use"
    kv_socket: Annotated[
        str | None, _doc("Where the store listens; without a size: one that runs already (headwater kv serve).")
    ] = None

    @property
    def own_store(self) -> bool:
        """Whether the graph runs a store of its own."""
        return bool(self.kv_host or self.kv_disk or self.kv_object or self.kv_peer or self.kv_listen)


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole graph that `headwater serve` runs."""

    engine: EngineConfig = EngineConfig()
    frontend: FrontendConfig = FrontendConfig()
    router: RouterConfig = RouterConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    faults: FaultsConfig = FaultsConfig()
    disaggregation: DisaggConfig = DisaggConfig()
    kv: KvConfig = KvConfig()
    workers: Annotated[Positive, _doc("Worker processes, unless pools or --attach say how many.")] = 1
    prefill: Annotated[Count, _doc("Workers that only prefill; with --decode, instead of --workers.")] = 0
    decode: Annotated[Count, _doc("Workers that decode, and prefill what does not go to prefill workers.")] = 0
    frontends: Annotated[Positive, _doc("Frontend processes sharing the port.")] = 1
    ready_timeout: Annotated[Seconds, _doc("Time without progress before start-up is given up; 0: never.")] = 600.0
    max_restarts: Annotated[Count, _doc("Restarts of a process that keeps failing before it is given up.")] = 5
