"""Talking to a server from the command line: blocking, stdlib only, bounded.

Certificates are checked against what OpenSSL trusts, which SSL_CERT_FILE and SSL_CERT_DIR replace; or against the one
that is pinned.
"""

import http.client
import json
import ssl
from contextlib import closing
from typing import Any

from headwater.config.urls import http_url
from headwater.errors import HeadwaterError, Unavailable

MAX_BODY_BYTES = 64 * 1024 * 1024


class Server:
    """A base URL, with or without `/v1`."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 10.0, *, pinned_cert: str = "") -> None:
        """`pinned_cert`: file of the one certificate to trust, whatever name it bears."""
        self._parts = http_url("--url", url)
        self._pinned_cert = pinned_cert
        self.api_key = api_key
        self._timeout_s = timeout_s

    @property
    def url(self) -> str:
        return f"{self._parts.scheme}://{self._parts.netloc}{self._prefix}"

    def get_json(self, path: str) -> Any:
        """Raises `Unavailable` if nobody answers or the server cannot (5xx), else `HeadwaterError` for what is no
        JSON document with status 200."""
        status, body = self.ask("GET", path)
        if status != http.client.OK:
            kind = Unavailable if status >= http.client.INTERNAL_SERVER_ERROR else HeadwaterError
            keyless = status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN)
            raise kind(
                f"{self.url}{path} answers {status}: {error_message(body)}",
                hint="give a key with --api-key KEY or HEADWATER_API_KEY" if keyless else None,
            )
        try:
            return json.loads(body)
        except ValueError as error:
            raise HeadwaterError(f"{self.url}{path} does not answer in JSON") from error

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `Unavailable` if it does not come, or not to its end."""
        connection, response = self.open(method, path, body)
        with closing(connection):
            try:
                return response.status, response.read(MAX_BODY_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise self._unanswered(error) from error

    def open(
        self, method: str, path: str, body: Any = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; the answer's body is still to be read. The caller closes the connection."""
        headers = {"accept": "application/json, text/event-stream"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers["content-type"] = "application/json"
        connection = self._connection()
        try:
            connection.request(method, self._prefix + path, content, headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._unanswered(error) from error

    def _unanswered(self, error: Exception) -> Unavailable:
        if isinstance(error, ssl.SSLCertVerificationError):
            return Unavailable(
                f"the certificate of {self.url} is not accepted: {error.verify_message}",
                hint="SSL_CERT_FILE=ca.pem trusts another authority; --url has to name a host of the certificate",
            )
        return Unavailable(
            f"no answer from {self.url}: {str(error) or type(error).__name__}",
            hint="start one with `headwater serve`, or name one with --url or --pid",
        )

    @property
    def _prefix(self) -> str:
        return self._parts.path.rstrip("/").removesuffix("/v1")

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        context = _pinning(self._pinned_cert) if self._pinned_cert else ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)


def _pinning(cert: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cert)
    except (OSError, ssl.SSLError) as error:
        raise Unavailable(f"the certificate {cert} cannot be read: {error}") from error
    return context


def error_message(body: bytes) -> str:
    """The message of an OpenAI-shaped error, or the beginning of whatever came."""
    try:
        found = json.loads(body)
        message = found["error"]["message"] if isinstance(found, dict) else None
    except (ValueError, KeyError, TypeError):
        message = None
    return str(message) if message else body[:200].decode(errors="replace").strip() or "no reason given"
