"""`Backend` in plain torch, one code path for CPU and CUDA.

CPU: float32 arithmetic; products through fbgemm's 16-bit weights where the checkpoint is 16-bit or quantised, torch's
own attention over gathered blocks. This is the fallback for a machine that cannot build or load our kernels: correct,
slower, and not batch-invariant (torch chooses algorithms by batch size).

CUDA: paged attention by FlashInfer where it is installed and fits, by our Triton kernel otherwise; decode steps replay
CUDA graphs, one per batch size.

NOT RUN ON HARDWARE: everything specific to CUDA (FlashInfer, graph capture, the deterministic switches). The Triton
kernel has run in Triton's interpreter on a CPU only, where its results equal the reference.
"""

from typing import TYPE_CHECKING

import torch

from headwater.engines.base import KvMemory, ProgressSink
from headwater.engines.native.base import Checkpoint, FlatBatch
from headwater.engines.native.rope import rope_tables
from headwater.engines.native.torch_backend.attention import GatherAttention, PagedAttention
from headwater.engines.native.torch_backend.batch import device_batch
from headwater.engines.native.torch_backend.kv import KvStorage, kv_layout
from headwater.engines.native.torch_backend.model import Decoder
from headwater.engines.native.torch_backend.options import TorchOptions, compute_dtype, make_deterministic
from headwater.engines.native.torch_backend.weights import load_weights
from headwater.errors import ModelError

if TYPE_CHECKING:
    from headwater.engines.native.torch_backend.graphs import DecodeGraphs


class TorchBackend:
    """Weights and KV on one torch device. Used from one thread."""

    batch_invariant = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_model_len: int,
        options: TorchOptions | None = None,
        progress: ProgressSink = lambda _: None,
    ) -> None:
        options = options or TorchOptions()
        self._device = _available(torch.device(options.device))
        if options.deterministic and self._device.type == "cuda":
            make_deterministic()
        self.config = checkpoint.config
        self.dtype = compute_dtype(options, checkpoint.config.torch_dtype)
        self.max_model_len = max_model_len
        self.block_size = 0
        self.num_blocks = 0
        self.kv_layout = ""
        self.block_bytes = 0
        self._options = options
        weights = load_weights(checkpoint, self._device, self.dtype, options.linear, progress)
        cos, sin = (torch.from_numpy(table).to(self._device) for table in rope_tables(self.config, max_model_len))
        self._decoder = Decoder(self.config, weights, cos, sin)
        self._kv: KvStorage | None = None
        self._attention: PagedAttention | None = None
        self._graphs: DecodeGraphs | None = None

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Create the KV storage; on CUDA also capture the decode graphs."""
        assert self._kv is None, "KV storage is created once"
        self.num_blocks, self.block_size = num_blocks, block_size
        self.kv_layout = kv_layout(self.config, block_size, self.dtype)
        self._kv = KvStorage(self.config, num_blocks, block_size, self.dtype, self._device)
        self.block_bytes = self._kv.block_bytes
        self._attention = self._choose_attention(block_size)
        if self._device.type == "cuda" and self._options.cuda_graphs:
            self._graphs = self._capture(self._kv, block_size)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch) -> torch.Tensor:
        if self._kv is None or self._attention is None:
            raise ModelError("the KV storage has not been allocated")
        if self._graphs is not None and self._graphs.serves(batch):
            return self._graphs.replay(batch)
        on_device = device_batch(batch, self.block_size, self._device)
        self._attention.plan(batch, on_device)
        logits = self._decoder.logits(on_device, self._kv, self._attention)
        if self._device.type == "cuda" and not len(batch.logit_rows):
            torch.cuda.synchronize(self._device)  # nobody waits for logits, and others may read these blocks next
        return logits

    def block_view(self, block: int) -> memoryview | torch.Tensor:
        assert self._kv is not None
        return self._kv.block(block)

    def kv_memory(self) -> KvMemory:
        assert self._kv is not None
        stored = self._kv.all_bytes()
        view = stored.numpy().data if stored.device.type == "cpu" else None
        return KvMemory(self.num_blocks, self.block_bytes, stored, view)

    def close(self) -> None:
        self._graphs = None
        self._attention = None
        self._kv = None

    @torch.inference_mode()
    def _capture(self, kv: KvStorage, block_size: int) -> "DecodeGraphs":
        from headwater.engines.native.torch_backend.graphs import DecodeGraphs
        from headwater.engines.native.torch_backend.triton_attention import TritonAttention

        shape = (block_size, -(-self.max_model_len // block_size))
        return DecodeGraphs(self._decoder, kv, TritonAttention(self.config, block_size), shape, self._options)

    def _choose_attention(self, block_size: int) -> PagedAttention:
        if self._device.type == "cpu":
            return GatherAttention(block_size)
        from headwater.engines.native.torch_backend import flashinfer_attention
        from headwater.engines.native.torch_backend.triton_attention import TritonAttention

        if flashinfer_attention.fits(self.config, self.dtype):
            return flashinfer_attention.FlashInferAttention(
                self.config, block_size, self.dtype, self._device, deterministic=self._options.deterministic
            )
        return TritonAttention(self.config, block_size)


def _available(device: torch.device) -> torch.device:
    if device.type not in {"cpu", "cuda"}:
        raise ModelError(f"device {device} is not supported (supported: cpu, cuda)")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device} is asked for, and torch sees no CUDA device")
    return device
