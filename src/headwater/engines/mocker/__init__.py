"""An engine without a model: the production scheduler and KV accounting, modelled step times, deterministic tokens."""
