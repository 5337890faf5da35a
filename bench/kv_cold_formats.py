"""Would smaller blocks in cold tiers pay? Real KV of the real model, kept in several ways.

    pip install zstandard
    python bench/kv_cold_formats.py [--json]

The demo model reads pages of this project's documentation, the store keeps its KV blocks, and here each is packed and
unpacked: by zstd, by zstd after its bytes were sorted into planes (all exponents together), and as the 8-bit integers
of `--cold-format int8`, with and without zstd. `bf16` rows are of the same values rounded to 16 bits, as larger models
have them. Speeds are of one core and of the unpacked bytes; a disk or bucket that is faster than that gains nothing.
Errors are relative to the root mean square of the block; the largest counts.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard
from kv_pays import BLOCK_BYTES, server

from headwater.kv.block import ROOT, Family
from headwater.kv.node.client import StoreClient
from headwater.kv.node.store import Piece
from headwater.kv.stores.memory import MemoryTier
from headwater.kv.stores.quantized import QuantizedTier

PAGES = ("architecture.md", "routing.md", "kv-store.md", "transfer.md")
PAGE_CHARACTERS = 4_000
Values = Any


class Row(NamedTuple):
    values: str
    kept_as: str
    ratio: float
    pack_gb_s: float
    unpack_gb_s: float
    rms_error: float


async def real_blocks(folder: Path) -> list[Values]:
    """What the store holds once the model has read the pages."""
    (socket,) = await asyncio.to_thread(lambda: list(folder.glob("headwater-*/serve-*/kv.sock")))
    client = StoreClient(socket, "bench")
    await client.start(patience_s=30.0)
    entries = (await client.list_blocks("host", limit=4000)).blocks
    found: list[Values] = []
    for entry in entries:
        family = Family(entry.model, entry.layout, entry.tenant, entry.payload_bytes)
        into = [memoryview(bytearray(entry.payload_bytes))]
        piece = Piece(family, bytes.fromhex(entry.id), entry.position, bytes.fromhex(entry.parent) or ROOT)
        if await client.load(piece, into, timeout_s=10.0):
            found.append(np.frombuffer(into[0], "<f4"))
    await client.close()
    return found


def read_pages() -> list[Values]:
    docs = Path(__file__).parents[1] / "docs"
    flags = ["--kv-host", str(1200 * BLOCK_BYTES)]
    with tempfile.TemporaryDirectory(prefix="hw-cold-") as name, server(flags, Path(name)) as url:
        for page in PAGES:
            text = (docs / page).read_text()[:PAGE_CHARACTERS]
            body = {"model": "smollm2-135m-instruct", "prompt": text, "max_tokens": 1}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=300).read()
        time.sleep(2.0)
        return asyncio.run(real_blocks(Path(name)))


def as_bf16(values: Values) -> Values:
    bits = values.view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def planes(payload: bytes, width: int) -> bytes:
    """All first bytes, then all second ones, and so on."""
    return np.frombuffer(payload, "u1").reshape(-1, width).T.tobytes()


def together(sorted_payload: bytes, width: int) -> bytes:
    return np.frombuffer(sorted_payload, "u1").reshape(width, -1).T.tobytes()


def measure(
    values: str, kept_as: str, blocks: list[bytes], pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]
) -> Row:
    total = sum(map(len, blocks))
    started = time.process_time()
    packed = [pack(block) for block in blocks]
    packed_s = time.process_time() - started
    started = time.process_time()
    unpacked = [unpack(block) for block in packed]
    unpacked_s = time.process_time() - started
    error = max(rms_error(values, one, other) for one, other in zip(blocks, unpacked, strict=True))
    return Row(values, kept_as, total / sum(map(len, packed)), total / packed_s / 1e9, total / unpacked_s / 1e9, error)


def rms_error(values: str, exact: bytes, kept: bytes) -> float:
    if exact == kept:
        return 0.0
    one, other = (floats(values, payload) for payload in (exact, kept))
    return float(np.sqrt(np.mean((one - other) ** 2) / np.mean(one**2)))


def floats(values: str, payload: bytes) -> Values:
    if values == "f32":
        return np.frombuffer(payload, "<f4")
    return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)


def rows(values: str, blocks: list[bytes]) -> list[Row]:
    width = 4 if values == "f32" else 2
    dtype = "f32" if values == "f32" else "bf16"
    tier = QuantizedTier(MemoryTier(1))
    size = len(blocks[0])

    def quantize(payload: bytes) -> bytes:
        return bytes(tier._pack(dtype, memoryview(payload)))

    def exact(packed: bytes) -> bytes:
        into = memoryview(bytearray(size))
        tier._unpack(dtype, memoryview(packed), into)
        return bytes(into)

    made = [measure(values, "int8", blocks, quantize, exact)]
    for level in (1, 3):
        press, free = zstandard.ZstdCompressor(level).compress, zstandard.ZstdDecompressor().decompress
        made.append(measure(values, f"zstd {level}", blocks, press, free))
        made.append(
            measure(
                values,
                f"planes, zstd {level}",
                blocks,
                lambda block, press=press: press(planes(block, width)),
                lambda packed, free=free: together(free(packed), width),
            )
        )
        made.append(
            measure(
                values,
                f"int8, zstd {level}",
                blocks,
                lambda block, press=press: press(quantize(block)),
                lambda packed, free=free: exact(free(packed)),
            )
        )
    asyncio.run(tier.close())
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    blocks = read_pages()
    if not args.json:
        print(f"{len(blocks)} blocks of {len(blocks[0]) * 4} bytes")
        print(f"{'values':7} {'kept as':18} {'ratio':>6} {'pack GB/s':>10} {'unpack GB/s':>12} {'RMS error':>10}")
    for values, made in (("f32", [b.tobytes() for b in blocks]), ("bf16", [as_bf16(b).tobytes() for b in blocks])):
        for row in rows(values, made):
            if args.json:
                print(json.dumps(row._asdict()), flush=True)
            else:
                print(
                    f"{row.values:7} {row.kept_as:18} {row.ratio:6.2f} {row.pack_gb_s:10.2f} {row.unpack_gb_s:12.2f} "
                    f"{row.rms_error:10.2%}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
