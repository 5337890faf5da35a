"""Flags of `vllm serve` that are its engine's, by name, as vLLM 0.32.0 has them. Needs no vLLM."""

_LONG = """
    additional-config aggregate-engine-logging all2all-backend allow-deprecated-quantization
    allowed-local-media-path allowed-media-domains async-scheduling attention-backend attention-config
    aux-output-config code-revision collect-detailed-traces compilation-config config-format convert
    cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-gb cpu-offload-params
    cudagraph-capture-sizes cudagraph-metrics custom-histogram-buckets data-parallel-address data-parallel-backend
    data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb data-parallel-rank
    data-parallel-rpc-port data-parallel-size data-parallel-size-local data-parallel-start-rank
    dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size
    dcp-q-replicate decode-context-parallel-size default-mm-loras device-ids device-memory-utilization
    diffusion-config disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce
    disable-hybrid-kv-cache-manager disable-log-stats disable-nccl-for-dp-synchronization disable-sliding-window
    distributed-executor-backend distributed-timeout-seconds download-dir dp-sync-interval ec-manager-config
    ec-transfer-config elastic-ep-max-dp-size enable-batch-sharded-sampling enable-chunked-prefill
    enable-cumem-allocator enable-dbo enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel
    enable-fault-tolerance enable-flashinfer-autotune enable-hc-sp enable-layerwise-nvtx-tracing enable-log-requests
    enable-logging-iteration-details enable-lora enable-mamba-cache-stochastic-rounding
    enable-mamba-shared-prefix-checkpoint enable-mfu-metrics enable-mixed-moe-lora-format enable-mm-embeds
    enable-moe-shared-loras enable-nccl-comm-suspend enable-prefix-caching enable-prompt-embeds
    enable-return-routed-experts enable-shm-tensor-arena enable-sleep-mode enable-tower-connector-lora
    enable-trace-replay enforce-eager engram-config eplb-config expert-placement-strategy fail-on-environ-validation
    fault-tolerance-config fully-sharded-loras gdn-prefill-backend generation-config gpu-memory-utilization
    hf-config-path hf-overrides hf-token ignore-patterns interleave-mm-strings io-processor-plugin ir-op-priority
    jit-monitor-mode jit-monitor-verbose kda-decode-backend kda-prefill-backend kernel-config kv-cache-dtype
    kv-cache-dtype-skip-layers kv-cache-memory-bytes kv-cache-metrics kv-cache-metrics-sample kv-events-config
    kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill kv-transfer-config language-model-only
    limit-mm-per-prompt linear-backend load-format log-level logging-config logits-processors logprobs-mode
    long-prefill-token-threshold long-prefill-token-threshold-adaptive lora-dtype lora-target-modules mamba-backend
    mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype
    mamba-ssu-algorithm master-addr master-port max-cpu-loras max-cudagraph-capture-size max-logprobs
    max-lora-cls-labels max-lora-rank max-loras max-num-active-seqs max-num-queued-reqs max-num-queued-tokens
    max-num-scheduled-tokens max-parallel-loading-workers media-io-kwargs mm-device-do-normalize
    mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin
    mm-encoder-fp8-scale-save-path mm-encoder-only mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb
    mm-processor-cache-gb mm-processor-cache-type mm-processor-device mm-processor-kwargs
    mm-shm-cache-max-object-size-mb mm-tensor-ipc model-class-overrides model-impl model-loader-extra-config
    moe-backend nnodes node-rank num-gpu-blocks-override numa-bind numa-bind-cpus numa-bind-nodes offload-backend
    offload-group-size offload-num-in-group offload-params offload-prefetch-step optimization-level
    otlp-traces-endpoint override-generation-config per-request-spec-decode-metrics performance-mode
    pipeline-parallel-size pooler-config prefill-context-parallel-size prefill-schedule-interval
    prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit profiler-config pt-load-map-location
    quantization quantization-config ray-workers-use-nsight reasoning-config reasoning-parser-plugin
    renderer-num-workers replayssm-buffer-len return-sampling-mask revision runner safetensors-load-strategy
    safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduler-cls scheduler-reserve-full-isl
    scheduling-policy seed show-hidden-metrics-for-version shutdown-timeout skip-mm-profiling skip-tokenizer-init
    sleep-mode-offload-cudagraph sleep-preserve-parameter-names sparse-indexer-topk-backend spec-method spec-model
    spec-tokens specialize-active-lora speculative-config stream-interval structured-outputs-config
    swa-bounded-replay tensor-parallel-size tokenizer-mode tokenizer-revision trust-remote-code ubatch-size
    use-fp64-gumbel use-replayssm use-tqdm-on-load video-pruning-method video-pruning-rate watermark
    watermark-config weight-transfer-config worker-cls worker-extension-cls
"""
_SHORT = "ac asc cc dc dcp dp dpa dpb dpe dph dpl dpm dpn dpp dpr ep n pcp pp q r sc tp"
_LEVEL = "-O"
"""Its value may be written to it, as in `-O3`."""

ENGINE_FLAGS = frozenset([*(f"--{name}" for name in _LONG.split()), *(f"-{name}" for name in _SHORT.split()), _LEVEL])


def is_engine_flag(flag: str) -> bool:
    """With dashes; also one that is switched off (`--no-...`), and a member of a nested one (`--a-config.member`)."""
    name = flag.partition(".")[0]
    return bool(ENGINE_FLAGS & {name, name.replace("--no-", "--", 1)}) or name.startswith(_LEVEL)
