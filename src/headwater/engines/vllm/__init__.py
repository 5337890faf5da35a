"""vLLM in the worker process: its engine core, our request plane. Written for vLLM 0.32."""
