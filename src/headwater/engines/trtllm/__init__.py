"""TensorRT-LLM in the worker process, through its LLM API: its executor, our request plane. Written for 1.4."""
