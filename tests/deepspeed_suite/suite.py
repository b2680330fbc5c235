"""What DeepSpeed's tests are here, and what the outcome of one means: pure texts and rules.

A test is *not applicable* where it tests what is DeepSpeed's own affair: private names, what it skips itself on a CPU, and what
this engine does otherwise on purpose. Each such reason is a line of the tables below; whatever no line says is a failure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

REVISION = "edaa7221267243c7be7fb49c5d5f5c4fb97b4641"
"""Of https://github.com/deepspeedai/DeepSpeed, August 2026: after 0.19.5."""
RESULTS_VARIABLE = "DEEPSPEED_SUITE_RESULTS"
"""The environment variable that names the file for the results, a line of JSON for each test."""
FILES = (
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
"""Those that concern what this engine does; paths below DeepSpeed's folder ``tests``."""


class Outcome(NamedTuple):
    """Of one test: "passed", "failed" or "not applicable", and why."""

    status: str
    reason: str


_OF_MESSAGES = (
    (r"PrivateNameError: ([\w.]+)", "private: {}"),
    (r"there is no deepspeed\.([\w.]+) here", "private: {}"),
    (r"module '(?:deepspeed|infinity)([\w.]*)' has no attribute '(\w+)'", "private: {}.{}"),
    (r"has no attribute '(_\w+)'", "private: {}"),
    (
        r"(single_partition_of_fp32_groups|averaged_gradients|fp32_partitioned_groups_flat|bit16_groups\w*|ds_tensor|"
        r"Flattening param group|forward_hooks|pre_bwd_fn|leaf_parameters|ds_persist|nccl_start_alignment_factor|fp16_groups|"
        r"accumulated_grads_in_cpu|ds_active_sub_modules|zero3_linear_wrap|ZeRORuntimeException)",
        "private: looks at how DeepSpeed's engine is made ({})",
    ),
    (r"isinstance\(Paged[\s\S]*?, (BF16_Optimizer|FP16_\w+|DeepSpeedZeroOptimizer\w*)\)", "private: {}"),
    (
        r"OptimizerNotPageableError: optimizer (\w+) cannot be paged",
        "refused: {} mixes elements, or runs another optimizer",
    ),
    (r"attribute name must be string, not '_Unusable'", "private: runtime.torch_autocast"),
    (r"BatchSizeError: train_batch_size = 2 .* = 1 \* 1 \* 1 = 1", "needs two processes"),
    (r"ParameterGroupError: trainable parameter", "refused: a parameter in two groups"),
    (r"UnsupportedConfigError: config key '([\w.]+)'", "refused by the config: {}"),
    (r"UnknownConfigKeyError: unknown config key '([\w.]+)'", "refused by the config: {} is no key"),
    (r"config key '(scheduler.params.warmup_type)' = 'not_a_warmup_type': unknown", "refused by the config: {}"),
    (r"'Engine' object has no attribute '(tput_timer|log_level)'", "refused: engine.{}"),
    (r"trainable parameters came into the model after infinity.initialize", "refused: parameters that come later"),
    (r"'types.SimpleNamespace' object has no attribute", "private: runs a method of the engine on another object"),
)
"""A pattern in an error, and the reason, for a test that does not apply."""

_OF_TESTS = (
    (
        r"test_multiple_models\.py.*(-True-\d|\[True-\d)\]",
        "private: _backward_epilogue, after an unscaled loss.backward()",
    ),
    (r"test_autocast\.py::test_get_autocast_decorators", "private: runtime.zero.linear"),
    (
        r"test_dist\.py::(TestInit|TestDistArgs|TestGroupedDistTest|TestWorldSizeOverride|TestDistributedFixture)",
        "needs two processes",
    ),
    (r"test_dist\.py::TestDistInit", "works here: the group is made where it is needed"),
    (r"test_unmanaged_rejects_overlap_comm", "works here: overlap_comm without managed accumulation"),
    (r"test_existing_no_sync_still_blocked_for_zero2", "works here: no_sync with ZeRO 2 and 3"),
    (r"TestZero0DirectBackwardStillRaises", "works here: loss.backward() with ZeRO 0"),
    (r"test_pipeline_parallelism_rejected", "private: PipelineModule"),
    (r"test_idempotent_on_already_injected_modules", "private: runtime.zero.parameter_offload.ZeROOrderedDict"),
    (r"TestZero3ParamPartitioningLargeParam", "private: looks at how DeepSpeed's engine is made (ds_tensor)"),
    (r"test_save_before_accum_grad_is_done", "needs two processes"),
    (r"TestIncorectAllgatherBucketSize", "works here: buckets have no sizes"),
    (r"TestStage2IgnoreUnusedParameters", "works here: unused parameters"),
    (r"test_load_immediate_save|test_checkpoint_unfused_optimizer", "refused: a second engine for a model"),
    (r"bf16_opt_states", "otherwise here: main weights and states are fp32"),
    (r"test_non_strict_load_sparse", "otherwise here: gradients of sparse embeddings are dense"),
    (r"TestGradientAllreduceOp::.*-sum-", "needs two processes"),
    (
        r"test_zero_user_backward\.py.*::test_\w*grad\w*_accumulation\w*\[",
        "otherwise here: gradients of micro-batches are summed in fp32, not in bf16",
    ),
    (r"TestZeroAllowUntestedOptimizer", "works here: the optimizer is tried at the start"),
    (r"test_no_sync_ctxt\.py.*test_zero_stage\[[23]-", "works here: no_sync with ZeRO 2 and 3"),
    (r"TestOptimizerImplementation", "works here: these dtypes together"),
    (r"TestBF16OptimizerStatesOffloadValidation", "works here: main weights and states are fp32"),
    (r"test_no_grad_input_error", "works here: a leaf module whose inputs need no gradient"),
    (r"TestGatheredParametersAllRanksErrorOnModification", "works here: what is written while gathered is kept"),
    (r"test_checkpoint_unique_tag\[FAIL\]", "needs two processes"),
    (r"test_elastic_checkpoint_change_dp|TestZeROPPLoadCheckpoint", "needs four processes"),
    (
        r"test_zero_context\w*\.py::(TestSerialContext|TestZeroGatheredParametersFree|TestSerialParamInit|"
        r"TestScatterGather|TestGatherUpdate)|"
        r"test_zero_nesting_init\.py|test_zero_dynamic_class\.py|test_zero_linear_direct_init\.py",
        "otherwise here: zero.Init and GatheredParameters leave parameters as they are, where DeepSpeed empties them",
    ),
    (r"test_engine_log_level\.py", "otherwise here: log_level has no effect, Python's logging does it"),
)
"""A pattern in a test's name, and the reason, for a failing test that does not apply."""


def judge(test: str, outcome: str, message: str) -> Outcome:
    """What pytest's ``outcome`` of a test with this error message means."""
    first = message.strip().partition("\n")[0]
    if outcome == "passed":
        return Outcome("passed", "")
    if outcome == "skipped":
        return Outcome("not applicable", f"DeepSpeed skips it: {first.removeprefix('Skipped: ').strip()}")
    for pattern, reason in _OF_TESTS:
        if reason.startswith("works here") and not re.search("DID NOT RAISE|Expected .*[Ee]rror", message):
            continue  # it fails with something else than the error that is missing
        if re.search(pattern, test):
            return Outcome("not applicable", reason)
    for pattern, reason in _OF_MESSAGES:
        found = re.search(pattern, message)
        if found:
            return Outcome("not applicable", reason.format(*found.groups()))
    return Outcome("failed", " ".join(message.split())[:160])
