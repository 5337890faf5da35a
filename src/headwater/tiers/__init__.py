"""An engine's KV blocks and its node's store: prefixes that are kept there are loaded, what is computed is kept.

    onload    requests wait for blocks of theirs that are worth loading, and for nothing else
    offload   blocks that an engine has filled are offered to the store, some at a time
    service   both, for one worker, and what is told about it

Works through the KV port of an engine (`headwater.engines.base.KvPort`) and the client of a store
(`headwater.kv.node.client`); an engine without a port, or whose memory the CPU cannot touch, goes without.
"""
