"""`zero_optimization` and `aio`: models of the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from infinity.config.schema.block import Block, Count, Elements, Flag, Keys, NoEffect, Number, Refused, Untyped
from infinity.config.schema.directories import NamedDirectory, parse_directories
from infinity.config.schema.quantities import parse_bytes, parse_choice, parse_count

_PROCESSES = "no effect: it tunes how DeepSpeed's processes communicate, and here they do so in other ways"
EXACT_EXCHANGE = (
    "no effect: one process exchanges nothing. Several average gradients, and round nothing that communication_data_type does "
    "not: there it is an error to ask for anything else"
)
_DERIVED = "no effect: buffers are sized and counted from the model and infinity.host_memory_budget, and never run out"
_OVERLAPPED = "no effect: reading, updating and writing always overlap"
_RESIDENCY = "no effect: what stays resident follows from the memory budgets and the recorded order of use"
_ANY_OPTIMIZER = "no effect: the optimizer runs as torch defines it, wherever its state lies"
_CHECKPOINTS = "no effect: it concerns checkpoints in DeepSpeed's format"
_DEBUGGING = "no effect: it switches on DeepSpeed's own diagnostics"
_UNITS = "no effect: repeated blocks are found by themselves; infinity.units overrides that"
_QUANTIZED = "quantized weights and gradients are not implemented"
_BACKEND = "no effect: requests are handed out by threads of the engine"


class OffloadBlock(Block):
    """`offload_param` and `offload_optimizer`. Each takes the other's keys too: files in the wild mix them up."""

    device: Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(parse_choice)] = "none"
    """Where these states rest: in the compute device's memory, in host memory, or on drives."""
    nvme_path: Annotated[tuple[NamedDirectory, ...], BeforeValidator(parse_directories)] = ()
    """The directory on the drive, or a list of them, one per drive, which are striped. Each may be an object that limits
    what is used: `{"path": "/mnt/nvme", "capacity": "400GB"}`. `~`, `$NAME` and `${NAME}` are filled in. A directory
    that is missing is made, and stays, if its parent exists. Scratch files in it have no name and vanish with the process."""
    pin_memory: Annotated[Flag, NoEffect("no effect: host memory is pinned when there is a GPU to pin it for")] = True
    buffer_count: Annotated[Count, NoEffect(_DERIVED)] = 0
    buffer_size: Annotated[Elements, NoEffect(_DERIVED)] = 0
    max_in_cpu: Annotated[Elements, NoEffect(_DERIVED)] = 0
    pipeline: Annotated[Flag, NoEffect(_OVERLAPPED)] = True
    pipeline_read: Annotated[Flag, NoEffect(_OVERLAPPED)] = True
    pipeline_write: Annotated[Flag, NoEffect(_OVERLAPPED)] = True
    fast_init: Annotated[Flag, NoEffect("no effect: state is written when the optimizer first creates it")] = True
    ratio: Annotated[Number, Field(ge=0, le=1), NoEffect(_RESIDENCY)] = 1.0
    super_offload: Annotated[Flag, NoEffect(_ANY_OPTIMIZER, silent=(False,))] = False
    cpuadam_cores_perc: Annotated[Number, NoEffect(_ANY_OPTIMIZER)] = 0.8

    def is_active(self) -> bool:
        return self.device != "none"


class ZeroBlock(Block):
    """`zero_optimization`."""

    renamed: ClassVar[Mapping[str, str]] = {
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
        "allgather_size": "allgather_bucket_size",
    }

    stage: Annotated[Count | None, Field(le=3)] = None
    """What several processes divide among them: from 1 on main weights, optimizer states and their updates; with 3
    also model weights. The numbers are the same with all of them (but see `bf16.check_grad_overflow`), and one process takes
    it as 3. Where it is not written: 3 if `offload_param` or `offload_optimizer` names a device, else 0, as in DeepSpeed."""
    offload_param: OffloadBlock = OffloadBlock()
    offload_optimizer: OffloadBlock = OffloadBlock()

    contiguous_gradients: Annotated[Flag, NoEffect(_PROCESSES)] = True
    reduce_scatter: Annotated[Flag, NoEffect(_PROCESSES)] = True
    reduce_bucket_size: Annotated[Elements, NoEffect(_PROCESSES)] = 0
    use_multi_rank_bucket_allreduce: Annotated[Flag, NoEffect(_PROCESSES)] = True
    allgather_partitions: Annotated[Flag, NoEffect(_PROCESSES)] = True
    allgather_bucket_size: Annotated[Elements, NoEffect(_PROCESSES)] = 0
    overlap_comm: Annotated[Flag, NoEffect(_PROCESSES)] = True
    round_robin_gradients: Annotated[Flag, NoEffect(_PROCESSES)] = False
    zero_hpz_partition_size: Count = 1
    """In stage 3 so many processes, one after the other in their order, divide weights, and each such group has all of them: what
    is fetched stays inside it. Optimizer states are divided among all. It must divide their number; where it is not less, or 0
    or 1, it changes nothing. Nor does it for weights that GPUs have whole (`offload_param` "none")."""
    mics_shard_size: Annotated[int, BeforeValidator(parse_count)] = -1
    """Hybrid sharding: so many processes, one after the other in their order, divide states (and weights in stage 3) among
    them, and each such group has all of it. It must divide the number of processes. -1 or 0: all are one group."""
    mics_hierarchical_params_gather: Annotated[Flag, NoEffect(_PROCESSES, silent=(False,))] = False
    stage3_use_all_reduce_for_fetch_params: Annotated[Flag, NoEffect(_PROCESSES)] = False
    stage3_allgather_sequential: Annotated[Flag, NoEffect(_PROCESSES)] = False

    sub_group_size: Annotated[Elements, NoEffect(_DERIVED)] = 0
    parameter_alignment: Annotated[Flag, NoEffect("no effect: parameters are always aligned to 64 bytes")] = True
    stage3_prefetch_bucket_size: Annotated[Elements, NoEffect(_RESIDENCY)] = 0
    stage3_param_persistence_threshold: Annotated[Elements, NoEffect(_RESIDENCY)] = 0
    stage3_model_persistence_threshold: Annotated[Elements, NoEffect(_RESIDENCY)] = 0
    stage3_max_live_parameters: Annotated[Elements, NoEffect(_RESIDENCY)] = 0
    stage3_max_reuse_distance: Annotated[Elements, NoEffect(_RESIDENCY)] = 0
    stage3_module_granularity_threshold: Annotated[Elements, NoEffect(_UNITS)] = 0
    leaf_module: Annotated[Untyped, Keys(("classes", "names", "name_suffixes")), NoEffect(_UNITS)] = None

    stage3_gather_16bit_weights_on_model_save: Annotated[
        Flag, NoEffect("no effect: engine.save_16bit_model always writes all weights, and streams them")
    ] = True
    load_from_fp32_weights: Annotated[Flag, NoEffect(_CHECKPOINTS)] = True
    elastic_checkpoint: Annotated[Flag, NoEffect(_CHECKPOINTS, silent=(False,))] = False
    pipeline_loading_checkpoint: Annotated[Flag, NoEffect(_CHECKPOINTS, silent=(False,))] = False
    compute_grad_norm: Annotated[Flag, NoEffect("no effect: the norm is computed when clipping needs it")] = True
    ignore_unused_parameters: Annotated[
        Flag, NoEffect("no effect: a parameter without a gradient is left alone, as torch does")
    ] = True
    memory_efficient_linear: Annotated[Flag, NoEffect("no effect: torch's own linear is used")] = False
    override_module_apply: Annotated[Flag, NoEffect("no effect: torch.nn.Module.apply is not replaced")] = False
    legacy_stage1: Annotated[Flag, NoEffect("no effect: there is one implementation", silent=(False,))] = False
    log_trace_cache_warnings: Annotated[Flag, NoEffect(_DEBUGGING, silent=(False,))] = False
    enable_sanity_checks: Annotated[Flag, NoEffect(_DEBUGGING, silent=(False,))] = False
    save_muon_momentum_buffer_in_memory: Annotated[Flag, NoEffect(_RESIDENCY, silent=(False,))] = False

    zero_quantized_weights: Annotated[Flag, NoEffect(EXACT_EXCHANGE, silent=(False,))] = False
    zero_quantized_nontrainable_weights: Annotated[Flag, Refused(_QUANTIZED, "Set it to false")] = False
    zero_quantized_gradients: Annotated[Flag, NoEffect(EXACT_EXCHANGE, silent=(False,))] = False
    zeropp_loco_param: Annotated[Untyped, NoEffect(_PROCESSES)] = None
    zenflow: Annotated[
        Untyped,
        Refused(
            "updates that lag behind the gradients are not implemented", "Remove it; updates overlap compute anyway"
        ),
    ] = None


class AioBlock(Block):
    """`aio`. Two of DeepSpeed's own tools write the number of threads under names that DeepSpeed does not read."""

    renamed: ClassVar[Mapping[str, str]] = {
        "thread_count": "intra_op_parallelism",
        "num_threads": "intra_op_parallelism",
    }

    block_size: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """Largest single request, rounded up to a multiple of 4096; 1 MiB by default."""
    queue_depth: Annotated[Count | None, Field(gt=0)] = None
    """Requests in flight per thread; 8 by default."""
    intra_op_parallelism: Annotated[Count | None, Field(gt=0)] = None
    """Threads for each direction and drive; at least 4 are used."""
    single_submit: Annotated[Flag, NoEffect(_BACKEND)] = False
    overlap_events: Annotated[Flag, NoEffect(_BACKEND)] = True
    use_gds: Flag = False
    """`true` is an error: GPUDirect Storage is not implemented, and data goes through host memory."""
