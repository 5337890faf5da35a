"""Names of blocks from a worker to the connectors of its engine: through a file, read while it is written."""

import os
import tempfile
import threading
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.kv.connectors.names import KEY_BYTES, Named, NameLog, NamesTold
from headwater.kv.connectors.naming import Naming, namespace_in, salt_of
from headwater.kv.connectors.sglang_naming import PageNames
from headwater.kv.identity import chain_block_ids, namespace, split_block_ids
from headwater.kv.pricing import ComputeRate
from sglang_hicache import page_keys

ANN, BOB = (Naming(namespace("m", "l", salt=name).hex(), "m", name) for name in ("ann", "bob"))


def keys_of(count: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(KEY_BYTES) for number in range(first, first + count)]


def ids_of(count: int, first: int = 0) -> bytes:
    return b"".join(number.to_bytes(16) for number in range(first, first + count))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "names"


def test_what_is_told_is_found_and_nothing_else(path: Path) -> None:
    log, told = NameLog(path), NamesTold(path)
    assert told.find(keys_of(1)[0]) is None
    log.tell(ANN, keys_of(3), ids_of(3))
    log.tell(BOB, keys_of(1, 9))
    assert told.find(keys_of(3)[2]) == Named(ids_of(3)[-16:], ANN)
    assert told.find(keys_of(1, 9)[0]) == Named(b"", BOB)
    assert told.leading([*keys_of(3), keys_of(1, 7)[0]]) == [Named(one, ANN) for one in split_block_ids(ids_of(3))]
    assert told.leading([*keys_of(3), *keys_of(1, 9)]) == told.leading(keys_of(3)), "another one's is not of the run"
    log.tell(BOB, keys_of(1), ids_of(1))
    told.find(keys_of(1, 50)[0])
    found = told.find(keys_of(1)[0])
    assert found is not None
    assert found.naming == BOB, "the last word counts"
    told.close()
    log.close()
    assert not path.exists()


def test_what_is_known_is_not_told_again(path: Path) -> None:
    log = NameLog(path)
    log.tell(ANN, keys_of(100), ids_of(100))
    size = path.stat().st_size
    log.tell(ANN, keys_of(100), ids_of(100))
    assert path.stat().st_size == size
    log.tell(ANN, keys_of(101), ids_of(101))
    assert path.stat().st_size < size + 300
    log.close()


def test_what_is_on_its_way_is_waited_for(path: Path) -> None:
    log, told = NameLog(path), NamesTold(path)
    log.tell(ANN, keys_of(2), ids_of(2))
    later = threading.Timer(0.1, log.tell, (ANN, keys_of(2, 2), ids_of(2, 2)))
    later.start()
    assert len(told.leading(keys_of(4), wait_s=10.0)) == 4
    later.join()
    assert len(told.leading(keys_of(5), wait_s=0.05)) == 4
    told.close()
    log.close()


def test_what_another_thread_has_read_just_before_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, told = NameLog(path), NamesTold(path)
    read = told._read

    def read_after_another() -> object:
        read()
        return read()

    monkeypatch.setattr(told, "_read", read_after_another)
    log.tell(ANN, keys_of(1), ids_of(1))
    assert told.find(keys_of(1)[0]) == Named(ids_of(1), ANN)
    told.close()
    log.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30))
def test_logs_take_turns_and_readers_have_the_last_two(runs: list[tuple[int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log, told = NameLog(Path(folder) / "names", max_keys=50), NamesTold(Path(folder) / "names")
        number = 0
        for count, reads in runs:
            log.tell(ANN, keys_of(count, number), ids_of(count, number))
            if reads:
                assert len(told.leading(keys_of(count, number))) == count, "what was told last is there"
            number += count
        assert len(told._found) + len(told._before) <= 2 * 50
        told.close()
        log.close()


def test_a_log_that_is_not_one_is_not_believed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = NamesTold(path)
    assert told.find(keys_of(1)[0]) is None
    for garbage in (b"\xff" * 100, (5).to_bytes(4, "little") + b"hello", b"\x01"):
        path.unlink(missing_ok=True)
        path.write_bytes(garbage)
        assert told.find(keys_of(1)[0]) is None
    assert "cannot be read" in caplog.text
    log = NameLog(path)
    log.tell(ANN, keys_of(1), ids_of(1))
    assert told.find(keys_of(1)[0]) is not None, "the next one is"
    told.close()
    log.close()


def test_a_full_disk_costs_names_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, told, write, left = NameLog(path), NamesTold(path), os.write, [10]

    def full(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        count = write(fd, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", full)
    log.tell(ANN, keys_of(5), ids_of(5))
    assert told.leading(keys_of(5)) == []
    assert "cannot be named" in caplog.text
    monkeypatch.setattr(os, "write", write)
    log.tell(ANN, keys_of(5), ids_of(5))
    assert len(told.leading(keys_of(5))) == 5, "told whole, once there is room"
    told.close()
    log.close()


def test_readers_on_threads_see_whole_runs_while_they_are_written(path: Path) -> None:
    log, told, wrong = NameLog(path, max_keys=1000), NamesTold(path), list[int]()
    running = threading.Event()
    running.set()

    def read() -> None:
        while running.is_set():
            for number in range(0, 4000, 97):
                found = told.find(keys_of(1, number)[0])
                if found is not None and found.block_id != ids_of(1, number):
                    wrong.append(number)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for start in range(0, 4000, 50):
        log.tell(ANN, keys_of(50, start), ids_of(50, start))
    running.clear()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert told.find(keys_of(1, 3999)[0]) is not None
    told.close()
    log.close()


def test_what_computing_costs_is_told_when_it_is_news_and_in_every_log(path: Path) -> None:
    log, told = NameLog(path, max_keys=10), NamesTold(path)
    assert told.rate() is None
    log.price(ComputeRate(1.0, 0.001, 16))
    assert told.rate() == ComputeRate(1.0, 0.001, 16)
    size = path.stat().st_size
    log.price(ComputeRate(1.01, 0.001, 16))
    assert path.stat().st_size == size
    log.price(ComputeRate(1.5, 0.001, 16))
    log.tell(ANN, keys_of(8), ids_of(8))
    log.tell(ANN, keys_of(8, 8), ids_of(8, 8))
    assert told.rate() == NamesTold(path).rate() == ComputeRate(1.5, 0.001, 16)
    told.close()
    log.close()


def test_a_salt_of_ours_is_told_from_others() -> None:
    key = namespace("m", "l", salt="x")
    assert namespace_in(salt_of(key)) == key
    for other in ("hw:moon", "hw:", "hw:00", f"hw:{'00' * 65}", f"{salt_of(key)} ", salt_of(key).upper()):
        assert namespace_in(other) is None, other
    assert namespace_in("a customer's") is None


@pytest.mark.parametrize("salt", [None, "hw:" + "ab" * 32, "ü"])
@pytest.mark.parametrize("page", [4, 16])
def test_pages_of_sglang_have_the_ids_of_blocks(path: Path, salt: str | None, page: int) -> None:
    log, told = NameLog(path), NamesTold(path)
    pages = PageNames(log, page)
    tokens = [(number * 104729) % 150_000 for number in range(200)]
    pages.begin(1, ANN, array("I", tokens[:77]), salt)
    pages.grow(1, tokens[77:79])
    pages.grow(1, tokens[79:])
    pages.grow(2, tokens)  # of a stream that has ended
    pages.begin(3, ANN, array("I", [*tokens[:100], *range(60)]), salt)
    pages.begin(4, ANN, array("I"), salt)
    pages.end(4)
    for sequence in (tokens, [*tokens[:100], *range(60)]):
        keys = page_keys(sequence, salt, page)
        ids = chain_block_ids(ANN.key(), array("I", sequence).tobytes(), page)
        assert [one.block_id for one in told.leading(list(map(bytes.fromhex, keys)))] == split_block_ids(ids)
    told.close()
    log.close()
