"""URLs of servers, as people give them."""

import pytest

from headwater.config.urls import http_url
from headwater.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "scheme", "host", "port", "path"),
    [
        ("host", "http", "host", None, ""),
        ("host:8000/v1", "http", "host", 8000, "/v1"),
        ("HTTPS://Host/base/", "https", "host", None, "/base/"),
        ("http://[::1]:65535", "http", "::1", 65535, ""),
    ],
)
def test_urls_that_are_taken(url: str, scheme: str, host: str, port: int | None, path: str) -> None:
    parts = http_url("--url", url)
    assert (parts.scheme, parts.hostname, parts.port, parts.path) == (scheme, host, port, path)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "no host"),
        ("http://", "no host"),
        ("https:///v1", "no host"),
        ("http://h ost", "no host"),
        ("ftp://host", "ftp"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("host:0", "port 0"),
        ("host:65536", "out of range"),
        ("host:eight", "could not be cast"),
        ("host?x=1", "no query"),
        ("host/v1#x", "no query"),
    ],
)
def test_urls_that_are_refused_with_the_flag_and_the_reason(url: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        http_url("--attach", url)
    assert caught.value.message.startswith(f"--attach {url}: expected something like http://")
    assert why in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@host",
        "me:secret@host:99999",
        "ftp://me:sec@ret@host",
        "//secret@h",
        "http://me:secret/1@host",
        "http://me:secret@h\u2100st",
    ],
)
def test_passwords_are_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        http_url("--url", url)
    assert "sec" not in str(caught.value)
