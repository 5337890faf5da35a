"""The user's cache folder, and content digests remembered by a file's identity.

A digest is remembered under (device, inode, size, modification time), so a changed file is read again. An unwritable
cache costs time, never the model.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

_CHUNK_BYTES: Final = 8 << 20
_SHA256_HEX: Final = 64
_PARALLEL_FILES: Final = 4


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/headwater`, or `~/.cache/headwater`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headwater"


def files_digest(cache: Path, files: Sequence[Path], on_bytes: Callable[[int], None]) -> str:
    """SHA-256 over the contents of `files`, in order. `on_bytes` hears how much was read, from other threads."""
    with ThreadPoolExecutor(max_workers=min(_PARALLEL_FILES, len(files))) as pool:
        digests = list(pool.map(lambda file: file_digest(cache, file, on_bytes), files))
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def file_digest(cache: Path, file: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of one file's content."""
    named = _digest_in_name(file)
    if named is not None:
        return named
    remembered = cache / "digests" / _identity(file)
    with suppress(OSError, UnicodeDecodeError):
        digest = remembered.read_text("ascii")
        if _is_digest(digest):
            return digest
    digest = _read_digest(file, on_bytes)
    with suppress(OSError):
        write_atomically(remembered, digest.encode("ascii"))
    return digest


def write_atomically(target: Path, content: bytes) -> None:
    """Readers see the old content or the new, never a part."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        partial.write_bytes(content)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _digest_in_name(file: Path) -> str | None:
    """Large files of a hub cache are named by their SHA-256."""
    real = file.resolve()
    return real.name if real.parent.name == "blobs" and _is_digest(real.name) else None


def _is_digest(text: str) -> bool:
    return len(text) == _SHA256_HEX and not set(text) - set("0123456789abcdef")


def _identity(file: Path) -> str:
    stat = file.stat()
    fields = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
    return hashlib.blake2b(fields.encode(), digest_size=16).hexdigest()


def _read_digest(file: Path, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
            on_bytes(count)
    return digest.hexdigest()
