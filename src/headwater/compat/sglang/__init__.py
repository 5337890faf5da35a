"""For who comes from SGLang."""
