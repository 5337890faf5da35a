"""A child's end is noticed, whenever it is signalled."""

import asyncio
import os

from headwater.deploy.process import Child


def test_a_child_told_to_leave_as_it_ended_is_noticed() -> None:
    config_fd = os.open(os.devnull, os.O_RDONLY)
    try:
        child = Child.start(["sh", "-c", "exit 7"], os.pipe(), (config_fd,), {"PATH": os.environ["PATH"]})
    finally:
        os.close(config_fd)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.terminate()

    async def main() -> int:
        async with asyncio.timeout(30):
            return await child.wait(lambda lines: None, lambda report: None)

    assert asyncio.run(main()) == 7
