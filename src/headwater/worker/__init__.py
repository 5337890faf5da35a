"""A worker process: one engine, its listener on the request plane, its publisher of events, its lease."""
