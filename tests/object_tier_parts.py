"""What tests of the object tier share."""

from dataclasses import replace

import obstore

from headwater.kv.stores.object.tier import ObjectTier


def flip_payload_bit(tier: ObjectTier, block_id: bytes) -> None:
    """Where the tier keeps it: in an object, or gathered in memory."""
    gathered = tier._catalogue.gathering._loose.get(block_id)
    if gathered is not None:
        payload = gathered.payload
        changed = bytes([payload[0] ^ 1]) + bytes(payload[1:])
        tier._catalogue.gathering._loose[block_id] = replace(gathered, payload=memoryview(changed))
        return
    found = tier._catalogue.blocks.find(block_id)
    assert found is not None
    run, index = found
    key = run.shape.key(run.name)
    body = bytearray(obstore.get(tier._bucket._open.writing, key).bytes())
    body[run.shape.payload_offset(index)] ^= 1
    obstore.put(tier._bucket._open.writing, key, bytes(body), use_multipart=False)
