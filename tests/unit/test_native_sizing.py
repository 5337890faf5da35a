"""Cores, memory and KV sizes: pure decisions on hosts of many shapes."""

from pathlib import Path

import pytest

from headwater.config.schema import EngineConfig
from headwater.engines.base import Placement
from headwater.engines.native.host import HostCores, free_memory_bytes, host_cores
from headwater.engines.native.memory import KvDemand, kv_block_bytes, num_parameters, size_kv
from headwater.engines.native.placement import choose_share
from headwater.errors import ConfigError

GIB = 1024**3
SMT = HostCores(tuple((core, core + 8) for core in range(8)))


def plain(cores: int, quota: float | None = None) -> HostCores:
    return HostCores(tuple((core,) for core in range(cores)), quota)


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_workers_never_share_a_core(workers: int) -> None:
    shares = [choose_share(SMT, Placement(index, workers), None) for index in range(workers)]
    used = [cpu for share in shares for cpu in share.cpus or ()]
    assert sorted(used) == list(range(16))
    for share in shares:
        assert share.cpus is not None
        assert all((cpu + 8) % 16 in share.cpus for cpu in share.cpus), "hyper-threads stay together"
        assert share.threads == len(share.cpus) // 2


def test_a_single_worker_is_not_bound_and_leaves_a_core() -> None:
    share = choose_share(SMT, Placement(), None)
    assert share.cpus is None
    assert share.threads == 7
    assert choose_share(plain(1), Placement(), None).threads == 1
    assert choose_share(plain(2), Placement(), None).threads == 1


def test_more_workers_than_cores_are_left_to_the_system() -> None:
    share = choose_share(plain(2), Placement(2, 3), None)
    assert share.cpus is None
    assert share.threads == 1


def test_a_quota_bounds_the_threads() -> None:
    assert choose_share(plain(64, quota=4.0), Placement(), None).threads == 4
    assert choose_share(plain(64, quota=4.0), Placement(1, 2), None).threads == 2
    assert choose_share(plain(64, quota=0.5), Placement(), None).threads == 1


def test_explicit_threads_are_kept_within_reason() -> None:
    assert choose_share(SMT, Placement(0, 2), 8).threads == 8
    with pytest.raises(ConfigError, match=r"9.*2 workers has 8 CPUs"):
        choose_share(SMT, Placement(0, 2), 9)
    with pytest.raises(ConfigError):
        choose_share(SMT, Placement(), 0)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_topology_and_quota_are_read(tmp_path: Path) -> None:
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(
        tmp_path,
        {
            siblings.format(0): "0,4\n",
            siblings.format(4): "0,4\n",
            siblings.format(1): "1-2\n",
            siblings.format(2): "1-2\n",
            "proc/self/cgroup": "0::/slice/unit\n",
            "sys/fs/cgroup/slice/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/slice/unit/cpu.max": "max 100000\n",
        },
    )
    assert host_cores([0, 1, 4, 7], root) == HostCores(((0, 4), (1,), (7,)), 3.0)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": str(4 * GIB),
                "sys/fs/cgroup/a/memory.current": str(3 * GIB),
                "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": str(GIB),
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/x\n1:cpu:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(5 * GIB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(4 * GIB),
            },
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": str(GIB),
                "sys/fs/cgroup/memory.current": str(2 * GIB),
            },
            0,
        ),
    ],
)
def test_free_memory_is_the_least_of_host_and_groups(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    root = write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n"} | files)
    assert free_memory_bytes(root) == expected


def test_unknown_free_memory_asks_for_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv-cache-memory"):
        free_memory_bytes(tmp_path)


def test_this_host_can_be_read() -> None:
    assert free_memory_bytes() > 0
    assert host_cores([0]).cores == ((0,),)


DEMAND = KvDemand(context_limit=8192, block_bytes=737_280, free_bytes=10 * GIB)


def test_default_size_is_a_part_of_free_memory_bounded_by_need() -> None:
    config = EngineConfig(max_num_seqs=64)
    one = size_kv(config, DEMAND)
    assert one.max_model_len == 8192
    assert one.num_blocks == int(0.4 * (DEMAND.free_bytes - 512 * 1024**2)) // DEMAND.block_bytes
    two = size_kv(config, KvDemand(8192, 737_280, 10 * GIB, num_workers=2))
    assert two.num_blocks == int(0.2 * (DEMAND.free_bytes - 2 * 512 * 1024**2)) // DEMAND.block_bytes
    small = size_kv(EngineConfig(max_num_seqs=2, max_model_len=100), DEMAND)
    assert small.num_blocks == 2 * 7


def test_the_models_own_length_is_cut_to_what_fits() -> None:
    size = size_kv(EngineConfig(kv_cache_memory=100 * 737_280), DEMAND)
    assert size.num_blocks == 100
    assert size.max_model_len == 1600


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(max_model_len=9000), ["9000", "8192 positions", "--max-model-len 8192"]),
        (
            EngineConfig(max_model_len=8000, num_kv_blocks=100),
            ["needs 500 blocks", "holds 100 blocks = 1600 tokens", "--max-model-len 1600", "--kv-cache-memory 352MiB"],
        ),
        (EngineConfig(kv_cache_memory=1000), ["holds 0 blocks", "--kv-cache-memory"]),
        (EngineConfig(), ["0 MiB (40% of 0 MiB free, 1 workers) holds 0 blocks", "--kv-cache-memory 360MiB"]),
        (
            EngineConfig(kv_cache_memory=20 * GIB),
            ["20,480 MiB", "10,240 MiB are free beside the weights", "--num-kv-blocks 14563"],
        ),
        (EngineConfig(num_kv_blocks=2**40), ["free", "--num-kv-blocks"]),
    ],
)
def test_refusals_show_the_arithmetic_and_a_setting_that_works(config: EngineConfig, words: list[str]) -> None:
    demand = DEMAND if config != EngineConfig() else KvDemand(8192, 737_280, 512 * 1024**2)
    with pytest.raises(ConfigError) as refused:
        size_kv(config, demand)
    for word in words:
        assert word in str(refused.value)


def test_the_suggested_settings_work() -> None:
    assert size_kv(EngineConfig(max_model_len=1600, num_kv_blocks=100), DEMAND).max_model_len == 1600
    assert size_kv(EngineConfig(max_model_len=8000, kv_cache_memory=352 * 1024**2), DEMAND).max_model_len == 8000
    assert size_kv(EngineConfig(num_kv_blocks=14_563), DEMAND).num_blocks == 14_563


def test_figures_of_the_demo_model() -> None:
    from headwater.engines.native.base import NativeModelConfig, RopeConfig

    model = NativeModelConfig("LlamaForCausalLM", 49_152, 576, 1536, 30, 9, 3, 64, 1e-5, RopeConfig(), 8192, True)
    assert num_parameters(model) == 134_515_008
    assert kv_block_bytes(model, 16, 4) == 737_280
