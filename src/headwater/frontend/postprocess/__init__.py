"""Tokens to text: incremental detokenizing and stop strings."""
