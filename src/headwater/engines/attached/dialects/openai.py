"""Any OpenAI-compatible server: asked for its models and whether it is there; requests and answers pass as texts."""

from typing import Any

from headwater.engines.attached.dialects.base import Description, ServerLoad
from headwater.engines.attached.http import Server
from headwater.errors import EngineFailed, Unavailable

_FAR_AHEAD = 1 << 33
"""Epoch seconds; more is not meant in seconds."""


class OpenAIDialect:
    """See `Dialect`."""

    name = "openai"

    async def describe(self, server: Server) -> Description:
        document = await server.get_json("/v1/models")
        entries: list[dict[str, Any]] = document.get("data") or [] if isinstance(document, dict) else []
        names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
        if not names and isinstance(document, dict) and document.get("data") == []:
            raise Unavailable(f"the server at {server.address.url} offers no model yet")
        if not names:
            raise EngineFailed("/v1/models of the attached server names no model")
        first = entries[0]
        length = first.get("max_model_len") or first.get("context_window") or first.get("context_length")
        created = first.get("created")
        return Description(
            names[0],
            names[1:],
            max_model_len=length if isinstance(length, int) else None,
            created=created if isinstance(created, int) and 0 < created < _FAR_AHEAD else 0,
        )

    async def is_healthy(self, server: Server) -> None:
        await server.get("/v1/models")

    async def load(self, server: Server) -> ServerLoad | None:
        return None
