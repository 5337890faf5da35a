"""etcd's own JSON gateway: the few calls that a registry needs, over HTTP.

Every call has a deadline. Several endpoints are tried in turn, beginning with the one that answered last. What cannot
be reached is `Unavailable`; what etcd refuses for another reason as well, with etcd's own words. With a login, a token
is asked for before the first call and again whenever etcd does not know it any more, with the password as it is then;
an etcd that asks nobody who it is is taken as it is.
"""

import asyncio
import contextlib
import ssl
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec

from headwater.errors import Unavailable

Json = dict[str, Any]

CALL_TIMEOUT_S = 2.0
_TOKEN = "authorization"
_UNKNOWN = (b"auth", b"user name is empty")
"""What etcd says to those it does not know, or not any more."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key, without the prefix of the registry, and its value; None: deleted."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys as of one revision."""

    cluster_id: str
    revision: int
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    password_file: Path

    def password(self) -> str:
        """Raises `Unavailable`: whoever writes the file may be about to."""
        try:
            return self.password_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Unavailable(f"the password of etcd's user {self.user} cannot be read: {error}") from error


class Compacted(Exception):
    """The changes since that revision are not kept any more."""


class Gateway:
    """`prefix` ends in a slash; all keys are below it."""

    def __init__(
        self, endpoints: Sequence[str], prefix: str, tls: ssl.SSLContext | None = None, login: Login | None = None
    ) -> None:
        self._endpoints = list(endpoints)
        self._login = login
        self._introduced = False
        """Whether etcd has given us a token, or asks for none."""
        self._prefix = prefix
        self._client = httpx.AsyncClient(verify=tls or True, timeout=CALL_TIMEOUT_S, trust_env=False)

    @property
    def address(self) -> str:
        return self._endpoints[0]

    async def close(self) -> None:
        await self._client.aclose()

    async def list_all(self) -> Listing:
        answer = await self._call("kv/range", self._range(""))
        header = answer["header"]
        entries = [self._entry(found) for found in answer.get("kvs", ())]
        return Listing(str(header.get("cluster_id", "")), int(header["revision"]), entries)

    async def get(self, folder: str) -> list[Entry]:
        """The keys that begin with `folder`."""
        answer = await self._call("kv/range", self._range(folder))
        return [self._entry(found) for found in answer.get("kvs", ())]

    async def put(self, key: str, value: bytes) -> None:
        await self._call("kv/put", {"key": self._key(key), "value": _text(value)})

    async def create(self, key: str, value: bytes, lease: int = 0) -> bool:
        """False when the key is there already."""
        compare = {"key": self._key(key), "target": "VERSION", "version": "0"}
        return await self._put_if(compare, key, value, lease)

    async def replace(self, key: str, value: bytes, lease: int) -> bool:
        """False when the key is not, or no longer, of that lease."""
        compare = {"key": self._key(key), "target": "LEASE", "lease": str(lease)}
        return await self._put_if(compare, key, value, lease)

    async def delete(self, key: str) -> None:
        await self._call("kv/deleterange", {"key": self._key(key)})

    async def grant(self, ttl_s: float) -> int:
        return int((await self._call("lease/grant", {"TTL": str(max(1, round(ttl_s)))}))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """False when the lease is over."""
        answer = await self._call("lease/keepalive", {"ID": str(lease)})
        return int(answer["result"].get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """Idempotent."""
        await self._call("lease/revoke", {"ID": str(lease)}, missing_is_fine=True)

    async def ping(self) -> None:
        await self._call("kv/range", {"key": self._key("ping"), "keys_only": True})

    async def changes(self, since: int) -> AsyncIterator[tuple[int, list[Entry]]]:
        """(revision, entries that changed), from revision `since` on, for ever. Raises `Compacted`, `Unavailable`."""
        request = {"create_request": {**self._range(""), "start_revision": str(since)}}
        timeout = httpx.Timeout(CALL_TIMEOUT_S, read=None)
        try:
            async with self._client.stream(
                "POST", f"{self._endpoints[0]}/v3/watch", json=request, timeout=timeout
            ) as lines:
                async for line in lines.aiter_lines():
                    if line:
                        yield self._change(msgspec.json.decode(line))
        except (httpx.HTTPError, httpx.StreamError, msgspec.DecodeError) as error:
            raise self._unavailable(error) from error
        raise Unavailable(f"etcd at {self.address} ended the watch")

    # Inner life

    def _change(self, message: Json) -> tuple[int, list[Entry]]:
        result = message.get("result")
        if not isinstance(result, dict):
            raise Unavailable(f"etcd at {self.address}: {message.get('error')}")
        if int(result.get("compact_revision", 0)):
            raise Compacted
        if result.get("canceled"):
            raise Unavailable(f"etcd at {self.address} ended the watch: {result.get('cancel_reason', '')}")
        entries = [self._entry(event["kv"], event.get("type") == "DELETE") for event in result.get("events", ())]
        return int(result["header"]["revision"]), entries

    async def _put_if(self, compare: Json, key: str, value: bytes, lease: int) -> bool:
        put: Json = {"key": self._key(key), "value": _text(value)}
        if lease:
            put["lease"] = str(lease)
        answer = await self._call("kv/txn", {"compare": [compare], "success": [{"request_put": put}]})
        return bool(answer.get("succeeded"))

    async def _call(self, method: str, body: Json, *, missing_is_fine: bool = False) -> Json:
        failure: Exception | None = None
        for _ in range(len(self._endpoints)):
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    answer = await self._post(method, body)
                return self._decode(answer, missing_is_fine)
            except (httpx.HTTPError, TimeoutError) as error:
                failure = error
                self._endpoints.append(self._endpoints.pop(0))
        assert failure is not None
        raise self._unavailable(failure) from failure

    async def _post(self, method: str, body: Json) -> httpx.Response:
        if self._login is not None and not self._introduced:
            await self._authenticate(self._login)
        answer = await self._client.post(f"{self._endpoints[0]}/v3/{method}", json=body)
        if self._login is not None and _wants_login(answer):
            await self._authenticate(self._login)
            answer = await self._client.post(f"{self._endpoints[0]}/v3/{method}", json=body)
        return answer

    async def _authenticate(self, login: Login) -> None:
        self._client.headers.pop(_TOKEN, None)
        body = {"name": login.user, "password": await asyncio.to_thread(login.password)}
        answer = await self._client.post(f"{self._endpoints[0]}/v3/auth/authenticate", json=body)
        if answer.status_code == 200 or b"not enabled" not in answer.content:
            self._client.headers[_TOKEN] = str(self._decode(answer, missing_is_fine=False)["token"])
        self._introduced = True

    def _decode(self, answer: httpx.Response, missing_is_fine: bool) -> Json:
        decoded: Any = None
        with contextlib.suppress(msgspec.DecodeError):
            decoded = msgspec.json.decode(answer.content)
        if answer.status_code == 404 and missing_is_fine:
            return {}
        if answer.status_code != 200 or not isinstance(decoded, dict):
            said = decoded.get("message", "") if isinstance(decoded, dict) else answer.text[:200]
            raise Unavailable(f"etcd at {self.address} answers {answer.status_code}: {said}")
        return decoded

    def _unavailable(self, error: Exception) -> Unavailable:
        return Unavailable(f"etcd at {self.address} cannot be reached: {str(error) or type(error).__name__}")

    def _key(self, key: str) -> str:
        return _text((self._prefix + key).encode())

    def _range(self, folder: str) -> Json:
        first = (self._prefix + folder).encode()
        return {"key": _text(first), "range_end": _text(first[:-1] + bytes((first[-1] + 1,)))}

    def _entry(self, found: Json, deleted: bool = False) -> Entry:
        key = b64decode(found["key"]).decode(errors="replace").removeprefix(self._prefix)
        return Entry(key, None if deleted else b64decode(found.get("value", "")))


def _wants_login(answer: httpx.Response) -> bool:
    """Tokens end with their time, with a restart of etcd and with every change of its users."""
    return answer.status_code == 401 or (answer.status_code == 400 and any(s in answer.content for s in _UNKNOWN))


def _text(data: bytes) -> str:
    return b64encode(data).decode()
