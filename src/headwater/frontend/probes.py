"""Canaries: sequences of one token that show whether a worker still works.

They go past the router and cost no booking. Any answer at all means that the engine turns, a refusal included, unless
it says that the engine is dead.
"""

import asyncio
import itertools

from headwater.errors import WorkerLost
from headwater.frontend.connection import WorkerConnection
from headwater.frontend.remote_errors import error_from
from headwater.protocol.frames import Submit
from headwater.protocol.request import EngineRequest, SamplingParams, SequenceOutput
from headwater.types import TOKEN_ID_BYTES

_FIRST_NUMBER = 1 << 62
"""Numbers of real streams stay far below."""
_NAMESPACE = b"canary"
_DEAD = ("engine_failed", "worker_lost")


class Probes:
    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[SequenceOutput]] = {}
        self._numbers = itertools.count(_FIRST_NUMBER)

    def answered(self, output: SequenceOutput) -> None:
        """An output that belongs to no stream; most belong to nobody."""
        waiting = self._open.pop(output.stream, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(output)

    async def probe(self, connection: WorkerConnection, timeout_s: float) -> None:
        """Returns when the worker has answered. Raises `HeadwaterError` when it does not, or says that it is dead."""
        number = next(self._numbers)
        card = connection.instance.card
        request = EngineRequest(
            stream=number,
            request_id="canary",
            model=card.name,
            prompt=(card.bos_token_id or 0).to_bytes(TOKEN_ID_BYTES, "little"),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            namespace=_NAMESPACE,
        )
        waiting: asyncio.Future[SequenceOutput] = asyncio.get_running_loop().create_future()
        self._open[number] = waiting
        try:
            connection.send(Submit([request]))
            output = await asyncio.wait_for(waiting, timeout_s)
        except TimeoutError:
            worker_id = connection.worker_id
            raise WorkerLost(f"worker {worker_id} did not answer a canary within {timeout_s:.1f} s") from None
        finally:
            if self._open.pop(number, None) is not None:
                connection.abort([number])
        if output.error is not None and output.error.code in _DEAD:
            raise error_from(output.error)
