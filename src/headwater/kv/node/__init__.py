"""One store per node: `store` moves blocks between tiers, `server` offers it to the node's processes, `client` uses it.

The node's process owns the host tier and whatever lies below; a worker that dies takes nothing with it.
"""
