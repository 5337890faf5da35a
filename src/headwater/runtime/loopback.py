"""Who may reach an address. Apart from the planes, so that the KV store alone can ask it without them."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this host can reach a socket bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
