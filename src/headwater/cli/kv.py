"""`headwater kv`: run a node's KV store and look after it."""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from headwater.cli.console import open_console
from headwater.cli.kv_warm import compute, read_prompts
from headwater.cli.parser import advanced, seconds, size
from headwater.cli.target import add_target, model_names, server_of
from headwater.config.schema import RuntimeConfig
from headwater.config.units import about_bytes
from headwater.deploy.clusters import running_clusters
from headwater.errors import ConfigError, Unavailable
from headwater.kv.node import benchmark, wire
from headwater.kv.node.address import default_socket
from headwater.kv.node.client import StoreClient
from headwater.kv.node.open import NodeOptions, parse_disk, serve_store
from headwater.kv.node.peering import Address, PeeringOptions, parse_address, read_key
from headwater.kv.node.server import answers
from headwater.kv.rules import Rules
from headwater.kv.stores.disk import DiskOptions
from headwater.kv.stores.ledgered import TierOptions
from headwater.logs import configure_logging

T = TypeVar("T")

_CONNECT_S = 2.0
_PROMPT_TIMEOUT_S = 600.0
_LIST_PAGE = 5000
_MAX_SHARES = 20
_TIERS = ("host", "disk")
_PEER_HELP = "another node whose host tier is read; may be repeated"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", prog="headwater kv", required=True)
    _add_serve(actions.add_parser("serve", help="run this node's store as a process of its own"))
    stat = _client_parser(actions, "stat", "tiers, occupancy, hits, problems, who uses it")
    stat.add_argument("--json", action="store_true", help="for machines")
    listing = _client_parser(actions, "ls", "what is stored, by model and tenant, or block by block")
    listing.add_argument("--tier", choices=_TIERS, help="block by block, in this tier")
    listing.add_argument("--limit", type=int, default=1000, help="blocks at most")
    listing.add_argument("--json", action="store_true", help="for machines")
    verify = _client_parser(actions, "verify", "read every block against its checksum; damaged ones are dropped")
    verify.add_argument("--tier", choices=_TIERS, action="append", help="default: all that can be verified")
    verify.add_argument("--json", action="store_true", help="for machines")
    clear = _client_parser(actions, "clear", "forget blocks in all tiers")
    which = clear.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="of everybody")
    which.add_argument("--tenant", help="of one tenant")
    which.add_argument(
        "--model", help="of one model: a name that a cluster of this host serves, or the fingerprint that `ls` shows"
    )
    warm = _client_parser(actions, "warm", "fill the host tier from disk, or have prompts computed, before traffic")
    warm.add_argument("--max", type=size, default=1 << 62, metavar="SIZE", help="at most this much from disk")
    warm.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines, each with `messages` or `prompt`: computed once each"
    )
    add_target(warm)
    _add_bench(actions.add_parser("bench", help="measure host and disk tier beside memcpy and preadv"))


def run(args: argparse.Namespace) -> int:
    match args.action:
        case "serve":
            return _serve(args)
        case "bench":
            return _bench(args)
        case "warm" if args.prompts is not None:
            return _warm_prompts(args)
        case action:
            return asyncio.run(_ACTIONS[action](args))


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_socket(parser)
    parser.add_argument("--host", type=size, default=1 << 30, metavar="SIZE", help="memory of the host tier: 4GiB")
    parser.add_argument("--disk", type=_disk, metavar="DIR:SIZE", help="a disk tier: /mnt/nvme/kv:200GiB")
    parser.add_argument("--object", default="", metavar="URL", help="an object tier: s3://bucket/prefix?cap=1TiB")
    parser.add_argument("--peer", action="append", default=[], type=_address, metavar="HOST:PORT", help=_PEER_HELP)
    parser.add_argument("--listen", type=_address, metavar="HOST:PORT", help="where other nodes read the host tier")
    parser.add_argument("--peer-key", type=Path, metavar="FILE", help="what all nodes share; not needed on one host")
    parser.add_argument("--policy", choices=("lru", "s3fifo", "cost"), default="lru", help="what is evicted first")
    parser.add_argument(
        "--admission", choices=("second-use", "all"), default="second-use", help="what is written to lower tiers"
    )
    parser.add_argument(
        "--share", action="append", default=[], type=_share, metavar="TENANT=FRACTION", help="of each tier: a=0.25"
    )
    advanced(
        parser.add_argument(
            "--cold-format", choices=("exact", "int8"), default="exact", help="int8: smaller below memory, and lossy"
        )
    )
    advanced(
        parser.add_argument("--owner", default="", help="name of this node in an object store; default: the host's")
    )
    advanced(parser.add_argument("--ttl", type=seconds, metavar="TIME", help="blocks older than this are not served"))
    advanced(parser.add_argument("--direct", action="store_true", help="go around the page cache (O_DIRECT)"))
    advanced(parser.add_argument("--min-block", type=size, default=0, metavar="SIZE", help="sizes the block tables"))
    advanced(parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error")))


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block", nargs="+", type=size, default=[64 << 10, 256 << 10, 1 << 20, 4 << 20], help="block sizes"
    )
    parser.add_argument("--total", type=size, default=256 << 20, help="bytes per round")
    parser.add_argument("--rounds", type=int, default=5, help="the best counts")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the disk tier lies")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")


def _client_parser(actions: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=help_text)
    _add_socket(parser)
    return parser


def _add_socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", type=Path, metavar="PATH", help="where the store listens")


# The node's process


def _serve(args: argparse.Namespace) -> int:
    configure_logging(RuntimeConfig(log_level=args.log_level), "kv")
    shares = _shares(args.share)
    rules = Rules(ttl_s=args.ttl or None)

    def tier(cap_bytes: int) -> TierOptions:
        return TierOptions(cap_bytes, args.policy, shares, args.min_block, rules)

    disk = DiskOptions(args.disk[0], tier(args.disk[1]), args.direct) if args.disk else None
    key = read_key(args.peer_key) if args.peer_key else b""
    peering = PeeringOptions(args.listen, tuple(args.peer), key)
    options = NodeOptions(
        tier(args.host), disk, peering, args.object,
        owner=args.owner, admission=args.admission, cold_format=args.cold_format,
    )  # fmt: skip
    socket = args.socket or default_socket()
    uvloop.run(serve_store(options, socket, lambda: print(f"KV store at {socket}", flush=True)))
    return 0


# Its clients


async def _with_store(args: argparse.Namespace, act: Callable[[StoreClient], Awaitable[T]]) -> T:
    socket = args.socket or _running_store()
    client = StoreClient(socket, "headwater kv")
    await client.start(patience_s=_CONNECT_S)
    try:
        if client.problem:
            raise Unavailable(
                f"no KV store answers at {socket}: {client.problem}", hint="start one with `headwater kv serve`"
            )
        return await act(client)
    finally:
        await client.close()


def _running_store() -> Path:
    """The one store of this user on this host. Which of several is meant has to be said."""
    found = [Path(cluster.store) for cluster in running_clusters() if cluster.store]
    usual = default_socket()
    if not found or (usual not in found and answers(usual)):
        found.insert(0, usual)
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} KV stores run here: {', '.join(map(str, found))}", hint="--socket says which one is meant"
        )
    return found[0]


async def _stat(args: argparse.Namespace) -> int:
    report = await _with_store(args, StoreClient.status)
    if args.json:
        print(json.dumps(_document(report), indent=2))
        return 0
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("tier", "used", "of", "blocks", "hits", "misses", "evicted", "refused", "damaged", "ms/MiB"):
        table.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    for tier in report.tiers:
        table.add_row(
            tier.tier, about_bytes(tier.used_bytes), about_bytes(tier.cap_bytes), str(tier.num_blocks),
            str(tier.num_hits), str(tier.num_misses), str(tier.num_evicted), str(tier.num_refused),
            str(tier.num_damaged), f"{tier.load_ms_per_mib:.2f}",
        )  # fmt: skip
    console = open_console(markup=False, emoji=False)
    console.print(table)
    _print_shares(console, report)
    for tier in report.tiers:
        if tier.problem:
            console.print(f"{tier.tier}: {tier.problem}", style="red", markup=False)
    console.print(f"clients: {', '.join(report.clients)}", soft_wrap=True, markup=False)
    console.print(
        f"{about_bytes(report.pinned_bytes)} pinned, {about_bytes(report.huge_bytes)} on huge pages, "
        f"{report.num_waiting} in line, {report.num_spills_dropped} blocks not written down, "
        f"{report.num_stranded} places of late writers",
        soft_wrap=True,
    )
    return 0


def _print_shares(console: Console, report: wire.StatusReport) -> None:
    """Who takes how much, where tenants have shares or limits; those who take most first."""
    rows = [(tier.tier, one) for tier in report.tiers for one in tier.tenants if len(tier.tenants) > 1]
    rows.sort(key=lambda row: -row[1].used_bytes)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("tenant", "tier", "used", "guaranteed", "limit"):
        table.add_column(name, justify="right" if name in ("used", "guaranteed", "limit") else "left")
    for tier, one in rows[:_MAX_SHARES]:
        guaranteed = f"{one.guaranteed:.3g}" if one.guaranteed else "-"
        limit = "-" if one.guaranteed or not one.tenant else f"{one.limit:.3g}"
        table.add_row(one.tenant or "(others)", tier, about_bytes(one.used_bytes), guaranteed, limit)
    if rows:
        console.print(table)
    if len(rows) > _MAX_SHARES:
        console.print(f"{len(rows) - _MAX_SHARES} more: --json", markup=False)


async def _ls(args: argparse.Namespace) -> int:
    if args.tier is None:
        report = await _with_store(args, StoreClient.status)
        rows = [{"tier": tier.tier, **msgspec.to_builtins(one)} for tier in report.tiers for one in tier.families]
    else:
        rows = [msgspec.to_builtins(block) for block in await _with_store(args, lambda client: _blocks(client, args))]
    names = model_names() if rows else {}
    rows = [{**row, "names": names.get(row["model"], [])} for row in rows]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table(box=None, pad_edge=False)
    for title in rows[0] if rows else ("nothing is stored",):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(str, {**row, "names": ", ".join(row["names"])}.values()))
    open_console(markup=False, emoji=False).print(table)
    return 0


async def _blocks(client: StoreClient, args: argparse.Namespace) -> list[wire.BlockEntry]:
    blocks: list[wire.BlockEntry] = []
    after = -1
    while len(blocks) < args.limit:
        page = await client.list_blocks(args.tier, after=after, limit=min(_LIST_PAGE, args.limit - len(blocks)))
        blocks += page.blocks
        after = page.next_after
        if after < 0:
            break
    return blocks


async def _verify(args: argparse.Namespace) -> int:
    async def verify(client: StoreClient) -> dict[str, dict[str, int]]:
        present = {tier.tier for tier in (await client.status()).tiers}
        results = {}
        for tier in args.tier or [tier for tier in _TIERS if tier in present]:
            found = await client.verify(tier)
            results[tier] = {"checked": found.num_checked, "damaged": found.num_damaged}
        return results

    results = await _with_store(args, verify)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        for tier, found in results.items():
            print(f"{tier}: {found['checked']} blocks checked, {found['damaged']} damaged and dropped")
    return 1 if any(found["damaged"] for found in results.values()) else 0


async def _clear(args: argparse.Namespace) -> int:
    names = model_names() if args.model is not None else {}
    meant = [model for model, served in names.items() if args.model in served] or [args.model]

    async def clear(client: StoreClient) -> int:
        stored = {family.model for tier in (await client.status()).tiers for family in tier.families}
        number = sum([await client.clear(tenant=args.tenant, model=model) for model in meant])
        # Not every tier lists its models, so what is in no list may be stored all the same.
        if not number and args.model is not None and stored.isdisjoint(meant) and names.keys().isdisjoint(meant):
            raise _no_such_model(args.model, {model: names.get(model, []) for model in [*sorted(stored), *names]})
        return number

    print(f"{await _with_store(args, clear)} blocks forgotten")
    return 0


def _no_such_model(given: str, known: dict[str, list[str]]) -> ConfigError:
    """`known`: the names of models by fingerprint."""
    listed = "; ".join(f"{model} ({', '.join(names) or 'not served here'})" for model, names in known.items())
    return ConfigError(
        f"--model {given}: nothing is stored of such a fingerprint, and no cluster of this host serves that name",
        hint=f"there is {listed}" if listed else "nothing is stored or served here",
    )


async def _warm(args: argparse.Namespace) -> int:
    number = await _with_store(args, lambda client: client.warm(args.max))
    print(f"{number} blocks brought from disk to the host tier")
    return 0


def _warm_prompts(args: argparse.Namespace) -> int:
    prompts = read_prompts(args.prompts)
    compute(server_of(args, _PROMPT_TIMEOUT_S), prompts)
    print(f"{len(prompts)} prompts computed")
    return 0


_ACTIONS = {"stat": _stat, "ls": _ls, "verify": _verify, "clear": _clear, "warm": _warm}


# Measuring


def _bench(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # its files are large
    if not args.json:
        print(f"{'what':22}{'block':>10}{'GB/s':>8}{'ceiling':>9}{'share':>7}{'CPU s/GB':>10}")

    def report(row: benchmark.Row) -> None:
        if args.json:
            print(json.dumps(asdict(row) | {"share": row.share}), flush=True)
        else:
            print(
                f"{row.what:22}{about_bytes(row.block_bytes):>10}{row.gb_s:>8.2f}{row.ceiling_gb_s:>9.2f}"
                f"{row.share:>7.0%}{row.cpu_s_per_gb:>10.3f}",
                flush=True,
            )

    benchmark.run_all(args.block, args.total, args.rounds, args.folder, report)
    with benchmark.store_process(64 << 20, 4096) as path:
        row = uvloop.run(benchmark.measure_lookups(path, 32, 200))
    if args.json:
        print(json.dumps(asdict(row)))
    else:
        print(f"lookup of {row.num_keys} keys: {row.shared_us:.1f} us in shared memory, {row.asked_us:.0f} us asked")
    return 0


def _document(report: wire.StatusReport) -> dict[str, Any]:
    """Field names instead of the positions of the wire."""
    return {name: msgspec.to_builtins(getattr(report, name)) for name in report.__struct_fields__ if name != "serial"}


def _disk(text: str) -> tuple[Path, int]:
    try:
        return parse_disk(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _address(text: str) -> Address:
    try:
        return parse_address(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _shares(given: Sequence[tuple[str, float]]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for tenant, fraction in given:
        if tenant in shares:
            raise ConfigError(
                f"--share {tenant}={fraction:g}: {tenant or 'who is not named'} has {shares[tenant]:g} already"
            )
        shares[tenant] = fraction
    return shares


def _share(text: str) -> tuple[str, float]:
    tenant, equals, fraction = text.rpartition("=")
    try:
        if not equals:
            raise ValueError("no `=`")
        return tenant, float(fraction)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected TENANT=FRACTION such as acme=0.25, not {text!r}") from error
