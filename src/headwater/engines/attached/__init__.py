"""A server that runs already, behind our router: vLLM with token ids, any OpenAI-compatible one with texts."""
