"""SGLang in the worker process: its engine, our request plane. Written for SGLang 0.5.23."""
