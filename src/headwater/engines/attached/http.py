"""The HTTP side of an attached server: one session, bounded waits, and errors of the server in our terms."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import msgspec

from headwater.config.urls import http_url
from headwater.errors import (
    ContextTooLong,
    EngineFailed,
    HeadwaterError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    WorkerLost,
)

_CONNECT_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 5.0
_MAX_DOCUMENT_BYTES = 32 << 20
_MAX_MESSAGE_CHARS = 2000


class Unreachable(Unavailable):
    """Nobody listens there."""


class Silent(Unavailable):
    """It did not answer in time."""


class ServerAddress(msgspec.Struct, frozen=True):
    """Where the server is, and how it is spoken to."""

    url: str
    """Scheme, host, port and path, without `/v1` and without a slash at the end."""
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> "ServerAddress":
        """Raises `ConfigError` for what is no http(s) URL."""
        parts = http_url("--attach", url)
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(f"{parts.scheme}://{parts.netloc}{path}", api_key)


class Server:
    """Asks one server. Everything raised is a `HeadwaterError`."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        headers = {} if address.api_key is None else {"authorization": f"Bearer {address.api_key}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str) -> bytes:
        """A document. A status other than 200 raises."""
        return await self._ask("GET", path, None)

    async def get_json(self, path: str) -> Any:
        return _decoded(path, await self.get(path))

    async def post_json(self, path: str, body: object, timeout_s: float = ASK_TIMEOUT_S) -> Any:
        return _decoded(path, await self._ask("POST", path, msgspec.json.encode(body), timeout_s))

    async def post(self, path: str, body: bytes) -> bytes:
        return await self._ask("POST", path, body)

    async def find(self, path: str) -> Any:
        """A JSON document, or None where the server has none."""
        try:
            return await self.get_json(path)
        except (ModelNotFound, InvalidRequest, EngineFailed):
            return None

    @asynccontextmanager
    async def stream(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is still coming; leaving early closes the connection, by which servers know to stop.

        A status other than 200 is the caller's to judge; so prompts go nowhere but to the address that was named.
        """
        sent = {"content-type": "application/json", **headers}
        with _translated(self.address.url):
            async with self._session.post(
                f"{self.address.url}{path}", data=body, headers=sent, allow_redirects=False
            ) as response:
                yield response

    async def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float = ASK_TIMEOUT_S) -> bytes:
        headers = {} if body is None else {"content-type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with _translated(self.address.url):
            async with self._session.request(
                method,
                f"{self.address.url}{path}",
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=method == "GET",
            ) as response:
                data = await response.content.read(_MAX_DOCUMENT_BYTES)
                while not response.content.at_eof() and len(data) < _MAX_DOCUMENT_BYTES:
                    data += await response.content.read(_MAX_DOCUMENT_BYTES - len(data))
                if response.status != 200:
                    raise error_for(response.status, data, response.headers)
                return data


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Errors of the connection become ours: what is lost in the middle can be done again elsewhere."""
    try:
        yield
    except aiohttp.ClientConnectorCertificateError as error:
        raise Unreachable(
            f"the certificate of {url} is not accepted: {error.certificate_error}; "
            "SSL_CERT_FILE=ca.pem trusts another authority"
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise Unreachable(f"the server at {url} cannot be reached: {error.os_error}") from error
    except TimeoutError as error:
        raise Silent(f"the server at {url} does not answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise WorkerLost(f"the server at {url} broke off: {error!r}") from error


def error_for(status: int, body: bytes, headers: Mapping[str, str]) -> HeadwaterError:
    """What a server's refusal means."""
    message, param, code = _said(body)
    text = message or f"status {status}"
    if status in (429, 503, 529):
        return Overloaded(f"the attached server is full: {text}", retry_after_s=_retry_after_s(headers))
    if status in (401, 403):
        return EngineFailed(f"the attached server refuses us: {text}", hint="give its key with --attach-api-key")
    if 300 <= status < 400:
        where = headers.get("location", "nowhere")[:_MAX_MESSAGE_CHARS]
        return EngineFailed(f"the attached server sends us to {where}", hint="name that address with --attach")
    if status == 404:
        return ModelNotFound(text)
    if status == 413:
        return PayloadTooLarge(text)
    if 400 <= status < 500:
        too_long = code == "context_length_exceeded" or "maximum context length" in text
        return (ContextTooLong if too_long else InvalidRequest)(text, param=param)
    return WorkerLost(f"the attached server failed with status {status}: {text}")


def refusal_for(status: int, body: bytes, headers: Mapping[str, str]) -> HeadwaterError:
    """The same, of a request. A key that is no longer taken, or an address that no longer serves, is no death of the
    worker, which the request could be blamed for: another server may take ours."""
    error = error_for(status, body, headers)
    return Unavailable(error.message, hint=error.hint) if isinstance(error, EngineFailed) else error


def _said(body: bytes) -> tuple[str, str | None, str | None]:
    """Message, field and code of an error in OpenAI's form, or of the few that differ."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body[:_MAX_MESSAGE_CHARS].decode(errors="replace").strip(), None, None
    found = document.get("error", document) if isinstance(document, dict) else document
    if isinstance(found, dict):
        message = found.get("message") or found.get("detail") or ""
        param, code = found.get("param"), found.get("code")
        return str(message)[:_MAX_MESSAGE_CHARS], param if isinstance(param, str) else None, str(code)
    return str(found)[:_MAX_MESSAGE_CHARS], None, None


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return min(60.0, max(0.1, float(headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0


def _decoded(path: str, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EngineFailed(f"{path} of the attached server is not JSON: {error}") from error
