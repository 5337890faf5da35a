"""Running the parts of a cluster: the local supervisor."""
