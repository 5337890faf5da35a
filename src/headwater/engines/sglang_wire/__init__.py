"""What SGLang is told and says, over HTTP and in the worker's process alike. For 0.5.23; never imports it."""
