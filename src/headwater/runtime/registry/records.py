"""What an instance record looks like at rest: a name that is safe as a file name, JSON of bounded size.

JSON rather than msgpack, so that an operator can read the store. A record is checked before it is believed: size,
shape, and that it says what its name says.
"""

import re

import msgspec

from headwater.errors import ConfigError
from headwater.protocol.cluster import Instance

MAX_RECORD_BYTES = 1 << 20
MAX_MODEL_NAME = 256
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_encoder = msgspec.json.Encoder()
_instance_decoder = msgspec.json.Decoder(Instance)


def check_worker_id(worker_id: str) -> None:
    if not _WORKER_ID.fullmatch(worker_id):
        raise ConfigError(
            f"worker id {worker_id!r} cannot be registered",
            hint="1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit",
        )


def check_model_name(name: str) -> None:
    if not 1 <= len(name) <= MAX_MODEL_NAME or not name.isprintable():
        raise ConfigError(
            f"model name {name[:80]!r} cannot be put into the catalogue",
            hint=f"1 to {MAX_MODEL_NAME} printable characters",
        )


def encode_instance(instance: Instance) -> bytes:
    check_worker_id(instance.worker_id)
    data = _encoder.encode(instance)
    if len(data) > MAX_RECORD_BYTES:
        raise ConfigError(
            f"the record of worker {instance.worker_id} has {len(data):,} bytes; at most {MAX_RECORD_BYTES:,} fit"
        )
    return data


def decode_instance(data: bytes, worker_id: str) -> Instance:
    """Raises `ValueError` saying what is wrong."""
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"longer than {MAX_RECORD_BYTES:,} bytes")
    instance = _instance_decoder.decode(data)
    if instance.worker_id != worker_id:
        raise ValueError(f"record of {worker_id} says it is {instance.worker_id[:128]!r}")
    return instance
