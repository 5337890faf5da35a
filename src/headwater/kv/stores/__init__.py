"""Tiers: where blocks are kept. `base` is the contract, `conformance` its test."""
