"""The embedded engine: a small torch engine, CPU and CUDA, batch-invariant on CPU."""
