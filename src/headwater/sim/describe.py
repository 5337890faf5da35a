"""How a simulated worker introduces itself."""

from headwater.protocol.cluster import Instance, ModelCard
from headwater.scheduler.limits import SchedulerLimits
from headwater.types import Role

MODEL = "simulated"


def instance(worker_id: str, limits: SchedulerLimits, role: Role = "both", kv_bytes_per_token: int = 0) -> Instance:
    card = ModelCard(
        name=MODEL,
        served_names=[MODEL],
        fingerprint=MODEL,
        architecture="simulated",
        dtype="",
        kv_layout="",
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        vocab_size=1 << 31,
        kv_bytes_per_token=kv_bytes_per_token,
    )
    return Instance(
        worker_id=worker_id,
        role=role,
        state="ready",
        card=card,
        request_address="",
        event_address="",
        engine="simulated",
        version=(1, 0),
        kv_blocks=limits.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        hardware="simulated",
    )
