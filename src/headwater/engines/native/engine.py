"""The native engine, assembled: model -> checkpoint -> sizes -> backend -> executor, behind `CoreEngine`.

This is the one place that chooses concrete parts. On CPU our kernels compute, with torch as the fallback where they
can be neither found nor built; on CUDA torch computes.
"""

import logging
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import torch

from headwater.config.schema import EngineConfig
from headwater.engines.base import ALONE, EngineInfo, Placement, Progress, ProgressSink
from headwater.engines.card import served_names, text_artifacts
from headwater.engines.core import BuiltEngine
from headwater.engines.engine import CoreEngine
from headwater.engines.loop import ThreadedLoop
from headwater.engines.native.base import Backend, Checkpoint, FlatBatch
from headwater.engines.native.checkpoints import open_checkpoint
from headwater.engines.native.cpu.backend import CpuBackend, CpuOptions
from headwater.engines.native.cpu.library import KernelsUnavailable
from headwater.engines.native.host import cpu_model, free_memory_bytes, host_cores
from headwater.engines.native.memory import KvDemand, KvSize, kv_block_bytes, num_parameters, size_kv
from headwater.engines.native.placement import Share, bind, choose_share
from headwater.engines.native.runner import NativeExecutor
from headwater.engines.native.structured.base import ConstraintCompiler
from headwater.engines.native.torch_backend.backend import TorchBackend
from headwater.engines.native.torch_backend.options import TorchOptions
from headwater.errors import ConfigError, ModelError
from headwater.protocol.cluster import ModelCard
from headwater.weights import ResolvedModel, resolve

logger = logging.getLogger(__name__)

_CPU_PREFILL_TOKENS = 64
"""Room for prefill in a step on CPU: a token costs milliseconds there, and all others wait for it."""
_CUDA_BATCHED_TOKENS = 8192


class NativeEngine(CoreEngine):
    """See `headwater.engines.base.Engine`."""

    def __init__(self, config: EngineConfig, placement: Placement = ALONE) -> None:
        super().__init__(config, partial(build_engine, config, placement), ThreadedLoop("native-engine"))


def build_engine(config: EngineConfig, placement: Placement, progress: ProgressSink) -> BuiltEngine:
    """Load and warm, on the thread that will run the steps. Raises `ModelError` or `ConfigError`."""
    if config.tensor_parallel_size != 1:
        raise ConfigError(f"tensor_parallel_size is {config.tensor_parallel_size}: the native engine runs on 1 device")
    device = _device(config)
    share = choose_share(host_cores(sorted(os.sched_getaffinity(0))), placement, config.threads)
    bind(share)
    torch.set_num_threads(share.threads)
    model = resolve(
        config.model,
        revision=config.revision,
        tokenizer=config.tokenizer,
        chat_template=config.chat_template,
        progress=progress,
    )
    checkpoint = open_checkpoint(model)
    size = _size(config, checkpoint, device, placement)
    backend = _open_backend(config, checkpoint, device, share, size.max_model_len, progress)
    backend.allocate_kv(size.num_blocks, config.block_size)
    progress(Progress("warm", detail=f"{size.num_blocks} KV blocks"))
    _warm_up(backend)
    compiler = _compiler(model, checkpoint.config.vocab_size)
    info = _info(config, model, backend, size.max_model_len, _hardware(device, share, backend))
    progress(Progress("ready", detail=info.card.name))
    executor = NativeExecutor(backend, model.eos_token_ids, compiler)
    return BuiltEngine(executor, info, executor.prepare, backend.kv_memory())


def _device(config: EngineConfig) -> str:
    cuda = torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise ConfigError("device is cuda, but torch sees no CUDA device here: use --device cpu")
    return "cuda" if cuda and config.device != "cpu" else "cpu"


def _dtype(config: EngineConfig, device: str) -> torch.dtype | None:
    """The arithmetic type asked for; None: the device's own choice."""
    if config.dtype == "auto":
        return None
    if device == "cpu" and config.dtype != "float32":
        raise ConfigError(
            f"dtype {config.dtype} is not computed with on a CPU, where it would be slower: use --dtype float32 "
            "(16-bit weights stay 16 bits wide in memory all the same)"
        )
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _size(config: EngineConfig, checkpoint: Checkpoint, device: str, placement: Placement) -> KvSize:
    model = checkpoint.config
    value_bytes = (_dtype(config, device) or (torch.float32 if device == "cpu" else torch.bfloat16)).itemsize
    free_bytes = free_memory_bytes() if device == "cpu" else torch.cuda.mem_get_info()[0]
    demand = KvDemand(
        context_limit=model.max_position_embeddings,
        block_bytes=kv_block_bytes(model, config.block_size, value_bytes),
        free_bytes=free_bytes - 2 * num_parameters(model),
        num_workers=placement.count,
    )
    size = size_kv(config, demand)
    if config.max_model_len is None and size.max_model_len < demand.context_limit:
        logger.warning(
            "the longest context is %d tokens, as many as the KV cache holds; the model could take %d",
            size.max_model_len,
            demand.context_limit,
        )
    return size


def _open_backend(
    config: EngineConfig, checkpoint: Checkpoint, device: str, share: Share, max_model_len: int, progress: ProgressSink
) -> Backend:
    dtype = _dtype(config, device)
    if device == "cpu":
        folder = Path(config.weights_cache).expanduser() if config.weights_cache else None
        options = CpuOptions(threads=share.threads, weights_cache=folder, max_model_len=max_model_len)
        try:
            return CpuBackend(checkpoint, options, progress)
        except KernelsUnavailable as error:
            logger.warning("computing with torch, slower and not batch-invariant: %s", error)
    torch_options = TorchOptions(
        device=device, dtype=dtype, deterministic=config.deterministic, max_num_seqs=config.max_num_seqs
    )
    return TorchBackend(checkpoint, max_model_len, torch_options, progress)


def _warm_up(backend: Backend) -> None:
    """One step: maps in the weights, starts the threads, and shows that the model computes numbers."""
    batch = FlatBatch(
        token_ids=np.zeros(1, dtype=np.int32),
        positions=np.zeros(1, dtype=np.int32),
        query_starts=np.array([0, 1], dtype=np.int32),
        context_lens=np.ones(1, dtype=np.int32),
        block_tables=np.zeros((1, 1), dtype=np.int32),
        logit_rows=np.zeros(1, dtype=np.int32),
        num_decode=1,
    )
    if not bool(torch.isfinite(backend.forward(batch)).all()):
        raise ModelError(
            "the model computes numbers that are not finite",
            hint="The weight files may be damaged; a model published in bfloat16 may need --dtype float32.",
        )


def _compiler(model: ResolvedModel, vocab_size: int) -> ConstraintCompiler | None:
    """Structured output, or None with a warning where this tokenizer does not allow for it."""
    try:
        from headwater.engines.native.structured.guidance import GuidanceCompiler

        return GuidanceCompiler(model.tokenizer_json, vocab_size, model.eos_token_ids)
    except (ImportError, ValueError) as error:
        logger.warning("structured output will be refused: %s", error)
        return None


def _info(
    config: EngineConfig, model: ResolvedModel, backend: Backend, max_model_len: int, hardware: str
) -> EngineInfo:
    artifacts, contents = text_artifacts(model.tokenizer_json, model.tokenizer_config, model.chat_template)
    names = served_names(config, model.name)
    card = ModelCard(
        name=names[0],
        served_names=names,
        fingerprint=model.fingerprint,
        architecture=backend.config.architecture,
        dtype=str(backend.dtype).removeprefix("torch."),
        kv_layout=backend.kv_layout,
        max_model_len=max_model_len,
        block_size=backend.block_size,
        vocab_size=backend.config.vocab_size,
        bos_token_id=model.bos_token_id,
        eos_token_ids=list(model.eos_token_ids),
        artifacts=artifacts,
        default_sampling=model.default_sampling,
        kv_bytes_per_token=backend.block_bytes // backend.block_size,
        num_parameters=num_parameters(backend.config),
    )
    return EngineInfo(
        engine="native",
        card=card,
        artifacts=contents,
        kv_blocks=backend.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=_batched_tokens(config, hardware),
        hardware=hardware,
        batch_invariant=backend.batch_invariant,
    )


def _batched_tokens(config: EngineConfig, hardware: str) -> int:
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    if hardware.startswith("cuda"):
        return max(_CUDA_BATCHED_TOKENS, config.max_num_seqs + config.block_size)
    return config.max_num_seqs + max(_CPU_PREFILL_TOKENS, config.block_size)


def _hardware(device: str, share: Share, backend: Backend) -> str:
    """Class of hardware, e.g. `cpu-amd-epyc-7763-64-core-avx2-1t`."""
    if device == "cuda":
        return f"cuda-{_slug(torch.cuda.get_device_name())}"
    isa = backend.isa if isinstance(backend, CpuBackend) else "torch"
    return f"cpu-{_slug(cpu_model()) or 'unknown'}-{isa}-{share.threads}t"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|processor|cpu|@.*", " ", name.lower())).strip("-")
