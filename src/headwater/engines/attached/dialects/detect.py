"""Which kind of server it is."""

from collections.abc import Mapping

from headwater.engines.attached.dialects.base import Description, Dialect
from headwater.engines.attached.dialects.openai import OpenAIDialect
from headwater.engines.attached.dialects.sglang import SglangDialect
from headwater.engines.attached.dialects.trtllm import TrtllmDialect
from headwater.engines.attached.dialects.vllm import VllmDialect
from headwater.engines.attached.http import Server
from headwater.errors import EngineFailed, ModelNotFound

AUTO = "auto"


def dialects(adapters: Mapping[str, str]) -> Mapping[str, Dialect]:
    """By name, in the order in which they are tried; the last one fits all. `adapters`: their folders on the server."""
    known: tuple[Dialect, ...] = (VllmDialect(), SglangDialect(), TrtllmDialect(adapters), OpenAIDialect())
    return {dialect.name: dialect for dialect in known}


async def detect(server: Server, name: str, adapters: Mapping[str, str]) -> tuple[Dialect, Description]:
    """The named kind, or the first that fits. Raises `Unavailable` while it cannot be reached."""
    tried = dialects(adapters)
    if name != AUTO:
        return tried[name], await tried[name].describe(server)
    problem: Exception | None = None
    for dialect in tried.values():
        try:
            return dialect, await dialect.describe(server)
        except (EngineFailed, ModelNotFound) as error:
            problem = error
    raise EngineFailed(f"{server.address.url} is no server we know: {problem}")
