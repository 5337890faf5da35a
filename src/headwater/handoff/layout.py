"""Whether the KV blocks of one worker can be used by another as they are."""

from headwater.errors import TransferRefused
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import ExportOrder


def check_layouts(card: ModelCard, order: ExportOrder) -> None:
    """Raise `TransferRefused`, naming the difference, unless blocks can be exchanged as they are."""
    pairs = [
        ("model", card.fingerprint, order.fingerprint),
        ("KV type", card.dtype, order.dtype),
        ("block size", card.block_size, order.block_size),
        ("KV layout", card.kv_layout, order.kv_layout),
    ]
    for what, here, there in pairs:
        if here != there:
            raise TransferRefused(f"KV blocks cannot be exchanged: {what} {here} here, {there} at the worker that asks")
