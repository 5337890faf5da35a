"""URLs of HTTP servers, as people give them: checked before anything is sent anywhere.

Refuses what is no http(s) URL of a host, and what a base URL cannot have: a query, a fragment, a user. What looks like
a password is not repeated.
"""

from urllib.parse import SplitResult, urlsplit

from headwater.errors import ConfigError

_NO_USER = "a user is not taken from there"


def http_url(flag: str, url: str) -> SplitResult:
    """`http://` may be left out. Raises `ConfigError`, which names the flag."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        reason = _problem(parts)
    except ValueError as error:  # from the parts as well: a port is read when it is asked for
        reason = _NO_USER if "@" in url else str(error)  # which repeats what it could not read
    if reason:
        shown = url.rpartition("@")[2]
        raise ConfigError(f"{flag} {shown}: expected something like http://host:8000; {reason}")
    return parts


def _problem(parts: SplitResult) -> str:
    if parts.scheme not in ("http", "https"):
        return f"{parts.scheme} is not spoken"
    if not parts.hostname or " " in parts.netloc:
        return "it names no host"
    if parts.port == 0:
        return "port 0 is nobody's"
    if parts.username is not None:
        return _NO_USER
    return "a path may follow, but no query" if parts.query or parts.fragment else ""
