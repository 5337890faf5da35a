"""Structured output: constraints on the text, turned into masks over tokens."""
