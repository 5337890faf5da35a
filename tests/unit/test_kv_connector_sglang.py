"""The HiCache backend, called as SGLang's controller calls it, against a real store process."""

import hashlib
import importlib
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_doubles import ExtraInfo, HiCacheController, HiCacheStorage, HiCacheStorageConfig, HostPool, install
from headwater.errors import ConfigError
from headwater.kv.block import ROOT
from headwater.kv.connectors.names import NameLog
from headwater.kv.connectors.naming import Naming
from headwater.kv.identity import chain_block_ids
from headwater.kv.shards import part_ids
from kv_process import store_process, store_socket


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`make(socket, **config)`: a controller with a pool of its own."""
    install(monkeypatch, "sglang.srt.mem_cache.hicache_storage", HiCacheStorage=HiCacheStorage)
    module = importlib.import_module("headwater.kv.connectors.sglang")
    made: list[Any] = []

    def controller(socket: Path, **config: Any) -> HiCacheController:
        extra = {"socket": str(socket), "timeout_s": 2.0, **config.pop("extra", {})}
        storage = module.HeadwaterStorage(HiCacheStorageConfig(extra_config=extra, **config), {})
        made.append(storage)
        return HiCacheController(storage, HostPool())

    yield controller
    for storage in made:
        storage.close()
    del sys.modules["headwater.kv.connectors.sglang"]


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with store_socket() as path:
        yield path


def keys_of(name: str, count: int) -> list[str]:
    """Chained hashes of pages, as SGLang makes them."""
    keys, last = [], name
    for _ in range(count):
        last = hashlib.sha256(last.encode()).hexdigest()
        keys.append(last)
    return keys


def fill(controller: HiCacheController, pages: int) -> torch.Tensor:
    """Random content; the indices of its tokens."""
    size = controller.pool.page_size
    controller.pool.kv[: pages * size] = torch.randn(pages * size, controller.pool.kv.shape[1]).bfloat16()
    return torch.arange(pages * size)


def test_pages_of_one_engine_reach_another(socket: Path, make: Any) -> None:
    one, two = make(socket), make(socket)
    keys, indices = keys_of("chain 2", 150), fill(one, 150)
    assert two.query(keys) == 0
    assert one.backup(keys, indices) == 150
    assert two.query([*keys, *keys_of("b", 3)]) == 150
    assert two.prefetch(keys, indices) == 150
    assert torch.equal(two.pool.kv, one.pool.kv)


def test_the_end_of_a_chain_with_its_prefix_told(socket: Path, make: Any) -> None:
    one, two = make(socket), make(socket)
    keys, indices = keys_of("chain 3", 40), fill(one, 40)
    size = one.pool.page_size
    assert one.backup(keys[:10], indices[: 10 * size]) == 10
    assert one.backup(keys[10:], indices[10 * size :], keys[:10]) == 30
    assert two.prefetch(keys[10:], indices[10 * size :], keys[:10]) == 30
    assert torch.equal(two.pool.kv[10 * size : 40 * size], one.pool.kv[10 * size : 40 * size])


def test_pages_are_chained_to_their_prefix(socket: Path, make: Any) -> None:
    storage, keys = make(socket).storage, keys_of("chain 5", 5)
    whole, end = storage._chain(keys, None), storage._chain(keys[2:], ExtraInfo(keys[:2]))
    assert end == whole.part(2, 5)
    assert whole.parent == ROOT


def test_what_the_store_did_not_take_is_said(socket: Path, make: Any) -> None:
    one = make(socket)
    keys, indices = keys_of("chain 9", 4), fill(one, 4)
    one.storage._agent.num_in_host = lambda ids: 2
    assert one.storage.batch_set_v1(keys, indices) == [True, True, False, False]


def test_pages_by_value(socket: Path, make: Any) -> None:
    one, two = make(socket), make(socket)
    keys, indices = keys_of("chain 4", 5), fill(one, 5)
    assert one.backup_generic(keys, indices)
    assert two.prefetch_generic([*keys, *keys_of("b", 1)], torch.arange(6 * 16)) == 5
    assert torch.equal(two.pool.kv, one.pool.kv)
    storage = two.storage
    assert storage.exists(keys[0])
    assert not storage.exists("nothing")
    assert storage.get("nothing") is None
    target = two.pool.get_dummy_flat_data_page()
    assert torch.equal(storage.get(keys[2], target), one.pool.get_data_page(2 * 16))
    assert storage.set("new", one.pool.get_data_page(0))
    assert storage.exists("new")


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "another/model"},
        {"tp_rank": 1, "tp_size": 2},
        {"extra": {"tenant": "b"}},
        {"extra": {"fingerprint": "other weights"}},
    ],
)
def test_pages_of_another_kind_are_not_found(socket: Path, make: Any, other: dict[str, Any]) -> None:
    one, two = make(socket), make(socket, **other)
    keys, indices = keys_of("chain 6", 4), fill(one, 4)
    assert one.backup(keys, indices) == 4
    assert two.query(keys) == 0
    assert make(socket).query(keys) == 4


@pytest.mark.parametrize(("rank", "size", "mla"), [(0, 1, False), (0, 2, False), (1, 2, False), (1, 2, True)])
def test_named_pages_are_chained_by_their_names(
    socket: Path, make: Any, tmp_path: Path, rank: int, size: int, mla: bool
) -> None:
    log, naming = NameLog(tmp_path / "names"), Naming("ab" * 32, "print", "acme")
    config = {"tp_rank": rank, "tp_size": size, "is_mla_model": mla, "extra": {"names": str(tmp_path / "names")}}
    storage, keys = make(socket, **config).storage, keys_of("named", 9)
    ids = chain_block_ids(naming.key(), array("I", range(9 * 16)).tobytes(), 16)
    assert storage._chain(keys, None) is None, "nobody has named them"
    log.tell(naming, list(map(bytes.fromhex, keys[:7])), ids[: 7 * 16])
    layout = f"sglang.torch.bfloat16.page_first.16.of{1 if mla else size}"
    part = 0 if mla else rank
    expected = part_ids(ids, layout, part)
    chain = storage._chain(keys, None)
    assert (chain.ids, chain.first, chain.parent) == (expected[: 7 * 16], 0, ROOT), "as far as they are named"
    own = chain.family
    assert (own.model, own.tenant, own.layout) == ("print", "acme", layout)
    assert (own.parts, own.beside) == (1 if mla else size, part > 0)
    end = storage._chain(keys[5:7], ExtraInfo(keys[:5]))
    assert (end.ids, end.first, end.parent) == (expected[5 * 16 : 7 * 16], 5, expected[4 * 16 : 5 * 16])
    assert storage._chain(keys[8:], ExtraInfo(keys[:8])) is None, "nor is what follows on what is not named"
    log.close()


def test_models_that_keep_more_than_pages_are_refused_as_the_engine_starts(socket: Path, make: Any) -> None:
    storage = make(socket).storage
    assert storage.registered_pools.keys() == {"kv"}
    with pytest.raises(ConfigError, match="mamba"):
        HiCacheController(storage, HostPool(), pools=("kv", "mamba"))


def test_ranks_of_a_model_with_equal_caches_share(socket: Path, make: Any) -> None:
    one, two = make(socket, is_mla_model=True, tp_size=2), make(socket, is_mla_model=True, tp_rank=1, tp_size=2)
    keys, indices = keys_of("chain 7", 4), fill(one, 4)
    assert one.backup(keys, indices) == 4
    assert two.prefetch(keys, indices) == 4


def test_a_store_that_dies_is_a_miss(run_folder: Path, make: Any) -> None:
    with store_process(run_folder / "kv.sock") as process:
        controller = make(run_folder / "kv.sock")
        keys, indices = keys_of("chain 8", 4), fill(controller, 4)
        assert controller.backup(keys, indices) == 4
        process.kill()
        process.wait()
        assert controller.prefetch(keys, indices) == 0
        assert controller.backup(keys, indices) == 0
        assert controller.prefetch_generic(keys, indices) == 0
