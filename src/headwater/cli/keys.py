"""`headwater keys`: API keys and tenants in a keyring, what tenants used, and the keys of a cluster.

A key is printed once, when it is made; the keyring holds its digest. Frontends that use the file notice a change
within a second. Every action has `--json`.
"""

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from headwater.cli import cluster_keys
from headwater.cli.flags import add_config_flags, load_from
from headwater.cli.parser import seconds
from headwater.cli.private_file import locked, replace_private
from headwater.config.units import parse_count
from headwater.errors import ConfigError
from headwater.frontend.tenants.keyring import (
    SCOPES,
    Keyring,
    KeySpec,
    Name,
    Scope,
    TenantSpec,
    decode_keyring,
    encode_keyring,
    key_digest,
    new_key,
)
from headwater.frontend.tenants.ledger import SqliteLedger, ledger_beside
from headwater.frontend.tenants.source import FileSource

_QUANTITIES = ("max_concurrent", "tokens_per_minute", "monthly_tokens")
_MIN_IMPORTED_CHARS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", prog="headwater keys", required=True)
    create = _action(actions, "create", "make a key; prints it, once")
    create.add_argument("--tenant", required=True, help="whose key it is; a new tenant is added")
    create.add_argument("--scope", action="append", choices=SCOPES, help="what it is good for (default inference)")
    create.add_argument("--expires", type=seconds, metavar="TIME", help="from now, such as 720h; default: never")
    create.add_argument("--note", default="", help="what it is for")
    create.add_argument("--import", dest="imported", metavar="@FILE", help="take over a random key made elsewhere")
    _action(actions, "list", "list tenants and keys, without secrets")
    revoke = _action(actions, "revoke", "refuse a key from now on")
    revoke.add_argument("key_id", metavar="KEY_ID")
    rotate = _action(actions, "rotate", "make a key that replaces another; prints it, once")
    rotate.add_argument("key_id", metavar="KEY_ID")
    rotate.add_argument("--grace", type=seconds, default=86400.0, metavar="TIME", help="the old one's rest (24h)")
    tenant = _action(actions, "tenant", "set what a tenant may take")
    tenant.add_argument("name", metavar="NAME")
    tenant.add_argument("--weight", type=float, help="share of worker time under contention")
    for quantity in _QUANTITIES:
        tenant.add_argument(f"--{quantity.replace('_', '-')}", metavar="N", help="`none` for no limit")
    tenant.add_argument("--kv-group", metavar="GROUP", help="share cached prefixes within it; `none`: with nobody")
    tenant.add_argument("--kv-share", type=float, help="most of the cache tiers it may fill, from 0 to 1")
    _action(actions, "usage", "what tenants used, by month", flags=("keys", "tenant_ledger"))
    cluster_keys.add_arguments(actions.add_parser("cluster", help="keys with which processes join a cluster"))


def run(args: argparse.Namespace) -> int:
    if args.action == "cluster":
        return cluster_keys.run(args)
    return _ACTIONS[args.action](args)


def _action(actions: Any, name: str, summary: str, *, flags: tuple[str, ...] = ("keys",)) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary)
    parser.add_argument("--json", action="store_true", help="for machines")
    add_config_flags(parser, names=flags)
    return parser


def _create(args: argparse.Namespace) -> int:
    path = _path(args)
    _check(f"--tenant {args.tenant}", args.tenant, Name)
    with locked(path):
        keyring = _read(path) if path.exists() else Keyring.empty()
        key_id, key = new_key(keyring.keys)
        key = _imported(args.imported) if args.imported else key
        scopes = _scopes(args.scope)
        spec = _key_of(args.tenant, key, scopes, note=args.note, expires=_after(args.expires))
        tenants = {**keyring.tenants, args.tenant: keyring.tenants.get(args.tenant, TenantSpec())}
        _write(path, msgspec.structs.replace(keyring, tenants=tenants, keys={**keyring.keys, key_id: spec}))
    return _print_new(args, key_id, key if not args.imported else None, spec)


def _rotate(args: argparse.Namespace) -> int:
    path = _path(args)
    with locked(path):
        keyring = _read(path)
        old = _known(keyring, args.key_id)
        key_id, key = new_key(keyring.keys)
        spec = _key_of(old.tenant, key, old.scopes, note=old.note, expires=None)
        leaves = min(filter(None, (old.expires, _after(args.grace))))
        keys = {**keyring.keys, args.key_id: msgspec.structs.replace(old, expires=leaves), key_id: spec}
        _write(path, msgspec.structs.replace(keyring, keys=keys))
    return _print_new(args, key_id, key, spec, replaces=args.key_id, old_expires=leaves.isoformat())


def _revoke(args: argparse.Namespace) -> int:
    path = _path(args)
    with locked(path):
        keyring = _read(path)
        old = _known(keyring, args.key_id)
        now = _now()
        expires = old.expires if old.expired(now) else now
        keys = {**keyring.keys, args.key_id: msgspec.structs.replace(old, expires=expires)}
        _write(path, msgspec.structs.replace(keyring, keys=keys))
    _say(args, {"revoked": args.key_id, "tenant": old.tenant}, f"{args.key_id} of {old.tenant} is refused from now on")
    return 0


def _tenant(args: argparse.Namespace) -> int:
    path = _path(args)
    _check(f"tenant {args.name}", args.name, Name)
    with locked(path):
        keyring = _read(path) if path.exists() else Keyring.empty()
        spec = msgspec.structs.replace(keyring.tenants.get(args.name, TenantSpec()), **_changes(args))
        _write(path, msgspec.structs.replace(keyring, tenants={**keyring.tenants, args.name: spec}))
    _say(args, {"tenant": args.name, **msgspec.to_builtins(spec)}, f"{args.name}: {_limits(spec)}")
    return 0


def _list(args: argparse.Namespace) -> int:
    keyring = _read(_path(args))
    now = _now()
    if args.json:
        print(json.dumps(_document(keyring, now), indent=2))
        return 0
    table = Table("tenant", "key", "scopes", "state", "note", box=None)
    for name, spec in keyring.tenants.items():
        table.add_row(name, "", "", _limits(spec), "", style="bold")
        for key_id, key in keyring.keys.items():
            if key.tenant == name:
                table.add_row("", key_id, ", ".join(key.scopes), _state(key, now), key.note)
    Console(highlight=False, markup=False).print(table)
    return 0


def _usage(args: argparse.Namespace) -> int:
    config = load_from(args).config.frontend
    path = Path(config.tenant_ledger).expanduser() if config.tenant_ledger else ledger_beside(_path(args))
    if not path.exists():
        raise ConfigError(f"there is no ledger {path}", hint="a frontend with --keys or --tenant-ledger writes it")
    ledger = SqliteLedger(path)
    totals = ledger.totals()
    ledger.close()
    rows = [
        {
            "month": month,
            "tenant": tenant,
            "requests": used.requests,
            "prompt_tokens": used.prompt_tokens,
            "cached_tokens": used.cached_tokens,
            "output_tokens": used.output_tokens,
            "accelerator_s": round(used.accelerator_ms / 1e3, 3),
        }
        for month, tenants in totals.items()
        for tenant, used in tenants.items()
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table("month", "tenant", "requests", "prompt", "cached", "output", "accelerator s", box=None)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(highlight=False, markup=False).print(table)
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "create": _create,
    "list": _list,
    "revoke": _revoke,
    "rotate": _rotate,
    "tenant": _tenant,
    "usage": _usage,
}


# The keyring


def _path(args: argparse.Namespace) -> Path:
    spec = load_from(args).config.frontend.keys
    if spec is None or spec.startswith(("env:", "command:")):
        raise ConfigError("which keyring?", hint="--keys FILE, or HEADWATER_KEYS")
    return Path(spec.removeprefix("file://")).expanduser()


def _read(path: Path) -> Keyring:
    return decode_keyring(FileSource(path).read(), str(path))


def _write(path: Path, keyring: Keyring) -> None:
    """Not before it was read back as a frontend would."""
    document = encode_keyring(keyring)
    decode_keyring(document, str(path))
    replace_private(path, document)


def _known(keyring: Keyring, key_id: str) -> KeySpec:
    if key_id not in keyring.keys:
        raise ConfigError(f"there is no key {key_id}", hint="`headwater keys list` shows them")
    return keyring.keys[key_id]


def _scopes(given: list[str] | None) -> tuple[Scope, ...]:
    wanted = given or ["inference"]
    return tuple(scope for scope in SCOPES if scope in wanted)


def _key_of(tenant: str, key: str, scopes: tuple[Scope, ...], *, note: str, expires: datetime | None) -> KeySpec:
    return KeySpec(tenant, key_digest(key.encode()).hex(), scopes, created=_now(), expires=expires, note=note)


def _imported(given: str) -> str:
    if not given.startswith("@"):
        raise ConfigError("--import takes @FILE: a key on the command line would be seen by others on this host")
    try:
        key = Path(given[1:]).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {given[1:]}") from error
    if len(key) < _MIN_IMPORTED_CHARS or not key.isprintable() or " " in key:
        raise ConfigError(
            f"a key must have at least {_MIN_IMPORTED_CHARS} random characters", hint="leave out --import: one is drawn"
        )
    return key


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for quantity in _QUANTITIES:
        given = getattr(args, quantity)
        if given is not None:
            changes[quantity] = None if given == "none" else _count(quantity, given)
    if args.kv_group is not None:
        changes["kv_group"] = None if args.kv_group == "none" else args.kv_group
    for name in ("weight", "kv_share"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    for name, value in changes.items():
        _check(f"--{name.replace('_', '-')} {getattr(args, name)}", {name: value}, TenantSpec)
    return changes


def _check(given: str, value: object, fits: Any) -> None:
    """Before it is put into the keyring: what is refused there would sound like a broken file."""
    try:
        msgspec.json.decode(msgspec.json.encode(value), type=fits)
    except msgspec.ValidationError as error:
        expected = str(error).partition(" - at ")[0].removeprefix("Expected ")
        raise ConfigError(f"{given}: expected {_in_words(expected)}") from error


def _in_words(expected: str) -> str:
    if "matching regex" in expected:
        return "1 to 64 letters, digits and . _ @ -, the first a letter or digit"
    return expected.replace("`float`", "a number").replace("`int`", "a whole number")


def _count(name: str, given: str) -> int:
    try:
        return parse_count(given)
    except ValueError as error:
        raise ConfigError(f"--{name.replace('_', '-')} {given}: expected a number such as 5000 or 32K") from error


# What is printed


def _print_new(args: argparse.Namespace, key_id: str, key: str | None, spec: KeySpec, **more: str) -> int:
    document = {"key_id": key_id, "key": key, "tenant": spec.tenant, "scopes": list(spec.scopes), **more}
    if args.json:
        print(json.dumps(document, indent=2))
        return 0
    print(key if key is not None else key_id)
    print(f"key {key_id} of {spec.tenant} for {', '.join(spec.scopes)}; it is not shown again", file=sys.stderr)
    return 0


def _say(args: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    print(json.dumps(document, indent=2) if args.json else text)


def _document(keyring: Keyring, now: datetime) -> dict[str, Any]:
    """All but the digests."""
    return {
        "tenants": {name: msgspec.to_builtins(spec) for name, spec in keyring.tenants.items()},
        "keys": [
            {
                "key_id": key_id,
                "tenant": key.tenant,
                "scopes": list(key.scopes),
                "created": key.created.isoformat() if key.created else None,
                "expires": key.expires.isoformat() if key.expires else None,
                "accepted": not key.expired(now),
                "note": key.note,
            }
            for key_id, key in keyring.keys.items()
        ],
    }


def _limits(spec: TenantSpec) -> str:
    limits = msgspec.to_builtins(spec)
    return ", ".join(f"{name} {value}" for name, value in limits.items()) or "no limits"


def _state(key: KeySpec, now: datetime) -> str:
    if key.expires is None:
        return "accepted"
    when = key.expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"refused since {when}" if key.expired(now) else f"accepted until {when}"


def _after(duration_s: float | None) -> datetime | None:
    return None if duration_s is None else _now() + timedelta(seconds=duration_s)


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
