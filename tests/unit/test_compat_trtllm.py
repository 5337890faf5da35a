"""Command lines of `trtllm-serve`, translated."""

import json
from pathlib import Path

import pytest

from headwater.cli.engine_flags import config_from, parse_arguments
from headwater.cli.main import main
from headwater.cli.verbs import parser_of
from headwater.compat.translation import spelled
from headwater.compat.trtllm.command import TABLE, is_trtllm, translate
from headwater.config.schema import EngineConfig
from headwater.engines.trtllm.arguments import trtllm_arguments
from headwater.errors import ConfigError
from trtllm_llm import LLM

PASSED = {
    "--context_parallel_size": "2",
    "--cp_size": "2",
    "--cluster_size": "2",
    "--custom_tokenizer": "deepseek_v32",
    "--enable_attention_dp": None,
    "--enable_chunked_prefill": None,
    "--ep_size": "4",
    "--free_gpu_memory_fraction": "0.8",
    "--gpus_per_node": "8",
    "--kv_cache_dtype": "fp8",
    "--kv_cache_free_gpu_memory_fraction": "0.8",
    "--moe_cluster_parallel_size": "2",
    "--moe_expert_parallel_size": "4",
    "--otlp_traces_endpoint": "http://127.0.0.1:4317",
    "--pipeline_parallel_size": "2",
    "--pp_size": "2",
    "--trust_remote_code": None,
}
"""Flags of `trtllm-serve` that are arguments of `LLM`, with a value."""
_OTHERS = """
    --agent_percentage --agent_types --allow_request_chat_template --backend --chat_template --config
    --custom_module_dirs --disagg_cluster_uri --enable_visual_gen --extra_llm_api_options
    --fail_fast_on_attention_window_too_large --generation-config --grpc --hf_revision --host --log_level
    --max_batch_size --max_beam_width --max_num_tokens --max_seq_len --media_io_kwargs --metadata_server_config_file
    --middleware --no-telemetry --num_input_processor_workers --num_media_load_workers --num_postprocess_workers
    --num_serve_frontends --port --post_processor_hook --reasoning_parser --report_addr --revision --served_model_name
    --server_role --telemetry --tensor_parallel_size --tokenizer --tool_parser --tp_size --video_pruning_rate
    --visual_gen_args
"""
SERVE = _OTHERS.split()
"""All others: the published command line of 1.4."""


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ("trtllm-serve M", "headwater serve M --engine trtllm"),
        ("trtllm-serve serve M --port=1", "headwater serve M --engine trtllm --port 1"),
        ("/opt/bin/trtllm-serve --trust_remote_code M", "headwater serve M --engine trtllm --trust-remote-code"),
        (
            "python3 -m tensorrt_llm.commands.serve M --tp_size 2",
            "headwater serve M --engine trtllm --tensor-parallel-size 2",
        ),
        ("TLLM_LOG_LEVEL=x trtllm-serve M --log_level verbose", "headwater serve M --engine trtllm --log-level debug"),
        (
            "trtllm-serve M --max_batch_size 8 --max_num_tokens 512 --max_seq_len 4096 --backend pytorch",
            "headwater serve M --engine trtllm --max-num-seqs 8 --max-num-batched-tokens 512 --max-model-len 4096",
        ),
        (
            "trtllm-serve --kv_cache_free_gpu_memory_fraction 0.8 M --config options.yaml --tool_parser qwen3",
            "headwater serve M --engine trtllm --kv-cache-free-gpu-memory-fraction 0.8 "
            "--extra-llm-api-options options.yaml",
        ),
        (
            "trtllm-serve M --set kv_cache_config.dtype=fp8 --set moe_config.backend=CUTLASS --no-telemetry",
            "headwater serve M --engine trtllm --kv-cache-config.dtype fp8 --moe-config.backend CUTLASS "
            "--telemetry-config.disabled",
        ),
    ],
)
def test_lines(given: str, command: str) -> None:
    assert is_trtllm(given.split())
    found = translate(given.split())
    assert found.command == command
    assert found.complete


def test_every_flag_of_the_server_has_an_answer_and_every_answer_a_flag() -> None:
    assert [flag for flag in SERVE if TABLE.verdict_of(spelled(flag))[0] == "passed"] == []
    assert [flag for flag in PASSED if TABLE.verdict_of(spelled(flag))[0] != "passed"] == []
    of_1_3 = {"--extra-visual-gen-options"}
    assert set(TABLE.flags) == {spelled(flag) for flag in SERVE} | of_1_3
    assert all(TABLE.verdict_of(flag)[1] for flag in TABLE.flags if TABLE.verdict_of(flag)[0] != "same")


def test_what_is_passed_on_is_taken_by_llm() -> None:
    """And by Headwater's own parser before it, and every flag that was translated means something there."""
    for flag, value in PASSED.items():
        assert spelled(flag) in " ".join(engine_of(f"trtllm-serve M {flag} {value or ''}").engine_args), flag
    both = {"--cp_size", "--cluster_size", "--ep_size", "--free_gpu_memory_fraction", "--pp_size"}
    for flags in (PASSED.keys() - both, both):
        line = " ".join(f"{flag} {PASSED[flag] or ''}" for flag in sorted(flags))
        llm = LLM(**trtllm_arguments(engine_of(f"trtllm-serve M --no-telemetry {line}"), "M").llm)
        assert (llm.args.context_parallel_size, llm.args.pipeline_parallel_size) == (2, 2)
        assert (llm.args.moe_expert_parallel_size, llm.args.moe_cluster_parallel_size) == (4, 2)
        assert llm.args.kv_cache_config["free_gpu_memory_fraction"] == 0.8
        assert llm.args.telemetry_config == {"disabled": True}


def test_what_is_printed_is_what_headwater_takes() -> None:
    engine = engine_of(
        "trtllm-serve M --tp_size 2 --max_seq_len 4096 --max_batch_size 9 --hf_revision main --tokenizer T"
    )
    assert (engine.model, engine.engine, engine.tensor_parallel_size, engine.revision) == ("M", "trtllm", 2, "main")
    assert (engine.max_model_len, engine.max_num_seqs, engine.tokenizer) == (4096, 9, "T")


def engine_of(line: str) -> EngineConfig:
    _, verb, *arguments = translate(line.split()).command.split()
    return config_from(parse_arguments(parser_of(verb), arguments)).config.engine


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--backend", "_autodeploy"], "PyTorch backend"),
        (["--max_beam_width", "4"], "beam search"),
        (["--generation-config", "trtllm"], "generation_config.json"),
        (["--chat_template", "{{ messages }}"], "to a file"),
        (["--server_role", "CONTEXT"], "headwater worker --role prefill"),
        (["--media_io_kwargs", "{}"], "attach the server"),
        (["--grpc"], "HTTP"),
    ],
)
def test_what_has_no_equivalent_is_said(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "check", "--json", "--", "trtllm-serve", "M", *flags, "--pp_size", "2"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "headwater serve M --engine trtllm --pp-size 2"
    assert [flag["verdict"] for flag in document["flags"]] == ["none", "passed"]
    assert said in document["flags"][0]["note"]
    assert main(["compat", "check", "--", "trtllm-serve", "M", *flags]) == 1
    assert "no equivalent" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [["--backend", "pytorch"], ["--max_beam_width", "1"], ["--generation-config", "auto"]]
)
def test_what_is_so_anyway_needs_none(flags: list[str]) -> None:
    found = translate(["trtllm-serve", "M", *flags])
    assert (found.command, found.complete) == ("headwater serve M --engine trtllm", True)


@pytest.mark.parametrize(
    "flag",
    [
        "--allow_request_chat_template",
        "--enable_attention_dp",
        "--enable_chunked_prefill",
        "--enable_visual_gen",
        "--fail_fast_on_attention_window_too_large",
        "--grpc",
        "--no-telemetry",
        "--telemetry",
        "--trust_remote_code",
    ],
)
def test_the_model_may_follow_a_flag_without_a_value(flag: str) -> None:
    assert translate(["trtllm-serve", flag, "M"]).model == "M"


def test_an_engine_of_several_nodes_stays_where_it_is() -> None:
    found = translate(["mpirun", "-n", "2", "trtllm-llmapi-launch", "trtllm-serve", "M", "--tp_size", "16"])
    assert not found.complete
    assert found.flags[0].given == ["mpirun", "-n", "2", "trtllm-llmapi-launch"]
    assert "headwater serve --attach URL" in found.flags[0].note


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("trtllm-serve disaggregated -c disagg.yaml", "headwater worker --attach URL --role prefill"),
        ("trtllm-serve disaggregated_mpi_worker -c x", "--engine trtllm --role prefill"),
        ("trtllm-serve mm_embedding_serve M", "images"),
        ("trtllm-serve embeddings M", "embeddings are not offered"),
        ("trtllm-serve --port 1", "trtllm-serve MODEL"),
        ("trtllm-serve A --port 1 B", "trtllm-serve MODEL"),
        ("trtllm-serve", "trtllm-serve MODEL"),
    ],
)
def test_lines_that_start_no_engine(given: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        translate(given.split())
    assert hint in str(refused.value.hint)


def test_the_servers_words_are_known_in_the_worker_too(caplog: pytest.LogCaptureFixture) -> None:
    words = ("--hf_revision", "main", "--num_postprocess_workers", "4", "--num_serve_frontends", "2")
    llm = trtllm_arguments(EngineConfig(engine_args=words), "M").llm
    assert llm["revision"] == "main"
    assert not {"num_postprocess_workers", "num_serve_frontends"} & llm.keys()
    assert "num_postprocess_workers is for trtllm-serve" in caplog.text


def test_others_are_not_its(tmp_path: Path) -> None:
    assert not is_trtllm(["vllm", "serve", "M"])
    assert not is_trtllm(["sglang", "serve", "--model-path", str(tmp_path)])
