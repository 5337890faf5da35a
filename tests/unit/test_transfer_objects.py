"""Ranges of objects as regions, read by obstore from a folder that stands for a store."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import LocalStore

from headwater.errors import ConfigError, RegionGone, TransferError, TransferRefused, TransferTimeout
from headwater.transfer.agent import Agent
from headwater.transfer.backends.object import ObjectBackend, OpenStore
from headwater.transfer.objects import ObjectRange, locate
from headwater.transfer.options import AgentOptions

KEY = b"k" * 32
BLOCK = 4096
BLOCKS = 64
URL = "s3://models/layers/weights.bin"
CONTENT = bytes(range(256)) * (BLOCK * (BLOCKS + 2) // 256)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "weights.bin").write_bytes(CONTENT)
    return tmp_path


@contextlib.contextmanager
def agent(name: str, folder: Path, *readable: str, open_store: OpenStore | None = None) -> Iterator[Agent]:
    backend = ObjectBackend(readable, open_store=open_store or (lambda url: LocalStore(folder)))
    with Agent(name, AgentOptions(key=KEY), backends=[backend]) as made:
        yield made


def test_an_agent_reads_ranges_of_its_own_objects(folder: Path) -> None:
    with agent("here", folder) as here:
        here.add_peer(here.card())
        local = here.allocate(BLOCK * BLOCKS, block_bytes=BLOCK)
        source = here.register(ObjectRange(URL, BLOCK + 7, BLOCK * BLOCKS), block_bytes=BLOCK, access="read")
        wanted = [5, 6, 7, 40, 3, 63]
        here.read(local.blocks(range(len(wanted))), source.blocks(wanted)).run()
        for number, block in enumerate(wanted):
            start = BLOCK + 7 + block * BLOCK
            assert bytes(local.view[number * BLOCK : (number + 1) * BLOCK]) == CONTENT[start : start + BLOCK]


def test_a_peer_is_read_from_within_the_given_prefixes_only(folder: Path) -> None:
    with agent("there", folder) as there, agent("here", folder, "s3://models/") as here:
        here.add_peer(there.card())
        local = here.allocate(BLOCK, block_bytes=BLOCK)
        source = there.register(ObjectRange(URL, 0, BLOCK * BLOCKS), block_bytes=BLOCK, access="read")
        assert here.read(local.blocks([0]), source.blocks([1])).run().backend == "object"
        assert bytes(local.view) == CONTENT[BLOCK : 2 * BLOCK]
        other = there.register(ObjectRange("s3://secrets/weights.bin", 0, BLOCK), access="read")
        with pytest.raises(TransferRefused, match="outside the prefixes"):
            here.read(local.blocks([0]), other.blocks([0])).run()
    with agent("there", folder) as there, agent("strict", folder) as strict:
        strict.add_peer(there.card())
        local = strict.allocate(BLOCK, block_bytes=BLOCK)
        source = there.register(ObjectRange(URL, 0, BLOCK), access="read")
        with pytest.raises(TransferRefused, match="outside the prefixes"):
            strict.read(local.blocks([0]), source.blocks([0])).run()


def test_what_an_agent_does_not_offer_any_more_is_no_longer_its_own(folder: Path) -> None:
    with agent("there", folder) as there, agent("here", folder) as here:
        here.add_peer(here.card())
        here.add_peer(there.card())
        local = here.allocate(BLOCK, block_bytes=BLOCK)
        own, other = [one.register(ObjectRange(URL, 0, BLOCK), access="read") for one in (here, there)]
        here.read(local.blocks([0]), own.blocks([0])).run()
        here.unregister(own, timeout_s=5.0)
        with pytest.raises(TransferRefused, match="outside the prefixes"):
            here.read(local.blocks([0]), other.blocks([0])).run()


def test_objects_that_are_gone_or_too_short_are_errors_and_writing_is_refused(folder: Path) -> None:
    with agent("here", folder) as here:
        here.add_peer(here.card())
        local = here.allocate(BLOCK, block_bytes=BLOCK)
        gone = here.register(ObjectRange("s3://models/missing", 0, BLOCK), access="read")
        with pytest.raises(RegionGone, match="no object"):
            here.read(local.blocks([0]), gone.blocks([0])).run()
        short = here.register(ObjectRange(URL, len(CONTENT) - 10, BLOCK), access="read")
        with pytest.raises(TransferError):
            here.read(local.blocks([0]), short.blocks([0])).run()
        assert bytes(local.view) == bytes(BLOCK), "nothing of it is kept"
        with pytest.raises(TransferRefused):
            here.write(local.blocks([0]), gone.blocks([0])).run()
        with pytest.raises(TransferRefused, match="for reading only"):
            here.register(ObjectRange(URL, 0, BLOCK), access="both")
        for offset, num_bytes in ((-1, BLOCK), (0, 0)):
            with pytest.raises(TransferRefused, match="no range of an object"):
                here.register(ObjectRange(URL, offset, num_bytes), access="read")


def test_a_store_that_cannot_be_opened_is_an_error_of_the_transfer(folder: Path) -> None:
    def unset(url: str) -> object:
        raise GenericError(f"{url}: account must be specified")

    with agent("here", folder, open_store=unset) as here:
        here.add_peer(here.card())
        local = here.allocate(BLOCK, block_bytes=BLOCK)
        source = here.register(ObjectRange(URL, 0, BLOCK), access="read")
        with pytest.raises(TransferError, match="cannot be read: GenericError"):
            here.read(local.blocks([0]), source.blocks([0])).run()


def test_reads_that_nobody_waits_for_are_not_begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many stores hang: what comes later does not wait for what was given up."""
    answer = threading.Event()
    asked: list[str] = []

    def hanging(store: object, key: str, *, starts: list[int], ends: list[int]) -> list[bytes]:
        asked.append(key)
        answer.wait(20.0)
        return [CONTENT[start:end] for start, end in zip(starts, ends, strict=True)]

    monkeypatch.setattr(obstore, "get_ranges", hanging)
    with agent("here", folder) as here:
        here.add_peer(here.card())
        local = here.allocate(BLOCK, block_bytes=BLOCK)
        source = here.register(ObjectRange(URL, 0, BLOCK), access="read")
        for _ in range(12):
            with pytest.raises(TransferTimeout):
                here.read(local.blocks([0]), source.blocks([0]), timeout_s=0.05).run()
        begun = len(asked)
        answer.set()
        here.read(local.blocks([0]), source.blocks([0])).run()
        assert begun < 12
        assert len(asked) == begun + 1


def test_a_store_that_does_not_answer_ends_with_the_deadline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(obstore, "get_ranges", lambda *args, **how: answer.wait(20.0) and [])
    with agent("here", folder) as here:
        here.add_peer(here.card())
        local = here.allocate(BLOCK, block_bytes=BLOCK)
        source = here.register(ObjectRange(URL, 0, BLOCK), access="read")
        with pytest.raises(TransferTimeout):
            here.read(local.blocks([0]), source.blocks([0]), timeout_s=0.5).run()
        answer.set()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/key",
        "file:///etc/passwd",
        "s3://bucket",
        "s3:///key",
        "s3://bucket/a/../b",
        "s3://bucket//b",
        "https://user:password@host/key",
        "s3://bucket/a%2e%2e/b",
        "s3://bucket/key?endpoint=http://elsewhere",
        "s3://bucket/key\n",
        "s3://bucket/" + "k" * 4000,
    ],
)
def test_only_plain_urls_of_objects_are_taken(url: str) -> None:
    with pytest.raises(TransferRefused):
        locate(url)


def test_prefixes_end_where_a_name_ends() -> None:
    assert locate(URL).key == "layers/weights.bin"
    for prefix in ("s3://models", "models/", "s3://"[:3] + "/"):
        with pytest.raises(ConfigError):
            ObjectBackend([prefix])
