"""The front door: HTTP edge, OpenAI API, text in and out. Never imports torch or transformers."""
