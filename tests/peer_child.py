"""A node with a host tier that it offers to peers; a process of its own, so that it can be killed and stopped.

python peer_child.py KEY_HEX RUN_NAME BLOCKS    prints its port, serves until it is killed
"""

import asyncio
import sys

from headwater.clock import RealClock
from headwater.kv.stores.conformance import Run
from headwater.kv.stores.host import HostTier
from headwater.kv.stores.ledgered import TierOptions
from headwater.kv.stores.peer_offer import PeerOffer
from headwater.transfer.agent import Agent
from headwater.transfer.options import AgentOptions


async def serve(key: bytes, name: str, blocks: int) -> None:
    host = HostTier(TierOptions(16 << 20, min_block_bytes=4096), RealClock())
    with Agent("child", AgentOptions(key=key)) as agent:
        pool = agent.register(host.pool.data, block_bytes=4096, name="kv", access="read")
        await Run(name, blocks).put(host)
        offer = PeerOffer(host, agent, pool, key)
        print(await offer.listen("127.0.0.1", 0), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(bytes.fromhex(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
