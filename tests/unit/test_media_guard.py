"""URLs of clients: what may be fetched, and the tricks that must not get through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequest
from headwater.frontend.media.guard import MediaPolicy, MediaTarget, check_url, is_public, pinned_address

POLICY = MediaPolicy()
OPEN = MediaPolicy(schemes=frozenset(("https", "http")))
PARAM = "messages[0].content[0].image_url.url"


def test_public_https_is_fine() -> None:
    target = check_url("https://Images.Example.org./a/b.png?x=1#part", POLICY, param=PARAM)
    assert target == MediaTarget("https", "images.example.org", 443, "/a/b.png?x=1")
    assert check_url("https://93.184.216.34/x", POLICY, param=PARAM).host == "93.184.216.34"
    assert check_url("http://example.org", OPEN, param=PARAM).port == 80
    assert pinned_address(target, ["93.184.216.34", "2606:2800:220:1::1"], param=PARAM) == "93.184.216.34"


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/x",
        "file:///etc/passwd",
        "ftp://example.org/x",
        "gopher://example.org/x",
        "data:image/png;base64,AAAA",
        "https://",
        "https:///x",
        "https://user:secret@example.org/x",
        "https://example.org@127.0.0.1/",
        "https://example.org:22/x",
        "https://example.org:99999/x",
        "https://example.org\\@127.0.0.1/",
        "https://exa mple.org/",
        "https://example.org/\r\nHost: evil",
        "https://ex\u0430mple.org/",
        "https://" + "a" * 3000 + ".org/",
        "https://localhost/",
        "https://LOCALHOST./",
        "https://a.localhost/",
        "https://metadata.google.internal/computeMetadata/v1/",
        "https://printer.local/",
        "https://intranet/",
        "https://127.0.0.1/",
        "https://127.1/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0x7f.0.0.1/",
        "https://0177.0.0.1/",
        "https://0/",
        "https://10.0.0.1/",
        "https://192.168.1.1/",
        "https://172.16.0.1/",
        "https://169.254.169.254/latest/meta-data/",
        "https://100.100.100.200/",
        "https://100.64.0.1/",
        "https://224.0.0.1/",
        "https://255.255.255.255/",
        "https://[::1]/",
        "https://[::]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[::ffff:a9fe:a9fe]/",
        "https://[64:ff9b::7f00:1]/",
        "https://[2002:7f00:1::]/",
        "https://[fe80::1%25eth0]/",
        "https://[fd00:ec2::254]/",
        "https://[fc00::1]/",
        "https://[::1",
        "https://-bad-.example.org/",
        "https://example.123/",
    ],
)
def test_everything_else_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_url(url, POLICY, param=PARAM)
    assert caught.value.param == PARAM
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "resolved",
    [
        [],
        ["127.0.0.1"],
        ["93.184.216.34", "127.0.0.1"],
        ["93.184.216.34", "::1"],
        ["::ffff:10.0.0.1"],
        ["169.254.169.254"],
        ["fe80::1%eth0"],
        ["93.184.216.34", "rubbish"],
    ],
)
def test_a_public_name_that_leads_inside_is_refused(resolved: list[str]) -> None:
    """Rebinding: the answer that is connected to is the one that was checked, so all of it must be public."""
    target = check_url("https://rebind.example.org/", POLICY, param=PARAM)
    with pytest.raises(InvalidRequest):
        pinned_address(target, resolved, param=PARAM)


def test_a_list_of_hosts_is_kept_to() -> None:
    listed = MediaPolicy(hosts=frozenset(("example.org",)))
    assert check_url("https://cdn.example.org/x", listed, param=PARAM).host == "cdn.example.org"
    for url in ("https://badexample.org/", "https://example.org.evil.com/", "https://93.184.216.34/"):
        with pytest.raises(InvalidRequest):
            check_url(url, listed, param=PARAM)


@given(st.text(max_size=80) | st.builds("https://{}".format, st.text(max_size=60)))
def test_no_text_breaks_the_check(url: str) -> None:
    try:
        target = check_url(url, OPEN, param=PARAM)
    except InvalidRequest:
        return
    assert target.scheme in ("https", "http")
    assert target.host
    assert target.port in (80, 443)


@given(st.ip_addresses())
def test_public_means_that_nobody_in_here_is_meant(address: object) -> None:
    if is_public(address):  # type: ignore[arg-type]
        assert not address.is_private  # type: ignore[attr-defined]
        assert not address.is_loopback  # type: ignore[attr-defined]
        assert not address.is_link_local  # type: ignore[attr-defined]
