"""`headwater transfer bench`: what moving blocks between two processes of this machine costs."""

import argparse
import json
from dataclasses import asdict

from headwater.cli.parser import seconds, size
from headwater.config.units import format_bytes
from headwater.errors import ConfigError, TransferError
from headwater.transfer.benchmark import Case, Row, measure
from headwater.transfer.choice import SHIPPED

_COLUMNS = (
    f"{'back-end':9}{'op':6}{'block':>8}{'batch':>7}{'GB/s':>8}{'best':>8}{'lat us':>10}{'p99 us':>10}{'prep us':>9}"
)
_TITLE = f"{_COLUMNS}{'CPU s/GB':>10}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="transfer", metavar="KIND", prog="headwater transfer", required=True)
    bench = kinds.add_parser("bench", help="measure the back-ends, two processes, scattered blocks")
    bench.add_argument("--backend", nargs="+", default=["shm", "cma", "tcp", "file"], choices=SHIPPED, help="which")
    bench.add_argument(
        "--block", nargs="+", type=size, default=[4 << 10, 64 << 10, 1 << 20], help="block sizes: 4KiB 64KiB"
    )
    bench.add_argument("--batch", nargs="+", type=int, default=[1, 100], help="blocks per transfer")
    bench.add_argument("--op", choices=("read", "write"), default="read", help="seen from the side that begins")
    bench.add_argument("--seconds", type=seconds, default=1.0, help="how long each row is measured")
    bench.add_argument("--region", type=size, default=256 << 20, help="memory the blocks are scattered over")
    bench.add_argument("--checksums", action="store_true", help="compare both sides after each transfer")
    bench.add_argument("--encrypt", action="store_true", help="seal what goes over TCP")
    bench.add_argument("--json", action="store_true", help="one JSON object per row")


def run(args: argparse.Namespace) -> int:
    if min(*args.block, *args.batch, args.region) < 1 or args.seconds <= 0:
        raise ConfigError("--block, --batch and --region are at least 1, --seconds more than 0")
    if not args.json:
        print(_TITLE)
    worked = False
    for case in _cases(args):
        try:
            row = measure(case)
        except TransferError as error:
            print(json.dumps({"backend": case.backend, "error": error.message}) if args.json else _failed(case, error))
            continue
        worked = True
        print(json.dumps(asdict(row)) if args.json else _line(row), flush=True)
    return 0 if worked else 1


def _cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(backend, block, batch, args.op == "write", args.checksums, args.seconds, args.region, args.encrypt)
        for backend in args.backend
        for block in args.block
        for batch in args.batch
    ]


def _line(row: Row) -> str:
    return (
        f"{row.backend:9}{row.op:6}{format_bytes(row.block_bytes):>8}{row.batch:>7}{row.gb_s:>8.2f}{row.best_gb_s:>8.2f}"
        f"{row.latency_us:>10.1f}{row.p99_us:>10.1f}{row.prepare_us:>9.0f}{row.cpu_s_per_gb:>10.3f}"
    )


def _failed(case: Case, error: TransferError) -> str:
    return f"{case.backend:9}{format_bytes(case.block_bytes):>14}{case.batch:>7}  {error.message}"
