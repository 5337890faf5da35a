"""While an engine of others starts: signs of life, and its errors in our terms."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from headwater.engines.base import Progress, ProgressSink
from headwater.errors import ConfigError, ModelError

_PULSE_S = 5.0
"""Between two signs of life."""


@asynccontextmanager
async def pulse(engine: str, progress: ProgressSink) -> AsyncIterator[None]:
    """For an engine that does not say how far it is: a supervisor must hear that it lives."""
    beating = asyncio.create_task(_beat(engine, progress))
    try:
        yield
    finally:
        beating.cancel()


async def _beat(engine: str, progress: ProgressSink) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        progress(Progress("load", loop.time() - began, None, "s", f"{engine} is starting"))
        await asyncio.sleep(_PULSE_S)


@contextmanager
def starting(engine: str, hint: str | None = None) -> Iterator[None]:
    """What it raises becomes `ConfigError`, with `hint`, or `ModelError`."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"{engine}: {error}", hint=hint) from error
    except (RuntimeError, OSError) as error:
        raise ModelError(f"{engine} did not start: {error}", hint="its own log, above, says why") from error
