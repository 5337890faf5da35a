"""The event plane: KV events, load and timings, numbered, with replay and snapshot. `base` is the contract."""
