"""Load generation against any OpenAI-compatible server, and reports."""
