"""TLS of the HTTP edge: one context, whose files are read again when they change, so certificates are renewed live.

TLS 1.2 or newer with the library's own choice of ciphers, and HTTP/1.1 alone. With an authority for clients, whoever
shows no certificate of it does not get past the handshake. New files that do not fit together change nothing: the
error is logged and the old certificate stays. Connections that stand keep what they began with.
"""

import logging
import os
import ssl
from collections.abc import Sequence
from pathlib import Path

from headwater.config.schema import FrontendConfig
from headwater.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 5.0
_EXPECTED = "PEM files: the chain with the server's own certificate first, and its key without a password"


class Tls:
    def __init__(self, cert: Path, key: Path | None, client_ca: Path | None) -> None:
        """Raises `ConfigError`."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._look_at = 0.0
        self._seen = self._identity()
        self.context = self._make()

    def look(self, now: float) -> None:
        """Read the files again if they changed; asked often, it looks every few seconds."""
        if now < self._look_at:
            return
        self._look_at = now + CHECK_INTERVAL_S
        seen = self._identity()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._make()  # first into a context that nobody uses, because a failure leaves one half changed
            self.context.load_cert_chain(self._cert, self._key)
        except (ConfigError, OSError) as error:
            logger.error("the certificate stays as it was: %s", error)
        else:
            logger.info("certificate %s read again", self._cert)

    def _make(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.set_alpn_protocols(["http/1.1"])
        _check_readable("--tls-cert", self._cert)
        _check_readable("--tls-key", self._key)
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(f"--tls-cert {self._cert}: {self._complaint(error)}", hint=_EXPECTED) from error
        if self._client_ca is not None:
            self._want_certificates(context, self._client_ca)
        return context

    def _complaint(self, error: Exception) -> str:
        """The library says little: `[SSL] PEM lib` for nearly everything."""
        key = f"--tls-key {self._key}" if self._key is not None else "its key, in the same file without --tls-key,"
        if "KEY_VALUES_MISMATCH" in str(error):
            return f"{key} belongs to another certificate"
        if isinstance(error, ssl.SSLError):
            return f"the certificate or {key} cannot be read ({error.reason or error})"
        return str(error)

    def _want_certificates(self, context: ssl.SSLContext, client_ca: Path) -> None:
        _check_readable("--tls-client-ca", client_ca)
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-client-ca {client_ca}: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED

    def _identity(self) -> Sequence[tuple[int, int, int] | None]:
        return [_stamp(path) for path in (self._cert, self._key) if path is not None]


def open_tls(config: FrontendConfig) -> Tls | None:
    """Raises `ConfigError`."""
    cert, key, client_ca = (
        Path(p).expanduser() if p else None for p in (config.tls_cert, config.tls_key, config.tls_client_ca)
    )
    if cert is None:
        if key is not None or client_ca is not None:
            raise ConfigError("--tls-key and --tls-client-ca want a --tls-cert")
        return None
    return Tls(cert, key, client_ca)


def _check_readable(flag: str, path: Path | None) -> None:
    try:
        if path is not None:
            path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}", hint=_EXPECTED) from error


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _no_password() -> str:
    """Without this, the library would ask on the terminal."""
    raise ValueError("the key has a password")
