"""What of DeepSpeed's public names is another thing here, and what is not here: why, and the nearest thing.

Pure texts. What is there stands in ``infinity.deepspeed.modules``; ``tools/deepspeed_names.py`` prints both as the table of
``infinity/deepspeed/README.md``, and a test holds them against all names of DeepSpeed 0.19.8.
"""

from __future__ import annotations

_ENGINE = (
    "It is a part of DeepSpeed's engine. The nearest there is: runtime.engine.DeepSpeedEngine, which initialize returns"
)
_OPTIMIZER = "It is a part of DeepSpeed's engine. The nearest there is: the optimizer that initialize returns"
_CUT = "A model need not be cut into stages: pass it to initialize as it is, and use engine.train_batch"
_EVALUATES = "Without an optimizer, initialize gives an engine that evaluates: engine(...), engine.generate(...)"
_TENSORS = (
    "Layers are divided by the script, which says so by mpu= or mesh_param= of initialize. One that is too large for the device "
    "is paged, see zero.TiledLinear"
)
_LONG = "Sequences are not divided among processes. Activation checkpointing keeps long ones small, see checkpointing"
_FLOPS = "The nearest there is: profiling.flops_profiler.FlopsProfiler, whose count_of(module) has both"
_FILES = "engine.save_checkpoint, load_checkpoint and save_16bit_model need no conversion"
_CONFIG = "The nearest there is: infinity.load_config, which gives the whole config, checked"
_LAYER = "There is no such kernel. The nearest there is: torch.nn.TransformerEncoderLayer"
_LOADER = "The nearest there is: engine.deepspeed_io, or training_data= of initialize"
_MUON = (
    "With the config's Muon, initialize does it: matrices whose names have no 'embed' or 'lm_head' go by it, unless their "
    "attribute use_muon says something else"
)
_HEADS = "Matrices are orthogonalized as they are, with all heads. The nearest there is: a parameter for each head"
_BYTES = "The nearest there is: the package swapper, which moves bytes between memory and drives"
_COMPILE = "The nearest there is: engine.compile, block by block"
_GENERATES = "engine.generate works on the engine that trains"
_FRAGMENT = (
    "A main weight is no fragment of a flat tensor. The nearest there is: utils.safe_get_full_fp32_param and its kin"
)
_REPORT = "Exchanges are not counted. The nearest there is: engine.report, which has the time and bytes of each step"
_GROUPS = (
    "Groups are those of mpu= or mesh_param= of initialize. The nearest there is: utils.groups.get_data_parallel_group"
)

REFUSED = {
    "autotuning": "The engine plans for the machine by itself, and print(engine.plan) shows what",
    "checkpoint": _FILES,
    "compile": _COMPILE,
    "compression": "Compress the model before initialize, or after engine.close(restore_weights=True)",
    "datastates": _FILES,
    "elasticity": "A checkpoint loads with any number of processes, and under every config",
    "hybrid_engine": _GENERATES,
    "inference": _EVALUATES,
    "io": _BYTES,
    "launcher": "infinity launch starts torchrun on the hosts of a hostfile",
    "linear": "The nearest there is: PEFT's LoRA, whose frozen weights are paged",
    "model_implementations": _EVALUATES,
    "module_inject": _EVALUATES,
    "moe": "Experts in a ModuleList need no layer of its own: only those that a batch goes to are read",
    "monitor": "The nearest there is: monitor.monitor.MonitorMaster, or engine.monitor, which writes where the config says",
    "nvme": "The nearest there is: infinity profile, which measures the drives",
    "ops.aio": _BYTES,
    "ops.deepspeed4science": _LAYER,
    "ops.fp_quantizer": 'The nearest there is: "infinity": {"state_dtype": "bf16"} of the config',
    "ops.gds": _BYTES,
    "ops.op_builder": "Nothing is compiled. The nearest there is: ops.adam, ops.lamb, ops.lion and ops.adagrad",
    "ops.sparse_attention": _LAYER,
    "ops.transformer": _LAYER,
    "pipe": _CUT,
    "profiling": _FLOPS,
    "runtime.bf16_optimizer": _OPTIMIZER,
    "runtime.compiler": _COMPILE,
    "runtime.constants": _CONFIG,
    "runtime.data_pipeline": "Sort or filter the data set. The nearest there is: engine.deepspeed_io(data_sampler=...)",
    "runtime.fp16": 'The nearest there is: the block "fp16" of the config; optimizer.loss_scale, optimizer.overflow',
    "runtime.hybrid_engine": _GENERATES,
    "runtime.pipe": _CUT,
    "runtime.sequence_parallel": _LONG,
    "runtime.state_dict_factory": _FILES,
    "runtime.superoffload": _OPTIMIZER,
    "runtime.swap_tensor": _BYTES,
    "runtime.tensor_parallel": _TENSORS,
    "runtime.zenflow": _OPTIMIZER,
    "runtime.zero.linear": "The nearest there is: torch.nn.functional.linear, on paged weights",
    "runtime.zero.mics": "The config's mics_shard_size divides states within groups. The nearest there is: zero.Init",
    "runtime.zero.parameter_offload": _ENGINE,
    "sequence": _LONG,
    "tensor_parallel": _TENSORS,
    # ------------------------------------------------------------------------------------------- of the package itself
    "DeepSpeedDataLoader": _LOADER,
    "DeepSpeedHybridEngine": _GENERATES,
    "DeepSpeedInferenceConfig": _EVALUATES,
    "DeepSpeedTransformerConfig": _LAYER,
    "DeepSpeedTransformerLayer": _LAYER,
    "DualPipeVEngine": _CUT,
    "DualPipeVModule": _CUT,
    "InferenceEngine": _EVALUATES,
    "PipelineEngine": _CUT,
    "PipelineModule": _CUT,
    "default_inference_config": _EVALUATES,
    "init_inference": _EVALUATES,
    "load_ds_config": _CONFIG,
    "merge_tp_model_init_into_config": _TENSORS,
    "record_tp_model_init_args": _TENSORS,
    "replace_transformer_layer": _EVALUATES,
    "resolve_per_head_muon_after_sharding": _HEADS,
    "set_autotp_mode": _TENSORS,
    "set_optimizer_flags": _MUON,
    "tp_model_init": _TENSORS,
    # ----------------------------------------------------- of modules that are there: of one name, or of all others of it
    "accelerator.DeepSpeedAccelerator": "The nearest there is: the class of what accelerator.get_accelerator gives",
    "accelerator": "The nearest there is: accelerator.get_accelerator",
    "checkpointing": "Activations are not divided between processes. The nearest there is: checkpointing.checkpoint",
    "comm": _REPORT,
    "comm.ProcessGroup": "The nearest there is: comm.new_group",
    "comm.configure": _REPORT,
    "comm.enable_symm_mem_for_group": "The nearest there is: torch.distributed",
    "comm.initialize_mesh_device": "The nearest there is: torch.distributed.init_device_mesh",
    "comm.mpi_discovery": "The nearest there is: comm.init_distributed",
    "ops.adam": "The nearest there is: ops.adam.DeepSpeedCPUAdam",
    "runtime.base_optimizer": _OPTIMIZER,
    "runtime.config": _CONFIG,
    "runtime.dataloader.DeepSpeedDataLoader": _LOADER,
    "runtime.engine": _ENGINE,
    "runtime.lr_schedules": 'The nearest there is: the block "scheduler" of the config, or runtime.lr_schedules.WarmupLR',
    "runtime.utils": "It is a part of DeepSpeed's engine. The nearest there is: the method of the engine that initialize returns",
    "runtime.utils.CheckOverflow": "The nearest there is: optimizer.overflow",
    "runtime.utils.clip_tensors_by_global_norm": "The nearest there is: runtime.utils.clip_grad_norm_",
    "runtime.utils.get_flattened_grad_norm": "The nearest there is: engine.get_global_grad_norm()",
    "runtime.utils.get_ma_status": "The nearest there is: runtime.utils.see_memory_usage",
    "runtime.utils.memory_status": "The nearest there is: runtime.utils.see_memory_usage",
    "runtime.zero.config": _CONFIG,
    "runtime.zero.offload_config": _CONFIG,
    "runtime.zero.partition_parameters": "It is a part of DeepSpeed's zero.Init. The nearest there is: GatheredParameters",
    "runtime.zero.stage3": _OPTIMIZER,
    "runtime.zero.stage_1_and_2": _OPTIMIZER,
    "runtime.zero.tiling": "The nearest there is: runtime.zero.tiling.TiledLinear",
    "utils": _FRAGMENT,
    "utils.initialize": _GROUPS,
    "utils.get_numactl_cmd": "Start the script with numactl",
    "utils.groups": _GROUPS,
    "utils.logging": "The nearest there is: utils.logging.log_dist",
    "utils.mesh_device": _GROUPS,
    "utils.timer": "The nearest there is: utils.timer.SynchronizedWallClockTimer",
    "utils.z3_leaf_module": "The nearest there is: utils.z3_leaf_module.set_z3_leaf_modules",
    "utils.zero_to_fp32": "The nearest there is: utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
    "zero": "It is a part of DeepSpeed's engine. The nearest there is: zero.Init and zero.GatheredParameters",
}
"""Name with dots, of a module or of what is in one -> why there is nothing of that name below it, and the nearest thing."""

_FOR_NOTHING = "taken without effect: nothing has to be told"
_ON_CPU = "copies are on the CPU"
_LOCAL = "the whole on every rank, 1-D, on the CPU, where DeepSpeed gives the rank's share"
_SETS_ALL = "takes the whole on every rank, where DeepSpeed takes the rank's share"
_TORCHS = "makes an optimizer of torch's, which is what the config means by that name"
_LEAF = "marks are kept, and mean nothing: what is called in another order is fetched all the same"

DIFFERS = {
    "FlopsProfiler": "its flops are twice its MACs: operations element by element are not counted",
    "get_model_profile": "its flops are twice its MACs: operations element by element are not counted",
    "DeepSpeedConfig": "without what only DeepSpeed's own parts look at; it is a mapping of what the file says, too",
    "DeepSpeedEngine": "an `infinity.Engine` with DeepSpeed's names: pages what the budget does not hold",
    "DeepSpeedOptimizer": "the class of the optimizers that `initialize` returns",
    "OnDevice": "sets torch's default dtype and device, where DeepSpeed replaces torch's functions",
    "MonitorMaster": "takes `DeepSpeedConfig(...).monitor_config`, and sends nothing to Comet",
    "has_moe_layers": "there are none: (False, 0)",
    "split_params_into_different_moe_groups_for_optimizer": "has nothing to split, and refuses parameters of such experts",
    "ZeROOptimizer": "the class of the optimizers that `initialize` returns",
    "DeepSpeedCPUAdagrad": _TORCHS,
    "DeepSpeedCPUAdam": _TORCHS,
    "DeepSpeedCPULion": "makes `infinity.optim.classes.lion.Lion`, which is what the config means by that name",
    "FusedAdam": _TORCHS,
    "FusedLamb": "makes `infinity.optim.classes.lamb.Lamb`, which is what the config means by that name",
    "FusedLion": "makes `infinity.optim.classes.lion.Lion`, which is what the config means by that name",
    "Init": "weights keep the dtype that they have without it",
    "SynchronizedWallClockTimer": "does not wait for the GPU",
    "clip_grad_norm_": "`torch.nn.utils.clip_grad_norm_`",
    "configure": "what divides activations between processes is checked, and means nothing",
    "estimate_zero2_model_states_mem_needs_all_cold": "adds that `infinity plan` says what this engine takes",
    "estimate_zero2_model_states_mem_needs_all_live": "adds that `infinity plan` says what this engine takes",
    "estimate_zero3_model_states_mem_needs_all_cold": "adds that `infinity plan` says what this engine takes",
    "estimate_zero3_model_states_mem_needs_all_live": "adds that `infinity plan` says what this engine takes",
    "convert_zero_checkpoint_to_fp32_state_dict": "of checkpoints of ours; others by `python -m infinity import-deepspeed`",
    "get_fp32_state_dict_from_zero_checkpoint": "of checkpoints of ours; others by `python -m infinity import-deepspeed`",
    "load_state_dict_from_zero_checkpoint": "of checkpoints of ours; others by `python -m infinity import-deepspeed`",
    "get_model_state_file": "writes what `client_state` was to a file, for `torch.load`",
    "get_optim_files": "writes a file that says the stage, for `torch.load`",
    "init_distributed": "makes the group of the launcher's processes, or of this one; `initialize` does so as well",
    "initialize": "`dist_init_required` means nothing; `mesh_param` may be a `DeviceMesh`",
    "instrument_w_nvtx": "gives the function back: the timeline shows what an engine does",
    "reduce_scatter_fn": "takes one tensor, as `reduce_scatter_tensor`",
    "register_external_parameter": _FOR_NOTHING,
    "unregister_external_parameter": _FOR_NOTHING,
    "safe_get_full_fp32_param": _ON_CPU,
    "safe_get_full_grad": _ON_CPU,
    "safe_get_full_optimizer_state": _ON_CPU,
    "safe_get_local_fp32_param": _LOCAL,
    "safe_get_local_grad": _LOCAL,
    "safe_get_local_optimizer_state": _LOCAL,
    "safe_set_local_fp32_param": _SETS_ALL,
    "safe_set_local_grad": _SETS_ALL,
    "safe_set_local_optimizer_state": _SETS_ALL,
    "see_memory_usage": "says it in other words",
    "set_z3_leaf_module": _LEAF,
    "set_z3_leaf_modules": _LEAF,
    "set_z3_leaf_modules_by_name": _LEAF,
    "set_z3_leaf_modules_by_suffix": _LEAF,
    "unset_z3_leaf_modules": _LEAF,
    "unwrap_model_for_generation": "gathers nothing: the engine generates with paged weights",
    "z3_leaf_parameter": "False: no parameter is treated in another way",
}
"""Name of what is there, without its module -> how it differs from DeepSpeed's."""
