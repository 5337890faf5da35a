"""The native engine on CPU: kernels of our own over prepared, shared weights."""
