"""A process that asks a worker for an endless stream and says when tokens come. It is there to be killed."""

import sys

import uvloop

from headwater.protocol.frames import Submit, WorkerFrame
from headwater.protocol.request import EngineRequest, SamplingParams
from headwater.runtime.endpoints import parse_bind
from headwater.runtime.planes import ZmqPlanes


async def main(address: str) -> None:
    import asyncio

    planes = ZmqPlanes(parse_bind("ipc"))
    link = planes.link(address, "frontend-child")

    def on_frame(frame: WorkerFrame) -> None:
        print("frame", flush=True)

    await link.connect(on_frame, lambda error: print("broken", flush=True), 10)
    endless = SamplingParams(max_tokens=1_000_000)
    link.send(Submit([EngineRequest(stream, f"r{stream}", "m", b"", endless) for stream in range(3)]))
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
