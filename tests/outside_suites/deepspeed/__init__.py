"""DeepSpeed's own tests."""

from __future__ import annotations

from tests.outside_suites.suite import CONFIG, INSIDE, PRIVATE, WORKS, Suite

_FILES = (
    "unit/runtime/half_precision/test_dynamic_loss_scale.py",
    "unit/runtime/half_precision/test_fp16.py",
    "unit/runtime/half_precision/test_zero_optim_overflow.py",
    "unit/runtime/activation_checkpointing/test_activation_checkpointing.py",
    "unit/runtime/activation_checkpointing/test_activation_checkpointing_non_reentrant.py",
    "unit/runtime/sparse_tensor/test_averaging_sparse_gradients.py",
    "unit/runtime/sparse_tensor/test_sparse_grads.py",
    "unit/runtime/test_autocast.py",
    "unit/runtime/test_data.py",
    "unit/runtime/test_ds_config_dict.py",
    "unit/runtime/test_ds_config_model.py",
    "unit/runtime/test_ds_initialize.py",
    "unit/runtime/test_lr_schedulers.py",
    "unit/runtime/test_multi_output_model.py",
    "unit/runtime/test_multiple_models.py",
    "unit/runtime/test_mup_optimizers.py",
    "unit/runtime/test_no_sync_ctxt.py",
    "unit/runtime/test_pld.py",
    "unit/runtime/test_precision_config_dynamic_scale.py",
    "unit/runtime/test_precision_config_loss_scale.py",
    "unit/runtime/test_runtime_utils.py",
    "unit/runtime/zero/test_ignore_unused_parameters.py",
    "unit/runtime/zero/test_nvme_checkpointing.py",
    "unit/runtime/zero/test_unwrap_model.py",
    "unit/runtime/zero/test_zero_allreduce_fetch_params.py",
    "unit/runtime/zero/test_zero_autocast_mixed_dtype.py",
    "unit/runtime/zero/test_zero_config.py",
    "unit/runtime/zero/test_zero_context.py",
    "unit/runtime/zero/test_zero_context_ancestry.py",
    "unit/runtime/zero/test_zero_context_return.py",
    "unit/runtime/zero/test_zero_dynamic_class.py",
    "unit/runtime/zero/test_zero_grad_clip.py",
    "unit/runtime/zero/test_zero_hook_attribute_delegation.py",
    "unit/runtime/zero/test_zero_late_module_attach.py",
    "unit/runtime/zero/test_zero_leaf_module.py",
    "unit/runtime/zero/test_zero_linear_direct_init.py",
    "unit/runtime/zero/test_zero_nesting_init.py",
    "unit/runtime/zero/test_zero_tensor_fragment.py",
    "unit/runtime/zero/test_zero_tiled.py",
    "unit/checkpoint/test_latest_checkpoint.py",
    "unit/checkpoint/test_lr_scheduler.py",
    "unit/checkpoint/test_other_optimizer.py",
    "unit/checkpoint/test_shared_weights.py",
    "unit/checkpoint/test_sparse.py",
    "unit/checkpoint/test_tag_validation.py",
    "unit/checkpoint/test_zero_optimizer.py",
    "unit/v1/half_precision/test_bf16.py",
    "unit/v1/half_precision/test_gradient_clipping_default.py",
    "unit/v1/half_precision/test_mixed_precision_dtype.py",
    "unit/v1/half_precision/test_with_autocast.py",
    "unit/v1/test_engine_log_level.py",
    "unit/v1/zero/test_offload_states.py",
    "unit/v1/zero/test_stage2_flatten_on_gpu.py",
    "unit/v1/zero/test_zero.py",
    "unit/v1/zero/test_zero2_offload_multi_backward.py",
    "unit/v1/zero/test_zero_activation_checkpoint_lifecycle.py",
    "unit/v1/zero/test_zero_autocast.py",
    "unit/v1/zero/test_zero_coalesce_grad_reduction.py",
    "unit/v1/zero/test_zero_cpu_offload_grad_accum.py",
    "unit/v1/zero/test_zero_functorch_linear.py",
    "unit/v1/zero/test_zero_hook_count_regression.py",
    "unit/v1/zero/test_zero_init_pg_contradiction.py",
    "unit/v1/zero/test_zero_torch_func.py",
    "unit/v1/zero/test_zero_user_backward.py",
    "unit/utils/test_init_on_device.py",
    "unit/utils/test_nvtx.py",
    "unit/ops/adam/test_adamw.py",
    "unit/ops/lion/test_lion.py",
    "unit/comm/test_dist.py",
)

_OPTIMIZER = "The engine refuses this optimizer: it mixes elements of parameters, or runs another optimizer."
_GROUPS = "The engine refuses a parameter that is in two groups of the optimizer."
_LATER = "The engine refuses parameters that come into the model after initialize."
_SECOND = "The engine refuses a second engine that trains the same model."
_ATTRIBUTE = (
    "The engine has no timers and no log level of DeepSpeed's; Python's logging and the profiler take their place."
)
_FP32 = "The engine keeps main weights, states and sums of gradients in fp32, where DeepSpeed has 16 bits."
_SPARSE = "The engine makes gradients of sparse embeddings dense."
_INIT = "zero.Init and GatheredParameters leave parameters as they are, where DeepSpeed empties them."
_PYTEST = "The fixtures for several processes in DeepSpeed's harness are not found by a current pytest."

_OF_MESSAGES = (
    (r"PrivateNameError: [\w.]+", PRIVATE),
    (r"there is no deepspeed\.[\w.]+ here", PRIVATE),
    (r"module '(?:deepspeed|infinity)[\w.]*' has no attribute '\w+'", PRIVATE),
    (r"has no attribute '_\w+'", PRIVATE),
    (r"It cannot be imported: .*No module named 'accelerator\.", PRIVATE),
    (
        r"single_partition_of_fp32_groups|averaged_gradients|fp32_partitioned_groups_flat|bit16_groups\w*|ds_tensor|"
        r"Flattening param group|forward_hooks|pre_bwd_fn|leaf_parameters|ds_persist|nccl_start_alignment_factor|fp16_groups|"
        r"accumulated_grads_in_cpu|ds_active_sub_modules|zero3_linear_wrap|ZeRORuntimeException",
        INSIDE,
    ),
    (r"isinstance\(Paged[\s\S]*?, (BF16_Optimizer|FP16_\w+|DeepSpeedZeroOptimizer\w*)\)", INSIDE),
    (r"OptimizerNotPageableError: optimizer \w+ cannot be paged", _OPTIMIZER),
    (r"attribute name must be string, not '_Unusable'", PRIVATE),
    (r"ModelError: trainable parameter", _GROUPS),
    (r"ConfigError: config key '[\w.]+'", CONFIG),
    (r"ConfigError: unknown config key '[\w.]+'", CONFIG),
    (r"config key '(scheduler.params.warmup_type)' = 'not_a_warmup_type': unknown", CONFIG),
    (r"'Engine' object has no attribute '(tput_timer|log_level)'", _ATTRIBUTE),
    (r"trainable parameters came into the model after infinity.initialize", _LATER),
    (r"fixture 'distributed_fixture' not found", _PYTEST),
    (r"'types.SimpleNamespace' object has no attribute", INSIDE),
)

_OF_TESTS = (
    (r"test_multiple_models\.py.*(-True-\d|\[True-\d)\]", PRIVATE),  # _backward_epilogue
    (r"test_autocast\.py::test_get_autocast_decorators", PRIVATE),
    (r"test_dist\.py::TestDistInit", WORKS),
    (r"test_unmanaged_rejects_overlap_comm", WORKS),
    (r"test_existing_no_sync_still_blocked_for_zero2", WORKS),
    (r"TestZero0DirectBackwardStillRaises", WORKS),
    (r"test_pipeline_parallelism_rejected", PRIVATE),
    (r"test_idempotent_on_already_injected_modules", PRIVATE),
    (r"TestZero3ParamPartitioningLargeParam", INSIDE),
    (r"TestIncorectAllgatherBucketSize", WORKS),
    (r"TestStage2IgnoreUnusedParameters", WORKS),
    (r"test_sum_gradient_allreduce_rejects", WORKS),
    (r"test_load_immediate_save|test_checkpoint_unfused_optimizer", _SECOND),
    (r"bf16_opt_states", _FP32),
    (r"test_non_strict_load_sparse", _SPARSE),
    (r"test_zero_user_backward\.py.*::test_\w*grad\w*_accumulation\w*\[", _FP32),
    (r"TestZeroAllowUntestedOptimizer", WORKS),
    (r"test_no_sync_ctxt\.py.*test_zero_stage\[[23]-", WORKS),
    (r"TestOptimizerImplementation", WORKS),
    (r"TestBF16OptimizerStatesOffloadValidation", WORKS),
    (r"test_no_grad_input_error", WORKS),
    (r"TestGatheredParametersAllRanksErrorOnModification", WORKS),
    (
        r"test_zero_context\w*\.py::(TestSerialContext|TestZeroGatheredParametersFree|TestSerialParamInit|"
        r"TestScatterGather|TestGatherUpdate)|"
        r"test_zero_nesting_init\.py|test_zero_dynamic_class\.py|test_zero_linear_direct_init\.py",
        _INIT,
    ),
    (r"test_engine_log_level\.py", _ATTRIBUTE),
)

SUITE = Suite(
    "deepspeed",
    "https://github.com/deepspeedai/DeepSpeed",
    "edaa7221267243c7be7fb49c5d5f5c4fb97b4641",  # August 2026: after 0.19.5
    _FILES,
    _OF_MESSAGES,
    _OF_TESTS,
    needs=("hjson", "mup"),
)
