"""The CPU backend: one C call per step over mapped weights and block-first KV storage.

Arithmetic and KV are float32. Weights keep their values exactly, in the narrowest type that can.

Batch-invariant: the logits of a row are the same bits alone, batched, in any chunking, block placement or number of
threads, because every sum has one order that depends on the row alone. All kernel variants with fused multiply-add
(AVX2, AVX-512, NEON) share that order.

Every index of a batch is checked before the kernels see it; a bad one raises `InternalError` and touches nothing.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.engines.base import KvMemory, Progress, ProgressSink
from headwater.engines.native.base import Checkpoint, FlatBatch, NativeModelConfig
from headwater.engines.native.cpu.binding import HwBatch, HwLayer, HwMatrix, HwModel, Kernels
from headwater.engines.native.cpu.library import load_library
from headwater.engines.native.cpu.panel_file import PanelFile
from headwater.engines.native.cpu.panels import PANEL_ROWS, padded
from headwater.engines.native.cpu.prepared import prepare
from headwater.engines.native.rope import rope_tables
from headwater.errors import ConfigError, InternalError, ModelError
from headwater.transfer.memory import Buffer, allocate
from headwater.weights.cache import default_cache_folder

MAX_HEAD_DIM = 512
_Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How the CPU backend runs."""

    threads: int = 1
    weights_cache: Path | None = None
    """Folder of prepared weights; None: the user's cache folder."""
    max_model_len: int | None = None
    """Positions the rotation tables cover; None: the model's own limit."""
    isa: str | None = None
    """`avx512`, `avx2` or `portable`; None: the best this machine runs."""


class CpuBackend:
    """`headwater.engines.native.base.Backend` on CPU."""

    dtype = torch.float32
    batch_invariant = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: CpuOptions | None = None,
        progress: ProgressSink = lambda _: None,
    ) -> None:
        options = options or CpuOptions()
        self.config = checkpoint.config
        _check_supported(self.config)
        cache = default_cache_folder()
        library = load_library(Path(__file__).parent, cache)
        self._kernels = Kernels(library, threads=options.threads, isa=options.isa)
        self.isa = self._kernels.isa
        self._weights = prepare(checkpoint, options.weights_cache or cache / "weights", progress)
        self.max_model_len = options.max_model_len or self.config.max_position_embeddings
        self._rope = _rope(self.config, self.max_model_len)
        self._model = _model(self.config, self._weights, self._rope)
        self._scratch = np.empty(0, dtype=np.float32)
        self._logits = torch.empty(0, padded(self.config.vocab_size))
        self._kv: Buffer | None = None
        self._kv_view = memoryview(b"")
        self._kv_bytes = np.empty(0, dtype=np.uint8)
        self.block_size = self.num_blocks = self.block_bytes = 0
        self.kv_layout = ""
        progress(Progress("load", detail=f"{self.isa}, {options.threads} threads"))

    @property
    def weights_bytes(self) -> int:
        """Size of the mapped weights, shared by all workers of the host."""
        return self._weights.nbytes

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        config = self.config
        if block_size < PANEL_ROWS or block_size % PANEL_ROWS:
            raise ConfigError(f"block size {block_size}: the CPU engine needs a multiple of {PANEL_ROWS}")
        if num_blocks < 1:
            raise ConfigError(f"{num_blocks} KV blocks: at least one is needed")
        if self._kv is not None:
            raise InternalError("KV storage is allocated once")
        head_floats = (config.head_dim + padded(config.head_dim)) * block_size
        self.block_size, self.num_blocks = block_size, num_blocks
        self.block_bytes = config.num_layers * config.num_kv_heads * head_floats * 4
        self.kv_layout = (
            f"hw1.f32.l{config.num_layers}.h{config.num_kv_heads}.d{config.head_dim}.b{block_size}.panel{PANEL_ROWS}"
        )
        self._kv = allocate(num_blocks * self.block_bytes, lazily=True)
        assert self._kv.view is not None
        self._kv_view = memoryview(self._kv.view)
        self._kv_bytes = np.frombuffer(memoryview(self._kv.view), dtype=np.uint8)

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        arrays = _BatchArrays(batch)
        arrays.check(self)
        tokens, rows = len(arrays.token_ids), len(arrays.logit_rows)
        needed = self._kernels.scratch_floats(self._model, tokens, rows)
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, dtype=np.float32)
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self._logits.shape[1])
        call = arrays.struct()
        call.kv, call.block_size, call.block_floats = (
            self._kv_bytes.ctypes.data,
            self.block_size,
            self.block_bytes // 4,
        )
        call.logits, call.logits_stride = self._logits.data_ptr(), self._logits.shape[1]
        self._kernels.forward(self._model, call, self._scratch.ctypes.data)
        return self._logits[:rows, : self.config.vocab_size]

    def block_view(self, block: int) -> memoryview:
        if not 0 <= block < self.num_blocks:
            raise InternalError(f"block {block} of {self.num_blocks}")
        return self._kv_bytes[block * self.block_bytes : (block + 1) * self.block_bytes].data

    def kv_memory(self) -> KvMemory:
        """Shared, so that others on this host can map it."""
        if self._kv is None:
            raise InternalError("KV storage has not been allocated")
        return KvMemory(self.num_blocks, self.block_bytes, self._kv, self._kv_view)

    def close(self) -> None:
        """Stop the threads and unmap the weights; KV memory goes with the last view of it."""
        if self._kernels.closed:
            return
        self._kernels.close()
        self._weights.close()
        self._kv_bytes = np.empty(0, dtype=np.uint8)
        self._kv_view.release()
        if self._kv is not None:
            self._kv.release()
            self._kv = None


class _BatchArrays:
    """The arrays of a batch as the kernels want them, contiguous int32."""

    def __init__(self, batch: FlatBatch) -> None:
        self.token_ids = _int32(batch.token_ids)
        self.positions = _int32(batch.positions)
        self.query_starts = _int32(batch.query_starts)
        self.context_lens = _int32(batch.context_lens)
        self.block_tables = _int32(batch.block_tables)
        self.logit_rows = _int32(batch.logit_rows)

    def check(self, backend: CpuBackend) -> None:
        starts, lens, tokens = self.query_starts, self.context_lens, len(self.token_ids)
        counts = np.diff(starts)
        _require(tokens > 0 and len(self.positions) == tokens, "tokens and positions differ in number")
        _require(starts[0] == 0 and starts[-1] == tokens and counts.min() > 0, "query_starts do not cover the tokens")
        _require(len(lens) == len(counts) and self.block_tables.shape[0] == len(lens), "sequences differ in number")
        expected = np.arange(tokens) - np.repeat(starts[1:] - lens, counts)
        _require(bool((self.positions == expected).all()), "positions do not end at the context lengths")
        limit = min(backend.max_model_len, self.block_tables.shape[1] * backend.block_size)
        _require(bool((lens >= counts).all()) and int(lens.max()) <= limit, f"a context is longer than {limit}")
        _require(_within(self.token_ids, backend.config.vocab_size), "a token is not in the vocabulary")
        _require(_within(self.block_tables, backend.num_blocks), "a block does not exist")
        _require(_within(self.logit_rows, tokens), "a logit row does not exist")

    def struct(self) -> HwBatch:
        return HwBatch(
            num_tokens=len(self.token_ids),
            num_seqs=len(self.context_lens),
            num_logit_rows=len(self.logit_rows),
            token_ids=self.token_ids.ctypes.data,
            positions=self.positions.ctypes.data,
            query_starts=self.query_starts.ctypes.data,
            context_lens=self.context_lens.ctypes.data,
            block_tables=self.block_tables.ctypes.data,
            logit_rows=self.logit_rows.ctypes.data,
            table_stride=self.block_tables.shape[1],
        )


def _int32(array: NDArray[np.int32]) -> _Int32:
    return np.ascontiguousarray(array, dtype=np.int32)


def _within(array: _Int32, limit: int) -> bool:
    return array.size == 0 or (int(array.min()) >= 0 and int(array.max()) < limit)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise InternalError(f"malformed batch: {problem}")


def _check_supported(config: NativeModelConfig) -> None:
    if config.head_dim % 2 or config.head_dim > MAX_HEAD_DIM:
        raise ModelError(f"head dimension {config.head_dim}: the CPU engine takes even ones up to {MAX_HEAD_DIM}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{config.num_heads} heads cannot share {config.num_kv_heads} KV heads")


def _rope(config: NativeModelConfig, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Tables [length, head_dim / 2]: both halves of a rotated head use the same angles."""
    half = config.head_dim // 2
    cos, sin = rope_tables(config, length)
    return (np.ascontiguousarray(cos[:, :half], np.float32), np.ascontiguousarray(sin[:, :half], np.float32))


def _model(
    config: NativeModelConfig, weights: PanelFile, rope: tuple[NDArray[np.float32], NDArray[np.float32]]
) -> HwModel:
    tied = config.tie_word_embeddings
    vocab = (config.vocab_size, config.hidden_size)
    head = _matrix(weights, "embedding" if tied else "head", *vocab)
    layers = (HwLayer * config.num_layers)(*(_layer(config, weights, index) for index in range(config.num_layers)))
    return HwModel(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_eps=config.rms_norm_eps,
        softmax_scale=config.head_dim**-0.5,
        cos=rope[0].ctypes.data,
        sin=rope[1].ctypes.data,
        layers=ctypes.cast(layers, ctypes.POINTER(HwLayer)),
        final_norm=weights.address("final_norm"),
        head=head,
        embedding=_matrix(weights, "embedding", *vocab),
    )


def _layer(config: NativeModelConfig, weights: PanelFile, index: int) -> HwLayer:
    prefix = f"layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return HwLayer(
        attention_norm=weights.address(f"{prefix}attention_norm"),
        mlp_norm=weights.address(f"{prefix}mlp_norm"),
        q_norm=weights.optional_address(f"{prefix}q_norm"),
        k_norm=weights.optional_address(f"{prefix}k_norm"),
        window=_window(config, index),
        qkv=_matrix(weights, f"{prefix}qkv", query + 2 * kv, hidden),
        output=_matrix(weights, f"{prefix}output", hidden, query),
        gate_up=_matrix(weights, f"{prefix}gate_up", 2 * padded(inner), hidden),
        down=_matrix(weights, f"{prefix}down", hidden, inner),
    )


def _window(config: NativeModelConfig, layer: int) -> int:
    if config.sliding_window is None:
        return 0
    applies = config.sliding_layers[layer] if config.sliding_layers else True
    return config.sliding_window if applies else 0


def _matrix(weights: PanelFile, name: str, rows: int, inputs: int) -> HwMatrix:
    return HwMatrix(
        kind=int(weights.kind(name)),
        n=padded(rows),
        k=padded(inputs),
        data=weights.address(name),
        bias=weights.optional_address(f"{name}.bias"),
    )
