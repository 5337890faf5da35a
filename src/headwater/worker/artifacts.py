"""Gives out the files that the model card names, in bounded parts. Nothing else of the file system can be reached."""

import os
from collections.abc import Mapping
from pathlib import Path

from headwater.errors import HeadwaterError, InvalidRequest, WorkerError
from headwater.protocol.cluster import Artifact
from headwater.protocol.frames import ArtifactChunk, FetchArtifact
from headwater.protocol.request import ErrorInfo

MAX_CHUNK_BYTES = 1 << 20


class ArtifactStore:
    """Contents by digest. Reads are small and of files just loaded, hence from the page cache, so they do not wait."""

    def __init__(self, artifacts: list[Artifact], contents: Mapping[str, Path | bytes]) -> None:
        self._contents = {artifact.digest: (contents[artifact.digest], artifact.size) for artifact in artifacts}

    def read(self, fetch: FetchArtifact) -> ArtifactChunk:
        """The part asked for, or the beginning of it when it is long, or an error."""
        try:
            return self._read(fetch)
        except HeadwaterError as error:
            return ArtifactChunk(fetch.digest[:128], fetch.offset, 0, b"", ErrorInfo.of(error))

    def _read(self, fetch: FetchArtifact) -> ArtifactChunk:
        found = self._contents.get(fetch.digest)
        if found is None:
            raise InvalidRequest("no artifact of this model has that digest", param="digest")
        content, size = found
        if not 0 <= fetch.offset <= size or fetch.length < 0:
            raise InvalidRequest(
                f"{fetch.length} bytes from {fetch.offset} were asked for; the artifact has {size}", param="offset"
            )
        length = min(fetch.length, size - fetch.offset, MAX_CHUNK_BYTES)
        data = content[fetch.offset : fetch.offset + length] if isinstance(content, bytes) else None
        if data is None:
            data = _read_file(content, fetch.offset, length)
        if len(data) != length:
            raise WorkerError("the artifact has become shorter since it was loaded")
        return ArtifactChunk(fetch.digest, fetch.offset, size, data)


def _read_file(path: Path | bytes, offset: int, length: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WorkerError(f"the artifact cannot be read: {error.strerror}") from error
    try:
        return os.pread(fd, length, offset)
    except OSError as error:
        raise WorkerError(f"the artifact cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
