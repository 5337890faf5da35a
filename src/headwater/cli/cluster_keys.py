"""`headwater keys cluster`: the CURVE keys with which processes join the planes of a cluster.

`create` makes a file with one member; copied to all hosts it is enough. `enrol` gives a host a key pair of its own;
the list of members then has to reach the other hosts, whose processes read it again by themselves. `revoke` takes a
member off the list. Secrets are never printed.
"""

import argparse
import json
from pathlib import Path

import msgspec

from headwater.cli.private_file import locked, replace_private
from headwater.errors import ConfigError
from headwater.runtime.cluster_keys import (
    ClusterKeys,
    decode_cluster_keys,
    encode_cluster_keys,
    load_cluster_keys,
    new_cluster,
    new_pair,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="cluster_action", metavar="ACTION", prog="headwater keys cluster", required=True
    )
    create = actions.add_parser("create", help="make a new cluster's file of keys")
    create.add_argument("--name", default="cluster", help="of its first member")
    enrol = actions.add_parser("enrol", help="give another host keys of its own")
    enrol.add_argument("name", metavar="NAME")
    enrol.add_argument("out", type=Path, metavar="OUT", help="the file to take to that host")
    revoke = actions.add_parser("revoke", help="let a member in no more")
    revoke.add_argument("name", metavar="NAME")
    actions.add_parser("list", help="list the members")
    for action in actions.choices.values():
        action.add_argument("--file", type=Path, required=True, metavar="FILE", help="the file of keys")
        action.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    with locked(args.file):
        keys = _create(args) if args.cluster_action == "create" else load_cluster_keys(args.file)
        if args.cluster_action == "enrol":
            keys = _enrol(args, keys)
        elif args.cluster_action == "revoke":
            keys = _revoke(args, keys)
    _print(args, keys)
    return 0


def _create(args: argparse.Namespace) -> ClusterKeys:
    if args.file.exists():
        raise ConfigError(f"{args.file} exists; a cluster whose keys are gone has to be set up anew")
    return _written(args.file, new_cluster(args.name))


def _enrol(args: argparse.Namespace, keys: ClusterKeys) -> ClusterKeys:
    if args.name in keys.members:
        raise ConfigError(f"{args.name} is a member already", hint="revoke it first")
    if args.out.exists():
        raise ConfigError(f"{args.out} exists")
    public, secret = new_pair()
    keys = msgspec.structs.replace(keys, members={**keys.members, args.name: public})
    _written(args.out, msgspec.structs.replace(keys, name=args.name, public=public, secret=secret))
    return _written(args.file, keys)


def _revoke(args: argparse.Namespace, keys: ClusterKeys) -> ClusterKeys:
    if args.name not in keys.members:
        raise ConfigError(f"{args.name} is no member", hint=f"members are {', '.join(keys.members)}")
    if args.name == keys.name:
        raise ConfigError(f"{args.file} is {args.name}'s own file", hint="revoke it in the file of another member")
    members = {name: public for name, public in keys.members.items() if name != args.name}
    return _written(args.file, msgspec.structs.replace(keys, members=members))


def _written(path: Path, keys: ClusterKeys) -> ClusterKeys:
    document = encode_cluster_keys(keys)
    decode_cluster_keys(document, str(path))
    replace_private(path, document)
    return keys


def _print(args: argparse.Namespace, keys: ClusterKeys) -> None:
    if args.json:
        print(json.dumps({"name": keys.name, "members": keys.members}, indent=2))
        return
    for name, public in keys.members.items():
        print(f"{name:<24}{public}{'  (this file)' if name == keys.name else ''}")
