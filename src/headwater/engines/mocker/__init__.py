"""An engine without a model: real scheduler and KV accounting, modelled time, made-up tokens. No torch, no numpy."""
