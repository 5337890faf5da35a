"""For who comes from TensorRT-LLM."""
