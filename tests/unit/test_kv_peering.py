"""What an operator says about peers: addresses, keys, and what is refused."""

from pathlib import Path

import pytest

from headwater.config.schema import KvConfig
from headwater.errors import ConfigError
from headwater.kv.node.peering import PeeringOptions, parse_address, read_key
from headwater.tiers.node import node_options


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.1:7400", ("10.0.0.1", 7400)), ("kv-0.kv:1", ("kv-0.kv", 1)), ("[::1]:7400", ("::1", 7400))],
)
def test_an_address(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":7400", "host:port", "host:65536", "host:-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(text)


def test_other_hosts_need_a_key() -> None:
    PeeringOptions(("127.0.0.1", 0), (("localhost", 1), ("::1", 2)))
    PeeringOptions(("10.0.0.1", 1), (("kv-1", 1),), b"k" * 16)
    with pytest.raises(ConfigError, match="others could read all KV"):
        PeeringOptions(listen=("10.0.0.1", 1))
    with pytest.raises(ConfigError, match="others could read all KV"):
        PeeringOptions(peers=(("kv-1", 1),))


def test_a_key_is_read_only_from_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others") as caught:
        read_key(path)
    assert "chmod 600" in str(caught.value.hint)
    path.chmod(0o600)
    assert read_key(path) == b"0123456789abcdef"
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="at least 16"):
        read_key(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_key(tmp_path / "none")


def test_the_configuration_of_a_graph(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    config = KvConfig(kv_peer=("kv-1:7400",), kv_listen="10.0.0.1:7400", kv_peer_key=str(key))
    assert config.own_store
    assert node_options(config).peering == PeeringOptions(("10.0.0.1", 7400), (("kv-1", 7400),), b"k" * 32)
    assert not KvConfig().own_store
