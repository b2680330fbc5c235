"""Reads DeepSpeed's ``..._model_states.pt``: names, shapes, buffers, frozen parameters, scheduler, counters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.arrays import ArraySpec
from infinity.deepspeed.importer.pickles import (
    OF_DEEPSPEED,
    OF_ONE_SAVE,
    ONE_STATE_DICT,
    FoundTensor,
    read,
    without_records,
)
from infinity.errors import CheckpointError
from infinity.numerics.chunk_format import WEIGHT

# Keys that DeepSpeed writes itself. All others are the script's `client_state`, which is in the same dict.
_OWN = frozenset(
    """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments
    lr_scheduler data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples
    dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version universal_checkpoint_info
    ds_autoep_layers autoep_layers num_experts
    """.split()  # noqa: SIM905 - read as a text
)
_NOT_TAKEN = {"data_sampler": "the state of curriculum learning", "random_ltd": "the state of random-LTD"}


class ModelStates:
    """The model states of all ranks, compared with each other.

    Attributes:
        shapes: FQN -> shape of trained parameters: a mapping for each flat tensor of the optimizer's states, in order.
        ds_config: the config of the run; empty if the checkpoint has none.
        version: of DeepSpeed.
        num_ranks: number of files: 1, or in stage 3 the world size.
        num_steps: of the training so far.
        lr_scheduler: the scheduler's state; None without one.
        tied: other FQN of a tied parameter -> the FQN that has the tensor.
    """

    def __init__(self, paths: Sequence[Path], *, skips_unknown: bool) -> None:
        """
        Raises:
            CheckpointError: files cannot be read or differ, or the model was divided by tensor or pipeline parallelism.
        """
        self._paths = paths
        self._ranks: list[dict[str, Any]] = [_read(path, skips_unknown=skips_unknown) for path in paths]
        self._first = first = self._ranks[0]
        shapes: Sequence[Mapping[str, Sequence[int]]] = first["param_shapes"]
        self.shapes = [{str(fqn): _sizes(shape) for fqn, shape in each.items()} for each in shapes]
        self.ds_config: Mapping[str, Any] = first.get("ds_config") or {}
        self.version = str(first.get("ds_version"))
        self.num_ranks = len(paths)
        self.num_steps = int(first["global_steps"])
        scheduler: Mapping[str, Any] | None = first.get("lr_scheduler")
        # Without objects of classes that are not run.
        self.lr_scheduler = None if scheduler is None else without_records(dict(scheduler))[0]
        self.tied = {str(fqn): str(of) for fqn, of in (first.get("shared_params") or {}).items()}
        # Files of another save, or of another model, in the same directory.
        for path, other in zip(paths, self._ranks, strict=True):
            for key in ("param_shapes", "global_steps", "ds_version"):
                if other.get(key) != first.get(key):
                    raise CheckpointError(path, f"its '{key}' is not that of '{paths[0].name}'", cure=OF_ONE_SAVE)

    def counters(self) -> dict[str, int]:
        """Steps, micro-batches and samples so far."""
        accumulation = self.ds_config.get("gradient_accumulation_steps")
        samples = int(self._first.get("global_samples", 0))
        # DeepSpeed does not save the number of micro-batches. With "auto" in the config it is computed: 6400 samples in
        # 100 steps are 64 a step; with micro-batches of 8 on 2 ranks, 64 / 16 = 4 micro-batches a step.
        if not isinstance(accumulation, int):
            size = self.ds_config.get("train_micro_batch_size_per_gpu")
            per_step = samples // max(self.num_steps, 1)
            per_batch = size * int(self._first.get("dp_world_size", 1)) if isinstance(size, int) else per_step
            accumulation = max(per_step // max(per_batch, 1), 1)
        return {
            "global_steps": self.num_steps,
            "micro_steps": self.num_steps * accumulation,
            "skipped_steps": int(self._first.get("skipped_steps", 0)),
            "global_samples": samples,
        }

    def client_state(self) -> tuple[dict[str, Any], list[str]]:
        """The script's ``client_state``, and descriptions of what cannot be converted."""
        kept, dropped = without_records({key: value for key, value in self._first.items() if key not in _OWN})
        left_out = [f"the script's '{name}', which holds objects of classes that are not run" for name in dropped]
        left_out += [what for key, what in _NOT_TAKEN.items() if self._first.get(key) is not None]
        return kept, left_out

    def fixed_tensors(self) -> list[FoundTensor]:
        """Buffers and frozen parameters."""
        module, first = self._first["module"], self._first
        if not isinstance(module, dict):
            cure = "Checkpoints of pipeline parallelism cannot be converted"
            raise CheckpointError(self._paths[0], "it has no state dict of the model", cure=cure)
        buffers = set(first["buffer_names"])
        trained = {fqn for each in self.shapes for fqn in each}
        found = [FoundTensor.whole("buffers", fqn, WEIGHT, value) for fqn, value in module.items() if fqn in buffers]
        frozen: Mapping[str, Sequence[int]] = first.get("frozen_param_shapes") or {}
        found += [self._frozen(fqn, _sizes(shape)) for fqn, shape in frozen.items()]
        # What is left in a state dict of one file: parameters that no optimizer had, and that are not frozen. Files of
        # stage 3 have empty placeholders for them.
        known = {*buffers, *self.tied, *trained, *frozen}
        for fqn, value in module.items():
            if fqn not in known and isinstance(value, torch.Tensor) and self.num_ranks == 1 and value.numel():
                found.append(FoundTensor.whole("parameters", fqn, WEIGHT, value))
        return found

    def _frozen(self, fqn: str, shape: tuple[int, ...]) -> FoundTensor:
        numel, pieces = math.prod(shape), []
        left = numel
        # Each rank has an equal part of a frozen parameter, padded at the end: 10 elements on 4 ranks are parts of 3,
        # 3, 3 and 3, of which the last has 1.
        for path, rank in zip(self._paths, self._ranks, strict=True):
            fragment = (rank.get("frozen_param_fragments") or {}).get(fqn)
            if not isinstance(fragment, torch.Tensor):
                problem = f"it has no part of the frozen parameter '{fqn}'"
                raise CheckpointError(path, problem, cure="Copy the file again")
            pieces.append(fragment.reshape(-1)[: max(left, 0)])
            left -= fragment.numel()
        if left > 0:
            problem = f"the parts of the frozen parameter '{fqn}' have {left} elements less than {shape}"
            raise CheckpointError(self._paths[-1], problem)
        return FoundTensor(ArraySpec.of("parameters", fqn, WEIGHT, shape, pieces[0].dtype), pieces)


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is no shape")
    return tuple(shape)


def _read(path: Path, *, skips_unknown: bool) -> dict[str, Any]:
    found = read(path, skips_unknown=skips_unknown)
    if not isinstance(found, dict) or "module" not in found or "buffer_names" not in found:
        raise CheckpointError(path, "it has no model state", cure=OF_DEEPSPEED)
    for key in ("ds_autoep_layers", "autoep_layers", "num_experts"):
        if found.get(key):
            raise CheckpointError(
                path, "it is of a mixture of experts (MoE)", cure="Such a checkpoint cannot be converted"
            )
    dimensions = found.get("checkpoint_parallel_dimensions") or {}
    # A file has mp_world_size, the degrees of all kinds of parallelism, or both.
    if found.get("mp_world_size", 1) != 1 or any(degree != 1 for degree in dimensions.values()):
        raise CheckpointError(
            path, f"its model was divided by tensor or pipeline parallelism: {dict(dimensions)}", cure=ONE_STATE_DICT
        )
    if found.get("param_shapes") is None:
        problem = "it has no shapes of parameters: it was saved without ZeRO, or without an optimizer"
        cure = "Give a checkpoint of ZeRO stage 1, 2 or 3; weights alone are loaded by infinity.load_pretrained"
        raise CheckpointError(path, problem, cure=cure)
    return found
