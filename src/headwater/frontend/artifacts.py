"""Files of models, fetched from workers by digest: verified, bounded, kept.

A file is trusted for its SHA-256 alone, wherever it comes from. Refused: digests that are not 64 hex digits, files
larger than `MAX_ARTIFACT_BYTES`, content that does not match. All calls block and belong in a thread.
"""

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path

from headwater.errors import ModelError
from headwater.protocol.cluster import Artifact

logger = logging.getLogger(__name__)

MAX_ARTIFACT_BYTES = 256 * 1024 * 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_artifact(artifact: Artifact) -> None:
    """Refuse what could not be fetched or kept. Raises `ModelError`."""
    if not _DIGEST.fullmatch(artifact.digest):
        raise ModelError(f"artifact {artifact.name!r} has the digest {artifact.digest[:80]!r}, expected 64 hex digits")
    if not 0 <= artifact.size <= MAX_ARTIFACT_BYTES:
        raise ModelError(
            f"artifact {artifact.name!r} is said to have {artifact.size} bytes; at most {MAX_ARTIFACT_BYTES} are taken"
        )


def verify(artifact: Artifact, data: bytes) -> bytes:
    """`data`, if it is what the artifact's digest says. Raises `ModelError`."""
    if len(data) != artifact.size or hashlib.sha256(data).hexdigest() != artifact.digest:
        raise ModelError(f"artifact {artifact.name!r} does not match its digest {artifact.digest[:12]}...")
    return data


class ArtifactCache:
    """A folder of files named by digest. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, artifact: Artifact) -> bytes | None:
        """The file if it is there and undamaged. Raises `ModelError` for an impossible artifact."""
        check_artifact(artifact)
        if self._folder is None:
            return None
        path = self._folder / artifact.digest
        try:
            if path.stat().st_size != artifact.size:
                return None
            return verify(artifact, path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ModelError) as error:
            logger.warning("cached artifact %s is not usable: %s", path, error)
            return None

    def store(self, artifact: Artifact, data: bytes) -> None:
        """Keep verified content; failing to is a warning, not an error."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".incomplete-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(temporary, self._folder / artifact.digest)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            logger.warning("artifact %s cannot be kept in %s: %s", artifact.name, self._folder, error)
