"""What may change in vLLM's modules and is not a model's own, each by its name and with the reason why.

``SOURCE`` judges what ``inventory`` finds in vLLM's source, 0.26 and 0.32. A version without one of them skips it.
"""

_PROCESS = "made once for the process, and the same for every model (compatibility refuses those that want another)"
_PASSING = "set and put back within one call, or set anew before each use"
_REGISTERED = "filled by imports and plugins, with the same whoever comes first"
_DEVICE = "a fact about the device or its libraries"
_COMPILED = "compiled code, by everything that it depends on"
_CONSTANT = "numbers that hang on their key alone; none is replaced by another"
_SCRATCH = "scratch memory outside of graphs, asked for again at each call"
_LOOKS = "what was logged or measured"
_PATHS = "an answer about a file or a text, by its name"
_CALLER = "of the caller's process, where each model has its own frontend"

_KERNELS = "vllm.model_executor.kernels.linear"
_FLYDSL = "vllm.v1.attention.ops.flydsl_turboquant_decode"
_ULTRA = "vllm.v1.attention.ops.flydsl_ultraquant_decode"
_DEEP_GEMM = "vllm.utils.deep_gemm"
_BATCH_32 = "vllm.model_executor.determinism.batch_invariant"
_BATCH_26 = "vllm.model_executor.layers.batch_invariant"
_PARALLEL = "vllm.distributed.parallel_state"
_NCCL = "vllm.distributed.device_communicators.pynccl_allocator"
_STANDBY = "vllm.distributed.elastic_ep.standby_state"
_SYNC = "vllm.utils.gpu_sync_debug"
_JIT = "vllm.utils.jit_monitor"
_HELION = "vllm.kernels.helion.ops"
_KIMI = "vllm.models.kimi_k3.nvidia.ops.cute_dsl.latent_moe_tail"

_BY_REASON: dict[str, dict[str, tuple[str, ...]]] = {
    _PROCESS: {
        _PARALLEL: (
            *("_DCP", "_DP", "_ENGRAM_DP", "_EP", "_EPLB", "_ETP", "_INNER_DP_WORLD", "_NODE_COUNT", "_PCP", "_PP"),
            *("_TP", "_WORLD", "_ENABLE_CUSTOM_ALL_REDUCE", "_groups", "_group_name_counter"),
        ),
        _STANDBY: ("_STANDBY_DP", "_STANDBY_EP", "_STANDBY_EPLB", "_STANDBY_WORLD", "_STANDBY_WORLD_NODE_COUNT"),
        _NCCL: (
            *("_allocator", "_allocator_wrapper", "_cached_pool_snapshot", "_graph_pool_id", "_mem_pool"),
            *("_nccl_allocator_failed_to_compile", "_registered_base_addrs"),
        ),
        _BATCH_32: (
            *("_BLOCK_SIZES_RESOLVED", "_NUM_SMS", "_batch_invariant_LIB", "_batch_invariant_MODE"),
            *("_fp16_block_size_n", "_fp32_block_size_n", "_fp32_num_stages"),
        ),
        _BATCH_26: ("_batch_invariant_LIB", "_batch_invariant_MODE", "_fp16_block_size_n"),
        "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_integration.utils": ("_config_instance",),
        "vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding.store_client": ("_UNSAFE_CLIENTS",),
        "vllm.platforms.interface": ("_assigned_physical_gpu_ids",),
        "vllm.platforms": ("_current_platform", "_init_trace"),
        "vllm.plugins": ("plugins_loaded",),
        "vllm.v1.core.kv_cache_utils": ("NONE_HASH", "_NONE_HASH_SEED"),  # see vllm_core.keeping_none_hash
        "vllm.v1.utils": ("_PROFILER_FUNC",),
        "vllm.lora.layers.utils": ("_lora_aux_cuda_stream",),
        "vllm.utils.torch_utils": ("_aux_stream",),
        "vllm.lora.utils": ("_GLOBAL_LORA_ID",),
        "vllm.utils.nccl": ("_unpinned_env",),
    },
    _PASSING: {
        "vllm.compilation.backends": ("compilation_start_time", "model_is_encoder", "model_tag"),
        "vllm.compilation.monitor": ("cudagraph_capturing_enabled", "torch_compile_start_time"),
        "vllm.compilation.passes.inductor_pass": ("_pass_context",),
        "vllm.compilation.compiler_interface": ("_last_inductor_triton_cache_dir",),  # with held.ENVIRONMENT
        "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_integration.vllm_v1_adapter": ("tmp_disagg_tracker",),
        "vllm.model_executor.layers.fused_moe": ("_config",),
        "vllm.model_executor.layers.mamba.ops.mamba_ssm": ("_ssm_config_override",),
        "vllm.model_executor.model_loader.reload.layerwise": ("LAYERWISE_INFO", "LOADING_LAYERS"),
        "vllm.v1.worker.gpu.buffer_utils": ("_DEFAULT_MAX_CONCURRENCY",),
        "vllm.v1.worker.ubatching": ("_CURRENT_CONTEXTS", "_NUM_UBATCHES", "_THREAD_ID_TO_CONTEXT"),
        "vllm.v1.kv_cache_spec_registry": ("_REGISTRY_KVCACHESPEC_LIST", "_REGISTRY_ROLE_MANAGERS"),
    },
    _REGISTERED: {
        "vllm._aiter_ops": ("_OPS_REGISTERED",),
        "vllm._xpu_ops": ("_OPS_REGISTERED",),
        "vllm.config.model": ("_REGISTERED_MODEL_CLASS_OVERRIDES",),
        "vllm.env_override": ("_constrain_to_fx_strides_patched",),
        "vllm.distributed.device_communicators.pynccl": ("_NCCL_SYMM_OPS_REGISTERED",),
        "vllm.kernels.helion.register": ("_REGISTERED_KERNELS",),
        "vllm.model_executor.custom_op": ("op_registry", "op_registry_oot"),
        "vllm.model_executor.hw_agnostic.custom_op": ("op_registry", "op_registry_oot"),
        _KERNELS: (
            *("_POSSIBLE_FP8_KERNELS", "_POSSIBLE_INT8_KERNELS", "_POSSIBLE_KERNELS", "_POSSIBLE_MXFP4_KERNELS"),
            *("_POSSIBLE_MXFP6_KERNELS", "_POSSIBLE_MXFP8_KERNELS", "_POSSIBLE_NVFP4_KERNELS"),
        ),
        "vllm.model_executor.layers.linear": ("WEIGHT_LOADER_V2_SUPPORTED",),
        "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention": ("_CPU_GDN_ATTENTION_OPS_REGISTERED",),
        "vllm.model_executor.layers.quantization": ("QUANTIZATION_METHODS", "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG"),
        "vllm.model_executor.layers.quantization.inc.schemes.inc_ark_ops": ("_OPS_REGISTERED",),
        "vllm.model_executor.model_loader": ("_LOAD_FORMAT_TO_MODEL_LOADER",),
        "vllm.model_executor.models.transformers.utils": ("_rebased_embedding_classes",),
        "vllm.model_executor.warmup.cutedsl_warmup": ("_CUTEDSL_WARMUP_PROVIDERS",),
        "vllm.scalar_type": ("_SCALAR_TYPES_ID_MAP",),
        "vllm.tool_parsers.structural_tag_registry": (
            *("_BUILTIN_TOOL_STRUCTURAL_TAG_MODELS", "_VLLM_STRUCTURAL_TAG_REGISTRY"),
        ),
        "vllm.transformers_utils.chat_templates.registry": ("_MODEL_TYPE_TO_CHAT_TEMPLATE_FALLBACK",),
        "vllm.transformers_utils.config": ("_CONFIG_FORMAT_TO_CONFIG_PARSER",),
        "vllm.transformers_utils.configs.speculators.algos": ("SUPPORTED_SPECULATORS_TYPES",),
        "vllm.triton_utils.dispatcher": ("_registry",),
        "vllm.triton_utils.force_first_config": ("_installed",),
        "vllm.utils.humming": ("_patched",),
        "vllm.v1.attention.backends.mla.prefill.registry": ("_MLA_PREFILL_OVERRIDES",),
        "vllm.v1.attention.backends.registry": ("_ATTN_OVERRIDES", "_MAMBA_ATTN_OVERRIDES"),
        "vllm.v1.metrics.perf": ("_COMPONENT_METRICS_REGISTRY",),
    },
    _DEVICE: {
        "vllm._aiter_ops": (
            *("_AITER_HAS_FUSED_QK_RMSNORM", "_AITER_MLA_SUPPORTS_FP8", "_HIPB_MM_INITIALIZED_DEVICES"),
            "_HIP_RUNTIME_HANDLE",
        ),
        "vllm.distributed.device_communicators.all_reduce_utils": ("_gpu_p2p_access_cache",),
        "vllm.model_executor.determinism.batch_invariant_configs": (
            *("_TUNED_MATMUL_CONFIGS_FOR_DEVICE", "_TUNED_MATMUL_CONFIGS_RESOLVED"),
        ),
        "vllm.model_executor.kernels.linear.cute_dsl.ll_bf16": ("_cute_ctx", "_cutedsl_available"),
        "vllm.model_executor.kernels.linear.cute_dsl.skinny_gemm": ("_cutedsl_available",),
        "vllm.model_executor.kernels.mhc.tilelang_kernels": ("T",),
        "vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm": ("_TD_ALLOCATOR_DEVICES",),
        "vllm.model_executor.layers.quantization.utils.mxfp8_utils": ("_MXFP8_QUANT_KERNEL",),
        "vllm.models.minimax_m3.amd.ops.sparse_attn": ("_SPARSE_ATTN_PREFILL_KWARG",),
        "vllm.tilelang_utils": ("T", "tilelang"),
        _DEEP_GEMM: (
            *("_bf16_mega_gate_impl", "_cublaslt_gemm_nt_impl", "_fp8_einsum_impl", "_fp8_fp4_mqa_logits_impl"),
            *("_fp8_fp4_paged_mqa_logits_impl", "_fp8_fp4_paged_sparse_mqa_logits_impl"),
            *("_fp8_fp4_sparse_mqa_logits_impl", "_fp8_gemm_nt_impl"),
            "_get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor_impl",
            "_get_mk_alignment_for_contiguous_layout_impl",
            "_get_mn_major_tma_aligned_packed_ue8m0_tensor_impl",
            *("_get_mn_major_tma_aligned_tensor_impl", "_get_paged_mqa_logits_metadata_impl"),
            *("_get_paged_sparse_mqa_logits_metadata_impl", "_get_sparse_mqa_logits_metadata_impl"),
            "_get_theoretical_mk_alignment_for_contiguous_layout_impl",
            *(
                "_grouped_fp4_impl",
                "_grouped_impl",
                "_grouped_masked_impl",
                "_mega_mhc_impl",
                "_pack_ue8m0_to_int_impl",
            ),
            *("_tf32_hc_prenorm_gemm_impl", "_transform_sf_into_required_layout_impl"),
        ),
        _FLYDSL: (
            *("_CC", "_FLYC", "_FLYDSL_AVAILABLE", "_FX", "_HW_TR_CACHED", "_IR", "_TQ_MOD", "_TQ_MOD_GQA6"),
            "_TYPING_T",
        ),
        _ULTRA: ("_CC", "_FLYC", "_FLYDSL_AVAILABLE", "_FX", "_IR", "_TYPING_T", "_ULTRAQUANT_MOD"),
        "vllm.v1.attention.ops.flydsl_kernels.tq_decode": ("allocator",),
        "vllm.v1.attention.ops.flydsl_kernels.tq_decode_gqa6": ("allocator",),
        "vllm.v1.attention.ops.int4_per_token_head": ("_HADACORE_AVAILABLE",),
        "vllm.v1.attention.ops.triton_turboquant_decode": ("_FP8_E4B15",),
        "vllm.v1.attention.ops.turboquant_soa.triton_turboquant_decode": ("_FP8_E4B15",),
        "vllm.v1.simple_kv_offload.cuda_mem_ops": ("_batch_memcpy", "_batch_memcpy_fn", "_max_batch_descriptors"),
    },
    _COMPILED: {
        **{
            f"{_HELION}.{name}": ("_pick_cache",)
            for name in (
                *("dynamic_per_token_scaled_fp8_quant", "fused_qk_norm_rope", "per_token_group_fp8_quant"),
                *("rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant", "silu_and_mul_per_block_quant"),
                "silu_mul_fp8",
            )
        },
        "vllm.model_executor.layers.fused_moe.fused_flydsl_moe": (
            *("_FLYDSL_MOE_GEMM1_CACHE", "_FLYDSL_MOE_GEMM2_CACHE"),
        ),
        "vllm.model_executor.warmup.deep_gemm_warmup": (
            *("FP8_GEMM_NT_WARMUP_CACHE", "GROUPED_FP8_GEMM_NT_CONTIGUOUS_WARMUP_CACHE"),
        ),
        "vllm.model_executor.warmup.rocm_segmented_attn_autotune_warmup": ("_TABLES",),
        f"{_KIMI}.allreduce_rmsnorm_reduce_scatter_early_exit": ("_COMPILED",),
        f"{_KIMI}.fused_add_multicast_gemm": ("_COMPILED",),
        f"{_KIMI}.fused_add_multicast_skinny_gemm": ("_COMPILED",),
        _FLYDSL: ("_KERN_CACHE",),
        _ULTRA: ("_KERN_CACHE",),
    },
    _CONSTANT: {
        "vllm.model_executor.kernels.linear.mxfp8.rocm_block32_gemm": ("_split_counters_by_stream",),
        "vllm.model_executor.layers.fused_moe.experts.rocm_aiter_moe": ("aiter_topK_meta_data",),
        "vllm.models.deepseek_v32.common.kernels": ("_DUMMY_CACHE",),
        "vllm.models.deepseek_v32.nvidia.kernels": ("_DUMMY_CACHE",),
        "vllm.transformers_utils.processors.inkling": ("_MEL_BASIS_CACHE",),
        "vllm.transformers_utils.processors.mimo_v2_omni": ("_mean_std_cache",),
        _ULTRA: ("_FP4_LUT_CACHE", "_QPERM_CACHE"),
        "vllm.v1.attention.ops.int4_per_token_head": ("_HADAMARD_MATRIX_CACHE", "_RHT_SIGNS_CACHE"),
        "vllm.v1.attention.ops.triton_turboquant_decode": ("_layout_cache",),
        "vllm.v1.attention.ops.turboquant_soa.triton_turboquant_decode": ("_layout_cache",),
        "vllm.v1.attention.ops.turboquant_soa.triton_turboquant_decode_v2": ("_layout_cache",),
        "vllm.v1.attention.ops.turboquant_soa.triton_turboquant_unified_attention": ("_layout_cache",),
        "vllm.v1.attention.ops.ultraquant.reference": (
            *("_HADAMARD_CACHE", "_LEVELS_CACHE", "_MIDPOINTS_CACHE", "_SORTED_TO_BITS_CACHE"),
        ),
        "vllm.v1.attention.ops.ultraquant.triton_dequant": ("_FP4_DECODE_CACHE",),
        "vllm.v1.attention.ops.ultraquant.triton_store": (
            *("_MIDPOINTS_C", "_MIDPOINTS_CACHE", "_PIT_CACHE", "_SORTED_TO_BITS_CACHE"),
        ),
        "vllm.v1.attention.ops.ultraquant.triton_unified_attention": ("_HADAMARD_CACHE",),
    },
    _SCRATCH: {
        "vllm.v1.sample.ops.topk_topp_triton": ("_TRITON_BUFFER_CACHE", "_TRITON_SPLIT_CACHE", "_TRITON_TABLE_CACHE"),
    },
    _LOOKS: {
        "vllm.forward_context": ("batchsize_logging_interval", "forward_start_time", "last_logging_time"),
        "vllm.logger": ("_last_configured_logging_config", "_vllm_process_info"),
        "vllm.model_executor.layers.fused_moe.utils": ("_warned_moe_use_td_ineffective",),
        _SYNC: (
            *("_GPU_SYNC_ALLOWED_FIRST_SEEN", "_arm_count", "_compile_time_suppressors_installed"),
            *("_copy_checkers_installed", "_prev_showwarning", "_saved_sync_debug_mode", "_sync_check_enabled"),
            "_sync_filter_head",
        ),
        _JIT: (
            *("_active", "_cutedsl_hook_installed", "_mode", "_tilelang_hook_installed"),
            *("_tilelang_jitimpl_compile_depth", "_verbose"),
        ),
        "vllm.usage.usage_lib": ("_GLOBAL_RUNTIME_DATA", "_USAGE_STATS_ENABLED"),
        "vllm.v1.metrics.prometheus": ("_prometheus_multiproc_dir",),
        _FLYDSL: ("_GET_KERNEL_STATS", "_LOG_INVOKED_ONCE", "_LOG_NORM_WARNED", "_LOG_SINKS_WARNED"),
        _ULTRA: ("_GET_KERNEL_STATS", "_LOG_INVOKED_ONCE"),
    },
    _PATHS: {
        "vllm.model_executor.model_loader.utils": ("_MODEL_ARCH_BY_HASH",),
        "vllm.model_executor.models.interfaces": ("_language_model_by_module",),  # weak keys
        "vllm.model_executor.models.llava_onevision2": ("_CODEC_FPS_CACHE",),
        "vllm.transformers_utils.repo_utils": ("_hf_api",),
    },
    _CALLER: {
        "vllm.multimodal.gpu_ipc_memory": ("_GLOBAL_POOL",),
        "vllm.parser.metrics": ("_model_name", "_tool_call_parser_invocations"),
        "vllm.renderers.hf": (
            *("_CONTENT_FORMATS", "_PROCESSOR_CHAT_TEMPLATES", "_PROMPT_EMBEDS_PLACEHOLDER_TOKEN_ID_CACHE"),
        ),
    },
}
SOURCE: dict[str, str] = {
    f"{module}:{name}": reason
    for reason, modules in _BY_REASON.items()
    for module, names in modules.items()
    for name in names
}

_HELD = "held: each model finds its own again, as tests of ``held`` show; another object may stand there"
_EXPERTS = "made by the first mixture of experts, as vLLM makes it at the start where that model is the first"
_DERIVED = "a class made of another one, by that one"
_ARGUMENTS = "the names of a kernel's arguments"
_ATTENTION = "vllm.model_executor.layers.attention"
_BOTH = {
    "vllm.config.cache:_layout_from_name": "the layout of that name",
    "vllm.logger:_print_debug_once": _LOOKS,
    "vllm.logger:_print_info_once": _LOOKS,
    "vllm.logger:_print_warning_once": _LOOKS,
    "vllm.transformers_utils.config:get_sentence_transformer_tokenizer_config": _PATHS,
    "vllm.utils.func_utils:_supports_kw": "which arguments a function takes, by the function",
    "vllm.transformers_utils.config:try_get_dense_modules": _PATHS,
    "vllm.transformers_utils.repo_utils:list_repo_files": _PATHS,
    "vllm.tokenizers.registry:cached_get_tokenizer": _PATHS,
    "vllm.tokenizers.registry:cached_resolve_tokenizer_args": _PATHS,
    "vllm.transformers_utils.processor:cached_get_processor": _PATHS,
    "vllm.transformers_utils.processor:get_processor_kwargs_type": _PATHS,
    "vllm.transformers_utils.processor:get_processor_kwargs_keys": _PATHS,
    "vllm.multimodal.processing.processor:cached_encode": _PATHS,
    "vllm.multimodal.processing.processor:_cached_encode": _PATHS,
    "vllm.multimodal.hasher:_get_hasher_factory": _REGISTERED,
    "vllm.model_executor.models.registry:_try_load_model_cls": _REGISTERED,
    "vllm.model_executor.models.registry:_try_inspect_model_cls": _REGISTERED,
    "vllm.model_executor.model_loader.utils:_MODEL_ARCH_BY_HASH": _PATHS,
    "vllm.model_executor.custom_op:op_registry": _REGISTERED,
    "vllm.model_executor.models.interfaces:_language_model_by_module": _PATHS,
}
RUNNING: dict[str, dict[str, str]] = {
    "worker": {
        **_BOTH,
        "torch.distributed:groups": _EXPERTS,
        "vllm.distributed.parallel_state:_EP": _EXPERTS,
        "vllm.distributed.parallel_state:_groups": _EXPERTS,
        "vllm.distributed.parallel_state:_group_name_counter": _EXPERTS,
        "vllm.model_executor.model_loader.reload.layerwise:LAYERWISE_INFO": "weak keys: gone with the layers",
        "vllm.v1.attention.selector:_cached_get_attn_backend": _HELD,
        "vllm.v1.attention.selector:_cached_get_mamba_attn_backend": _HELD,
        "vllm.utils.deep_gemm:is_deep_gemm_e8m0_used": _HELD,
        "vllm.utils.deep_gemm:is_deep_gemm_supported": _HELD,
        "vllm.v1.attention.backends.mla.prefill.selector:_auto_select_mla_prefill_backend": _HELD,
        f"{_ATTENTION}.cross_attention:create_cross_attention_backend": _DERIVED,
        f"{_ATTENTION}.encoder_only_attention:create_encoder_only_attention_backend": _DERIVED,
        "vllm.model_executor.warmup.jit_warmup_triton_helper:_launch_binding_plan": _ARGUMENTS,
        "vllm.v1.sample.rejection_sampler:_rejection_greedy_sample": _ARGUMENTS,
        "vllm.env_override:_constrain_to_fx_strides_patched": "torch's compiler mended, once and for every model",
        "vllm.utils.torch_utils:vllm_lib": _REGISTERED,  # operations, with the modules that define them
        "vllm.ir.op:IrOpImpl.uuid": "the hash of an implementation's source",
        "vllm.compilation.counter:compilation_counter": _LOOKS,
        "vllm.compilation.monitor:torch_compile_start_time": _LOOKS,
        "environ:NUMEXPR_MAX_THREADS": "each configuration says it; numexpr reads it, which vLLM does not use",
        "environ:_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR": _REGISTERED,
        "process:recursion": "raised by torch's compiler, and high enough for everyone",
    },
    "core": {
        **_BOTH,
        "vllm.v1.kv_cache_spec_registry:_REGISTRY_KVCACHESPEC_LIST": _PASSING,
    },
}
"""What ``detector`` sees change in a running process, by process and name."""
