"""Connections of a decode worker to prefill workers, over a request plane inside this process."""

import asyncio

from headwater.errors import HeadwaterError
from headwater.handoff.peers import PrefillPeers
from headwater.protocol.frames import BlocksReady, PrefillWaits, ReleaseBlocks, Submit
from headwater.protocol.request import RemotePrefill, SequenceOutput
from headwater.runtime.conformance import eventually, run_leak_checked
from headwater.runtime.planes import InprocPlanes
from headwater.runtime.requests.conformance import WorkerEnd, example_request


class Owner:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.lost: list[int] = []
        self.left: list[str] = []

    def on_waits(self, waits: PrefillWaits) -> None:
        raise AssertionError(waits)

    def on_ready(self, ready: BlocksReady) -> None:
        self.ready.append(ready.stream)

    def on_output(self, output: SequenceOutput) -> None:
        raise AssertionError(output)

    def on_lost(self, stream: int, error: HeadwaterError) -> None:
        self.lost.append(stream)

    def on_left(self, worker_id: str) -> None:
        self.left.append(worker_id)


def test_what_is_left_of_a_broken_connection_does_not_touch_the_one_that_took_its_place() -> None:
    async def check() -> None:
        planes, owner = InprocPlanes(), Owner()
        peers = PrefillPeers(lambda address: planes.link(address, "decode"), owner)
        before = await WorkerEnd(planes.listener()).listen("p")
        peers.ask(RemotePrefill("p", before.address), example_request(1))
        await eventually(lambda: bool(before.frames), "the first request")
        await before.listener.close()
        await eventually(lambda: owner.lost == [1], "the break")
        after = await WorkerEnd(planes.listener()).listen("p")
        peers.ask(RemotePrefill("p", after.address), example_request(2))
        assert owner.left == ["p"]
        await eventually(lambda: len(after.frames) == 1, "the second request")
        peers.release(1)
        await asyncio.sleep(0.02)
        assert owner.left == ["p"], "what is read over the new connection is not given up"
        peer, _ = after.frames[0]
        after.listener.send(peer, BlocksReady(2, 0, 1, b""))
        await eventually(lambda: owner.ready == [2], "the answer")
        peers.ask(RemotePrefill("p", after.address), example_request(3))
        peers.release(2)
        await eventually(lambda: len(after.frames) == 3, "over the same connection")
        assert [type(frame) for _, frame in after.frames] == [Submit, Submit, ReleaseBlocks]
        assert {sender for sender, _ in after.frames} == {peer}
        await peers.close()
        await after.listener.close()
        await planes.close()

    run_leak_checked(check())
