"""Moving blocks of memory between processes: agents, regions, descriptors, back-ends. Usable alone.

Start at `headwater.transfer.agent.Agent`.
"""
