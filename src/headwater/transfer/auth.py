"""Proof that both ends hold the same secret, without sending it.

Each end hashes, under the secret, everything said so far with both fresh nonces; the two directions differ in a label,
so that no proof can be reflected. What is said afterwards is protected by `headwater.transfer.sealing`, if at all.
"""

import hmac
import secrets
from hashlib import blake2b
from typing import Literal

NONCE_BYTES = 32
PROOF_BYTES = 32
MIN_KEY_BYTES = 16

Side = Literal["connects", "accepts"]


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, side: Side, *said: bytes) -> bytes:
    """`said`: what went over the wire, each part hashed with its length."""
    key = blake2b(secret, person=b"headwater-key").digest()
    digest = blake2b(side.encode(), key=key, digest_size=PROOF_BYTES, person=b"headwater-proof")
    for part in said:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def proves(given: bytes, secret: bytes, side: Side, *said: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, side, *said))
