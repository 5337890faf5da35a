"""`headwater keys`: what it prints, what it keeps, and that no secret is where it should not be."""

import json
from pathlib import Path
from typing import Any

import pytest

from headwater.cli.main import main
from headwater.clock import RealClock, VirtualClock
from headwater.errors import Unauthorized
from headwater.frontend.http.base import HttpRequest
from headwater.frontend.tenants.gate import Gate
from headwater.frontend.tenants.keyring import KEY_PATTERN
from headwater.frontend.tenants.ledger import Entry, SqliteLedger, Usage
from headwater.frontend.tenants.source import FileSource
from headwater.frontend.tenants.watch import read_keyring
from headwater.runtime.cluster_keys import load_cluster_keys


class Keys:
    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self.capsys = capsys

    def json(self, *argv: str) -> Any:
        assert main(["keys", *argv, "--keys", str(self.path), "--json"]) == 0
        return json.loads(self.capsys.readouterr().out)

    def refused(self, *argv: str) -> str:
        assert main(["keys", *argv]) == 2
        return self.capsys.readouterr().err

    def accepts(self, key: str, clock: RealClock | VirtualClock | None = None) -> bool:
        gate = Gate((), clock or RealClock(), keyring=read_keyring(FileSource(self.path)))
        request = HttpRequest("GET", "/", "", {b"authorization": b"Bearer " + key.encode()}, b"", "test")
        try:
            gate.check(request, "inference")
        except Unauthorized:
            return False
        return True


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Keys:
    return Keys(tmp_path / "keys.json", capsys)


def test_a_key_lives_from_create_to_revoke(keys: Keys) -> None:
    made = keys.json("create", "--tenant", "acme", "--scope", "inference", "--scope", "metrics", "--note", "ci")
    assert KEY_PATTERN.fullmatch(made["key"])
    assert keys.accepts(made["key"])
    assert keys.path.stat().st_mode & 0o077 == 0
    listed = keys.json("list")
    assert made["key"] not in json.dumps(listed) + keys.path.read_text()
    assert listed["keys"][0] == {
        "key_id": made["key_id"],
        "tenant": "acme",
        "scopes": ["inference", "metrics"],
        "created": listed["keys"][0]["created"],
        "expires": None,
        "accepted": True,
        "note": "ci",
    }
    assert keys.json("revoke", made["key_id"])["revoked"] == made["key_id"]
    assert not keys.accepts(made["key"])
    assert keys.json("list")["keys"][0]["accepted"] is False


def test_a_rotated_key_has_its_grace_and_the_new_one_its_rights(keys: Keys) -> None:
    old = keys.json("create", "--tenant", "acme", "--scope", "admin", "--scope", "inference")
    new = keys.json("rotate", old["key_id"], "--grace", "1h")
    assert (new["replaces"], new["scopes"], new["tenant"]) == (old["key_id"], ["inference", "admin"], "acme")
    assert keys.accepts(old["key"])
    assert keys.accepts(new["key"])
    later = VirtualClock(RealClock().epoch() + 3700)
    assert not keys.accepts(old["key"], later)
    assert keys.accepts(new["key"], later)


def test_limits_of_tenants_are_set_and_taken_away(keys: Keys) -> None:
    keys.json("tenant", "acme", "--weight", "3", "--tokens-per-minute", "32K", "--max-concurrent", "8")
    keys.json("tenant", "acme", "--kv-group", "family", "--kv-share", "0.5", "--tokens-per-minute", "none")
    assert keys.json("list")["tenants"] == {
        "acme": {"weight": 3.0, "max_concurrent": 8, "kv_group": "family", "kv_share": 0.5}
    }
    path = str(keys.path)
    assert "tokens-per-minute" in keys.refused("tenant", "acme", "--keys", path, "--tokens-per-minute", "many")
    for flag, value in (("--weight", "-1.0"), ("--weight", "nan"), ("--kv-share", "2.0"), ("--kv-group", "../x")):
        said = keys.refused("tenant", "acme", "--keys", path, flag, value)
        assert f"{flag} {value}: expected " in said, "the flag is wrong, not the file"
        assert "not a keyring" not in said
    assert "tenant ../x: expected 1 to 64 letters" in keys.refused("tenant", "../x", "--keys", path)
    assert "--weight 0.0: expected a number > 0.0" in keys.refused("tenant", "a", "--weight", "0", "--keys", path)
    assert "--tenant ../x: expected " in keys.refused("create", "--tenant", "../x", "--keys", path)
    assert keys.json("list")["tenants"].keys() == {"acme"}, "what was refused has changed nothing"


def test_keys_made_elsewhere_are_taken_over_from_files_alone(keys: Keys, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("sk-" + "A1b2" * 12 + "\n")
    made = keys.json("create", "--tenant", "acme", "--import", f"@{own}")
    assert made["key"] is None
    assert keys.accepts(own.read_text().strip())
    path = str(keys.path)
    assert "seen by others" in keys.refused("create", "--tenant", "a", "--keys", path, "--import", "sk-" + "A" * 40)
    own.write_text("short")
    assert "at least 32" in keys.refused("create", "--tenant", "a", "--keys", path, "--import", f"@{own}")
    own.write_text("sk-" + "A1b2" * 12)
    assert "same key" in keys.refused("create", "--tenant", "b", "--keys", path, "--import", f"@{own}")


def test_what_is_missing_is_said(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_KEYS", raising=False)
    assert "which keyring" in keys.refused("list")
    assert "cannot read" in keys.refused("list", "--keys", str(keys.path))
    keys.json("create", "--tenant", "acme")
    assert "no key 00000000" in keys.refused("revoke", "00000000", "--keys", str(keys.path))
    assert "no ledger" in keys.refused("usage", "--keys", str(keys.path))


def test_usage_is_read_off_the_ledger(keys: Keys) -> None:
    keys.json("create", "--tenant", "acme")
    ledger = SqliteLedger(keys.path.with_name("keys.json.ledger"))
    ledger.sync(Entry("fe", "2026-11", 1.0, {"acme": Usage(100, 40, 10, 1500.0, 2)}))
    ledger.close()
    assert keys.json("usage") == [
        {
            "month": "2026-11",
            "tenant": "acme",
            "requests": 2,
            "prompt_tokens": 100,
            "cached_tokens": 40,
            "output_tokens": 10,
            "accelerator_s": 1.5,
        }
    ]


def test_a_cluster_enrols_and_revokes_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, node = tmp_path / "head.json", tmp_path / "node.json"

    def cluster(*argv: str, code: int = 0) -> str:
        assert main(["keys", "cluster", *argv, "--file", str(head)]) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    cluster("create", "--name", "head")
    assert "exists" in cluster("create", code=2)
    cluster("enrol", "node-2", str(node))
    assert load_cluster_keys(node).admitted == load_cluster_keys(head).admitted
    printed = json.loads(cluster("list", "--json"))
    assert printed["members"].keys() == {"head", "node-2"}
    for path in (head, node):
        assert path.stat().st_mode & 0o077 == 0
        assert load_cluster_keys(path).secret not in json.dumps(printed)
    assert "member already" in cluster("enrol", "node-2", str(tmp_path / "x"), code=2)
    assert "own file" in cluster("revoke", "head", code=2)
    assert "no member" in cluster("revoke", "node-3", code=2)
    cluster("revoke", "node-2")
    assert load_cluster_keys(head).members.keys() == {"head"}
