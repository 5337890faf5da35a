"""What an engine cannot do with the node's store is refused as it starts, by the name of the flag."""

import json
from pathlib import Path

import pytest

from headwater.cli.main import main
from headwater.config.schema import EngineConfig
from headwater.engines.base import STORE_FLAGS, Placement
from headwater.engines.sglang.arguments import SglangArguments, sglang_arguments
from headwater.engines.trtllm.arguments import TrtllmArguments, trtllm_arguments
from headwater.errors import ConfigError
from headwater.kv.connectors import sglang_naming, trtllm_naming
from sglang_engine_double import installed

SOCKET = Path("/run/kv.sock")


def sglang(*words: str, store: Path | None = SOCKET, **fields: object) -> SglangArguments:
    config = EngineConfig(engine_args=words, **fields)  # type: ignore[arg-type]
    return sglang_arguments(config, "a/model", Path("/run/x"), Placement(store=store))


def trtllm(*words: str, store: bool = True, **fields: object) -> TrtllmArguments:
    return trtllm_arguments(EngineConfig(engine_args=words, **fields), "model", store=store)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, EngineConfig())


def test_sglang_is_told_where_the_store_is() -> None:
    found = sglang("--speculative-algorithm", "NGRAM")
    assert found.store
    assert found.server.enable_hierarchical_cache
    assert found.server.hicache_storage_backend == "dynamic"
    said = json.loads(found.server.hicache_storage_backend_extra_config)
    assert (said["socket"], said["names"], said["interface_v1"]) == (str(SOCKET), "/run/x/names", 1)
    assert said["hicache_storage_pass_prefix_keys"] is True
    assert (said["module_path"], said["class_name"]) == (sglang_naming.MODULE, "HeadwaterStorage")
    alone = sglang(store=None)
    assert not alone.store
    assert not alone.server.enable_hierarchical_cache
    assert alone.server.hicache_storage_backend is None


OWN = ("--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config")


def test_a_store_that_the_operator_attached_to_sglang_is_not_attached_again() -> None:
    said = json.dumps({"module_path": sglang_naming.MODULE, "tenant": "x"})
    found = sglang(*OWN, said)
    assert not found.store
    assert found.server.hicache_storage_backend_extra_config == said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--hicache-storage-backend", "mooncake"), "--hicache-storage-backend mooncake"),
        ((*OWN, '{"module_path": "somebody.elses"}'), "--hicache-storage-backend dynamic"),
        (("--hicache-storage-backend-extra-config", "@file.toml"), "--hicache-storage-backend-extra-config @file.toml"),
        (("--hicache-storage-backend-extra-config", "[1]"), r"--hicache-storage-backend-extra-config \[1\]"),
        (("--enable-unified-cache-external-linker",), "--enable-unified-cache-external-linker"),
        (("--disable-radix-cache",), r"--disable-radix-cache \(--no-enable-prefix-caching\)"),
        (("--disaggregation-mode", "decode"), "--disaggregation-mode decode"),
        (("--speculative-algorithm", "EAGLE3"), "--speculative-algorithm EAGLE3"),
        (("--nnodes", "2"), "--nnodes 2"),
        (("--page-size", "1"), "--page-size 1"),
    ],
)
def test_what_sglang_cannot_do_with_a_store_is_refused(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        sglang(*words)
    assert STORE_FLAGS in str(refused.value)
    assert refused.value.hint
    assert not sglang(*words, store=None).store, "without one it is no concern of ours"


def test_prefix_caching_off_is_refused_for_sglang() -> None:
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching"):
        sglang(enable_prefix_caching=False)


def test_tensorrt_llm_gets_the_connector() -> None:
    found = trtllm("--max-batch-size", "4")
    assert found.store
    assert found.llm["kv_connector_config"] == trtllm_naming.connector_config()
    alone = trtllm(store=False)
    assert not alone.store
    assert "kv_connector_config" not in alone.llm


def test_a_store_that_the_operator_attached_to_tensorrt_llm_is_not_attached_again() -> None:
    found = trtllm("--kv-connector-config.connector-module", trtllm_naming.MODULE)
    assert not found.store
    assert found.llm["kv_connector_config"] == {"connector_module": trtllm_naming.MODULE}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--kv-connector-config.connector", "lmcache"), "--kv-connector-config"),
        (("--tp_size", "2"), "--tensor-parallel-size 2"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size 2"),
        (("--cp_size", "2"), "--context-parallel-size 2"),
    ],
)
def test_what_tensorrt_llm_cannot_do_with_a_store_is_refused(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        trtllm(*words)
    assert STORE_FLAGS in str(refused.value)
    assert refused.value.hint
    assert not trtllm(*words, store=False).store


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--kv-host", "64MiB"), "--kv-host 64MiB"),
        (("--kv-disk", "/d:1GiB", "--kv-object", "s3://b/p"), "--kv-disk /d:1GiB, --kv-object s3://b/p"),
        (("--kv-socket", "/run/kv.sock"), "--kv-socket /run/kv.sock"),
    ],
)
def test_no_store_for_servers_that_run_already(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--attach", "http://127.0.0.1:1", *words]) == 2
    assert f"{named} does not go with --attach http://127.0.0.1:1" in capsys.readouterr().err
