"""From the configuration to the roles of a graph's workers and to how their blocks move."""

from unittest import mock

import msgspec
import pytest

from headwater.config.schema import DisaggConfig, EngineConfig, RuntimeConfig, ServeConfig
from headwater.errors import ConfigError
from headwater.worker import roles
from headwater.worker.roles import engine_of, num_workers, role_of, transfer_options


def test_pools_come_first_and_replace_the_plain_workers() -> None:
    config = ServeConfig(prefill=1, decode=2, workers=5)
    assert num_workers(config) == 3
    assert [role_of(config, index) for index in range(3)] == [("prefill", False), ("decode", False), ("decode", False)]
    assert num_workers(ServeConfig(workers=5)) == 5
    assert num_workers(ServeConfig(decode=2)) == 2
    with pytest.raises(ConfigError, match="nobody would generate"):
        num_workers(ServeConfig(prefill=2))


def test_adaptive_workers_begin_as_their_pool_says() -> None:
    adaptive = DisaggConfig(role="adaptive")
    assert role_of(ServeConfig(disaggregation=adaptive), 0) == ("both", True)
    assert role_of(ServeConfig(prefill=1, decode=1, disaggregation=adaptive), 0) == ("prefill", True)
    assert role_of(ServeConfig(disaggregation=DisaggConfig(role="decode")), 0) == ("decode", False)


def test_memory_moves_as_far_as_the_planes_reach_and_as_secretly() -> None:
    config = ServeConfig(disaggregation=DisaggConfig(transfer_checksums=True, transfer_backends=("tcp",)))
    options = transfer_options(config)
    assert (options.host, options.encrypt, options.checksums, options.backends) == (None, False, True, ("tcp",))

    def bound(bind: str, key: str | None = None) -> tuple[str | None, bool]:
        made = transfer_options(msgspec.structs.replace(config, runtime=RuntimeConfig(bind=bind, cluster_key=key)))
        return made.host, made.encrypt

    assert bound("localhost") == ("127.0.0.1", False)
    assert bound("127.0.0.1", "key") == ("127.0.0.1", False)
    assert bound("10.0.0.7") == ("10.0.0.7", False)
    assert bound("10.0.0.7", "key") == ("10.0.0.7", True)
    with mock.patch.object(roles, "check_available", side_effect=ConfigError("no library")):
        assert bound("10.0.0.7", "key") == (None, False)


def test_vllm_gets_memory_for_hand_offs_where_its_role_asks_for_them() -> None:
    vllm = EngineConfig(engine="vllm")
    assert engine_of(ServeConfig(engine=vllm), 0).kv_staging is None
    pools = ServeConfig(engine=vllm, prefill=1, decode=1)
    assert all(0 < (engine_of(pools, index).kv_staging or 0) <= 4 << 30 for index in range(2))
    adaptive = ServeConfig(engine=vllm, disaggregation=DisaggConfig(role="adaptive"))
    assert engine_of(adaptive, 0).kv_staging
    told = ServeConfig(engine=EngineConfig(engine="vllm", kv_staging=0), prefill=1, decode=1)
    assert engine_of(told, 0).kv_staging == 0
    assert engine_of(ServeConfig(prefill=1, decode=1), 0).kv_staging is None
    attached = EngineConfig(engine="vllm", attach=("http://a", "http://b"))
    assert engine_of(ServeConfig(engine=attached, prefill=1, decode=1), 0).kv_staging is None
