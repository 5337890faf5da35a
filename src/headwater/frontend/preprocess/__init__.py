"""Text to tokens: chat template, tokenizer, block ids."""
