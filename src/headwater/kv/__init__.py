"""KV blocks: identity, pool, index and tiers. The core is pure: no I/O, no clock, no tensors."""
