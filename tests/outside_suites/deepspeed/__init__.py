"""DeepSpeed's own tests."""

from __future__ import annotations

from tests.outside_suites.suite import CONFIG, INSIDE, PRIVATE, WORKS, Suite

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
    _OF_MESSAGES,
    _OF_TESTS,
    needs=("hjson", "mup"),
)
