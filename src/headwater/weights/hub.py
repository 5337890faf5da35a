"""Models from a Hugging Face hub: one commit, only the files we read, resumable, with progress.

A branch or tag is turned into its commit first and that commit is what is fetched and reported, so two workers that
start minutes apart cannot get two versions. Credentials and the endpoint are huggingface_hub's own affair.
"""

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwater.engines.base import Progress, ProgressSink
from headwater.errors import ModelError

logger = logging.getLogger(__name__)

_HUB_ID: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<rev>[\w./-]{1,200}))?"
)
_TEXTS: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TIMEOUT_S: Final = 30.0
_SERVER_ERRORS: Final = 500
_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class HubId:
    """`org/name[/file.gguf][@revision]`."""

    repo: str
    file: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What lies on disk now."""

    folder: Path
    commit: str
    gguf: Path | None


def parse_hub_id(text: str) -> HubId | None:
    """None when the text does not have the form of a hub id."""
    matched = _HUB_ID.fullmatch(text)
    if matched is None or ".." in text:
        return None
    return HubId(matched["repo"], matched["file"], matched["rev"])


def fetch(hub_id: HubId, progress: ProgressSink, *, offline: bool) -> Snapshot:
    """Bring one commit's files here, or find them. Raises `ModelError`.

    A hub that cannot be reached does not stop a model that is already here.
    """
    try:
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise ModelError(
            f"{hub_id.repo} has to come from a hub, and huggingface_hub is not installed",
            hint="pip install 'headwater[native]', or name a local folder.",
        ) from error
    with _explained(hub_id):
        if offline or constants.HF_HUB_OFFLINE:
            return _cached(hub_id)
        progress(Progress("resolve", detail=f"asking for {hub_id.repo}"))
        try:
            return _download(hub_id, progress)
        except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
            local = _instead(hub_id, error) if _is_outage(error) else None
            if local is None:
                raise
            return local


def _is_outage(error: Exception) -> bool:
    """Whether the hub is to blame, rather than what it was asked for."""
    response = getattr(error, "response", None)
    return response is None or response.status_code >= _SERVER_ERRORS


def _download(hub_id: HubId, progress: ProgressSink) -> Snapshot:
    from huggingface_hub import HfApi, snapshot_download

    # The first call turns a branch into a commit and remembers it for a start without the hub.
    started = snapshot_download(hub_id.repo, revision=hub_id.revision, allow_patterns=["config.json"])
    commit = Path(started).name
    info = HfApi().model_info(hub_id.repo, revision=commit, timeout=_TIMEOUT_S)
    wanted, gguf = _choose(hub_id, [sibling.rfilename for sibling in info.siblings or ()])
    bar = _reporting_bar(hub_id.repo, progress)
    folder = Path(snapshot_download(hub_id.repo, revision=commit, allow_patterns=wanted, tqdm_class=bar))
    return Snapshot(folder, commit, folder / gguf if gguf else None)


def _instead(hub_id: HubId, error: Exception) -> Snapshot | None:
    """The local copy when the hub is down, if there is one."""
    try:
        snapshot = _cached(hub_id)
    except (OSError, ModelError):
        return None
    logger.warning("the hub cannot be reached (%s); using the local copy of %s", error, hub_id.repo)
    return snapshot


def _cached(hub_id: HubId) -> Snapshot:
    """What an earlier run has fetched. Whether it is complete shows when the folder is read."""
    from huggingface_hub import snapshot_download

    # Without a pattern the library would insist on every file of the repository, also on those we never fetch.
    pattern = ["config.json"]
    found = snapshot_download(hub_id.repo, revision=hub_id.revision, local_files_only=True, allow_patterns=pattern)
    folder = Path(found)
    files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    _, gguf = _choose(hub_id, files)
    return Snapshot(folder, folder.name, folder / gguf if gguf else None)


def _choose(hub_id: HubId, files: Sequence[str]) -> tuple[list[str], str | None]:
    """The files to fetch, and the GGUF file to open if that is what the repository holds."""
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if hub_id.file is not None:
        if hub_id.file not in ggufs:
            raise ModelError(f"{hub_id.repo} has no file {hub_id.file}{_listed(ggufs)}")
        return [*_siblings(hub_id.file, ggufs)], hub_id.file
    safetensors = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    if "config.json" in files and safetensors:
        weights = [name for name in safetensors if name.startswith("model")] or safetensors
        return [name for name in files if name in {*_TEXTS, _INDEX, *weights}], None
    first_shards = [name for name in ggufs if not re.search(r"-0*(?!1-of)\d+-of-\d+\.gguf$", name)]
    if len(first_shards) == 1:
        return [*_siblings(first_shards[0], ggufs)], first_shards[0]
    if ggufs:
        raise ModelError(
            f"{hub_id.repo} holds several GGUF files{_listed(first_shards)}",
            hint=f"Name one: {hub_id.repo}/{first_shards[0]}",
        )
    raise ModelError(f"{hub_id.repo} has neither safetensors with a config.json nor GGUF files")


def _siblings(file: str, ggufs: Sequence[str]) -> list[str]:
    """All shards of a GGUF file, itself included."""
    matched = re.fullmatch(r"(.*)-\d+-of-(\d+)\.gguf", file)
    if matched is None:
        return [file]
    shard = re.compile(re.escape(matched[1]) + r"-\d+-of-" + matched[2] + r"\.gguf")
    return [name for name in ggufs if shard.fullmatch(name)]


def _listed(names: Sequence[str]) -> str:
    return f" (there are: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''})" if names else ""


def _reporting_bar(repo: str, progress: ProgressSink) -> type[Any]:
    """A stand-in for the library's progress bar that reports written bytes. It is called from several threads."""
    from huggingface_hub.utils.tqdm import tqdm

    lock = threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            # The library keeps one bar for bytes on disk and one for bytes on the wire, which may be fewer.
            self._reports = options.get("unit") == "B" and not str(options.get("name")).endswith("transfer")
            super().__init__(*args, **(options | {"disable": False, "file": _Nowhere()}))  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self._reports:
                with lock:
                    progress(Progress("download", float(self.n), float(self.total or 0) or None, "bytes", repo))
            return bool(shown)

    return Bar


class _Nowhere:
    """A text sink that forgets."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None


@contextmanager
def _explained(hub_id: HubId) -> Iterator[None]:
    """Turn the hub library's exceptions into one that says what the operator can do."""
    from huggingface_hub import errors

    where = hub_id.repo + (f"@{hub_id.revision}" if hub_id.revision else "")
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{where} is gated", hint="Accept its terms on the hub, then log in (hf auth login)."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{hub_id.repo} has no revision {hub_id.revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {where}", hint="Private models need a login: hf auth login.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        reason = str(error.__cause__).splitlines()[0] if error.__cause__ else "offline"
        raise ModelError(f"{where} is not on this host and the hub cannot be asked ({reason})") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no"
        raise ModelError(f"the hub answered {status} for {where}", hint="Start again: downloads resume.") from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        raise ModelError(f"cannot fetch {where}: {error}", hint="Start again: downloads resume.") from error
