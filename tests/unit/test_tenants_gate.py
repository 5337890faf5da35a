"""Keys: who is let in, with which rights, and how keys come, go and expire."""

import asyncio
import hashlib
import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.clock import VirtualClock
from headwater.config.schema import FrontendConfig, RuntimeConfig, ServeConfig
from headwater.errors import ConfigError, Forbidden, HeadwaterError, Unauthorized
from headwater.frontend.http.base import HttpRequest
from headwater.frontend.tenants.gate import Gate
from headwater.frontend.tenants.keyring import (
    KEY_PATTERN,
    SCOPES,
    Keyring,
    KeySpec,
    Scope,
    TenantSpec,
    decode_keyring,
    encode_keyring,
    new_key,
)
from headwater.frontend.tenants.principal import Principal
from headwater.frontend.tenants.source import open_source
from headwater.frontend.tenants.tenancy import check_public
from headwater.frontend.tenants.watch import KeyringWatch, read_keyring


def request(**headers: bytes | str) -> HttpRequest:
    named = {
        name.replace("_", "-").encode(): value if isinstance(value, bytes) else value.encode()
        for name, value in headers.items()
    }
    return HttpRequest("GET", "/", "", named, b"", "test", request_id="r")


def bearer(key: str, **headers: str) -> HttpRequest:
    return request(authorization=f"Bearer {key}", **headers)


def ring(*scopes: Scope, expires: float | None = None, **tenant: object) -> tuple[Keyring, str, str]:
    key_id, key = new_key(())
    spec = KeySpec(
        "acme",
        hashlib.sha256(key.encode()).hexdigest(),
        scopes or ("inference",),
        expires=None if expires is None else datetime.fromtimestamp(expires, UTC),
    )
    return Keyring("headwater-keyring", 1, {"acme": TenantSpec(**tenant)}, {key_id: spec}), key_id, key


def gate_of(keyring: Keyring | None, *plain: str, clock: VirtualClock | None = None, **rest: Any) -> Gate:
    return Gate(plain, clock or VirtualClock(), keyring=keyring, **rest)


def refused(gate: Gate, asked: HttpRequest, scope: Scope = "inference") -> HeadwaterError:
    with pytest.raises((Unauthorized, Forbidden)) as caught:
        gate.check(asked, scope)
    return caught.value


def test_plain_keys_have_every_right_and_a_tenant_each() -> None:
    gate = gate_of(None, "k1", "schlüssel")
    for number, given_key in ((1, "k1"), (2, "schlüssel")):
        principal = gate.check(bearer(given_key), "admin")
        assert (principal.tenant, principal.key_id) == (f"key-{number}", f"key-{number}")
    gate.check(request(authorization=b"BEARER  k1 "), "metrics")
    gate.check(request(x_api_key=b"k1"), "inference")
    for credentials in (b"", b"k1", b"Bearer", b"Bearer ", b"Bearer k", b"Bearer k12", b"Basic k1", b"Bearer k1,k2"):
        error = refused(gate, request(authorization=credentials))
        assert isinstance(error, Unauthorized)
        assert "k1" not in str(error)
    assert isinstance(refused(gate, bearer("k" * 10_000)), Unauthorized)


def test_a_key_of_the_keyring_opens_what_its_scopes_say() -> None:
    keyring, key_id, key = ring("inference", "metrics")
    gate = gate_of(keyring)
    principal = gate.check(bearer(key), "inference")
    assert (principal.tenant, principal.key_id, principal.kv_group) == ("acme", key_id, "acme")
    gate.check(bearer(key), "metrics")
    error = refused(gate, bearer(key), "admin")
    assert isinstance(error, Forbidden)
    assert key_id in str(error)
    assert key not in str(error)


def test_a_keyring_without_keys_lets_nobody_in() -> None:
    gate = gate_of(Keyring.empty())
    assert isinstance(refused(gate, request()), Unauthorized)
    assert isinstance(refused(gate, bearer("anything"), "admin"), Unauthorized)


def test_keys_expire_and_a_new_keyring_counts_at_once() -> None:
    clock = VirtualClock(1_000.0)
    keyring, key_id, key = ring(expires=1_060.0)
    gate = gate_of(keyring, clock=clock)
    gate.check(bearer(key), "inference")
    clock.advance(60.0)
    assert key_id in str(refused(gate, bearer(key)))
    other, _, other_key = ring()
    gate.load(other)
    gate.check(bearer(other_key), "inference")
    assert "not one of those" in str(refused(gate, bearer(key)))


def test_without_keys_other_hosts_get_inference_alone() -> None:
    gate = gate_of(None, public=True)
    gate.check(request(host="10.0.0.1"), "inference")
    for scope in ("metrics", "admin"):
        for host in ("localhost", "10.0.0.1"):
            assert isinstance(refused(gate, request(host=host), scope), Unauthorized)


def test_without_keys_this_host_gets_all_unless_a_page_was_pointed_here() -> None:
    gate = gate_of(None)
    for host in ("localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "127.9.9.9", "LOCALHOST"):
        for scope in ("inference", "metrics", "admin"):
            gate.check(request(host=host), scope)
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1"):
        assert isinstance(refused(gate, request(host=host), "admin"), Forbidden)
        gate.check(request(host=host), "inference")


def test_without_keys_a_form_of_another_page_changes_nothing() -> None:
    gate = gate_of(None)
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:8000"):
        gate.check(request(host="127.0.0.1:8000", origin=origin), "admin")
    for origin in ("https://evil.example", "http://localhost.evil.example", "null", "http://", "file://", "localhost"):
        assert isinstance(refused(gate, request(host="127.0.0.1:8000", origin=origin), "admin"), Forbidden)
        assert isinstance(refused(gate, request(host="127.0.0.1:8000", origin=origin), "metrics"), Forbidden)
        gate.check(request(host="127.0.0.1:8000", origin=origin), "inference")
    keyring, _, key = ring("admin")
    gate_of(keyring).check(bearer(key, origin="https://dashboard.example"), "admin")


def test_only_delegates_name_tenants() -> None:
    keyring, _, key = ring("inference")
    assert gate_of(keyring).check(bearer(key, x_tenant_id="other"), "inference").tenant == "acme"
    keyring, _, key = ring("inference", "delegate")
    principal = gate_of(keyring).check(bearer(key, x_tenant_id="other"), "inference")
    assert (principal.tenant, principal.kv_group) == ("other", "other")
    assert len(gate_of(keyring).check(bearer(key, x_tenant_id="x" * 9000), "inference").tenant) <= 256
    assert gate_of(None).check(request(x_tenant_id="other", host="localhost"), "inference").tenant == ""
    trusting = gate_of(None, trust_tenant_header=True)
    assert trusting.check(request(x_tenant_id="other", host="localhost"), "inference").tenant == "other"


@example([("a:b", "c"), ("a", "b:c")])
@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12)), min_size=2, max_size=2, unique=True))
def test_salts_of_different_groups_never_meet(pairs: list[tuple[str, str]]) -> None:
    first, second = (Principal(frozenset(), kv_group=group).salt(given_salt) for group, given_salt in pairs)
    assert first != second


def test_keys_are_new_long_and_recognisable() -> None:
    keys = {new_key(())[1] for _ in range(200)}
    assert len(keys) == 200
    assert all(KEY_PATTERN.fullmatch(key) for key in keys)
    assert new_key(["00000000"])[0] != "00000000"


def test_a_keyring_survives_its_file_and_holds_no_key() -> None:
    keyring, _, key = ring(*SCOPES, expires=5e9, weight=2.5, tokens_per_minute=100, kv_share=0.5)
    document = encode_keyring(keyring)
    assert decode_keyring(document, "test") == keyring
    assert key.encode() not in document
    assert key.rpartition("-")[2].encode() not in document


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.update(version=2), "version"),
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d["tenants"].clear(), "belongs to tenant"),
        (lambda d: d["tenants"]["acme"].update(weight=-1), "weight"),
        (lambda d: d["tenants"]["acme"].update(tokens_per_minute=0), "tokens_per_minute"),
        (lambda d: d["tenants"].update({"../x": {}}), "regex"),
        (lambda d: next(iter(d["keys"].values())).update(sha256="ab"), "sha256"),
        (lambda d: next(iter(d["keys"].values())).update(scopes=["root"]), "root"),
        (lambda d: d["keys"].update({"00000000": next(iter(d["keys"].values()))}), "same key"),
    ],
)
def test_a_wrong_keyring_is_refused_by_name(change: object, complaint: str) -> None:
    document = json.loads(encode_keyring(ring()[0]))
    change(document)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=complaint) as caught:
        decode_keyring(json.dumps(document).encode(), "keys.json")
    assert "keys.json" in str(caught.value)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader_of_keyrings(document: bytes) -> None:
    with pytest.raises(ConfigError):
        decode_keyring(document, "keys.json")


def test_depth_does_not_break_it_either() -> None:
    with pytest.raises(ConfigError):
        decode_keyring(b'{"tenants":' + b"[" * 100_000, "keys.json")


def test_keyrings_come_from_files_variables_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = ring()[0]
    path = tmp_path / "keys.json"
    path.write_bytes(encode_keyring(keyring))
    path.chmod(0o600)
    monkeypatch.setenv("RING", path.read_text())
    for spec in (str(path), path.as_uri(), "env:RING", f"command:cat {path}"):
        assert read_keyring(open_source(spec)) == keyring
    failing = f"command:sh -c 'cat {path}; exit 3'"
    for spec in (
        str(tmp_path / "no"),
        "env:NO_RING",
        "command:false",
        "command:/no/such/program",
        failing,
        str(tmp_path),
    ):
        with pytest.raises(ConfigError):
            read_keyring(open_source(spec))
    with pytest.raises(ConfigError, match="no program"):
        open_source("command:")
    with pytest.raises(ConfigError, match="No closing quotation"):
        open_source("command:cat 'keys")


def test_a_keyring_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(encode_keyring(ring()[0]))
    for mode in (stat.S_IWGRP, stat.S_IWOTH):
        path.chmod(0o600 | mode)
        with pytest.raises(ConfigError, match="let themselves in"):
            read_keyring(open_source(str(path)))


def test_a_keyring_that_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=r"is no regular file|Is a directory"):
            open_source(str(path)).read()


def test_keys_rotate_without_a_restart_and_a_broken_keyring_changes_nothing(tmp_path: Path) -> None:
    asyncio.run(_rotate(tmp_path))


async def _rotate(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    seen: list[Keyring] = []

    def write(content: bytes) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_bytes(content)
        fresh.chmod(0o600)
        os.replace(fresh, path)

    first, second = ring()[0], ring()[0]
    write(encode_keyring(first))
    source = open_source(str(path))
    watch = KeyringWatch(source, read_keyring(source), seen.append)
    await watch.look()
    assert seen == []
    write(b"{ broken")
    await watch.look()
    path.unlink()
    await watch.look()
    assert seen == []
    write(encode_keyring(second))
    await watch.look()
    assert seen == [second]


def test_the_operator_key_opens_admin_routes_whether_or_not_others_need_keys() -> None:
    for gate in (gate_of(None, "k1", operator_key="op"), gate_of(ring()[0], operator_key="op", public=True)):
        assert gate.check(bearer("op"), "admin").key_id == "operator"
        assert isinstance(refused(gate, bearer("op"), "inference"), Forbidden), "it is no client's"
    for public in (False, True):
        gate = gate_of(None, operator_key="op", public=public)
        assert gate.check(bearer("op"), "admin").key_id == "operator"
        gate.check(bearer("op"), "inference")
        gate.check(bearer("sk-whatever"), "inference")


def test_a_port_that_others_reach_wants_keys_or_a_word() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(ConfigError, match="reached by others"):
            check_public(ServeConfig(frontend=FrontendConfig(host=host)))
        check_public(ServeConfig(frontend=FrontendConfig(host=host, api_key=("k",))))
        check_public(ServeConfig(frontend=FrontendConfig(host=host, keys="ring.json")))
        check_public(ServeConfig(frontend=FrontendConfig(host=host), runtime=RuntimeConfig(insecure=True)))
    for host in ("127.0.0.1", "::1", "localhost"):
        check_public(ServeConfig(frontend=FrontendConfig(host=host)))
