"""Reads fp32 weights and optimizer states of DeepSpeed: of ZeRO stages 1 to 3, cut up over ranks, or universal.

[Note: how ZeRO cuts] Two parameters a (10 elements) and b (6), on 4 ranks:

    stages 1, 2: one flat tensor a b of 16 elements, cut into equal parts. A rank's file has the ranges of its part.
        rank 0: a[0:4]   rank 1: a[4:8]   rank 2: a[8:10] b[0:2]   rank 3: b[2:6]
    stage 3: each parameter is cut by itself, into parts of 3 and 2, padded (.) at the end.
        A rank's flat tensor has its parts of a and b.
        rank 0: a[0:3] b[0:2]   rank 1: a[3:6] b[2:4]   rank 2: a[6:9] b[4:6]   rank 3: a[9:10] . . . .

In stages 1 and 2, the flat tensor is padded at its end, and by newer versions behind each parameter. In stage 3, a
group may have several flat tensors (sub-groups). The optimizer's moments are cut as the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.arrays import ArraySpec
from infinity.deepspeed.importer.model_states import ModelStates
from infinity.deepspeed.importer.pickles import COPY_ALL, OF_DEEPSPEED, OF_ONE_SAVE, ONLY_WEIGHTS, FoundTensor, read
from infinity.errors import CheckpointError
from infinity.numerics.chunk_format import WEIGHT
from infinity.torch_internals.pickles import Record

_MECHANICS = frozenset(["params", "step", "foreach", "fused", "capturable", "differentiable", "bias_correction"])
"""Keys of a group that are not hyperparameters."""
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
_ERRORS_OF_ONE_BIT = {"worker_error", "server_error"}
_KEY = "optimizer_state_dict"
_WEIGHTS = "fp32"
"""Name of the file with a parameter's weights in a universal checkpoint."""
_CONVERT = "Convert the checkpoint again, with deepspeed's ds_to_universal"


class OptimizerStates:
    """The optimizer states of all ranks, compared with each other."""

    def __init__(self, paths: Sequence[Path], model: ModelStates, *, skips_unknown: bool) -> None:
        """
        Raises:
            CheckpointError: files cannot be read, differ, or cannot be converted.
        """
        self._paths, self._model = paths, model
        self._ranks = [_read(path, skips_unknown=skips_unknown) for path in paths]
        self.scaler = self._ranks[0].get("loss_scaler")
        """DeepSpeed's loss scaler, or None."""
        self.stage = stage_of(paths[0], self._ranks[0], model.ds_config)
        check_optimizer(paths[0], model.ds_config)
        self._groups: Sequence[Mapping[str, Any]] = self._base(self._ranks[0], paths[0])["param_groups"]
        for path, rank in zip(paths, self._ranks, strict=True):
            for key in ("partition_count", "ds_version"):
                # The directory may have files of two saves.
                if rank.get(key) != self._ranks[0].get(key):
                    self._disagree(path, f"its '{key}' is")
            if stage_of(path, rank, model.ds_config) != self.stage:
                self._disagree(path, "its ZeRO stage is")
            if [len(each) for each in self._base(rank, path)["param_groups"]] != [len(each) for each in self._groups]:
                self._disagree(path, "its groups are")
        count = self._ranks[0].get("partition_count", len(paths))
        # One number per group, or one for all.
        num_ranks = max(count) if isinstance(count, list) else int(count)
        if num_ranks != len(paths) or (self.stage == 3 and model.num_ranks != num_ranks):
            raise CheckpointError(
                paths[0].parent,
                f"it was saved by {num_ranks} ranks, and has optimizer states of {len(paths)}"
                + (f" and model states of {model.num_ranks}" if self.stage == 3 else ""),
                cure=COPY_ALL,
            )
        if self._ranks[0].get("ds_zero_partition_groups") is not None:
            problem = "its parameters are divided by groups of ranks"
            raise CheckpointError(paths[0], problem, cure="It cannot be converted")

    def groups(self) -> list[dict[str, Any]]:
        """Hyperparameters, and whose they are; see `groups_of`."""
        return groups_of(self._paths[0], self._groups, self._model.shapes)

    def tensors(self) -> tuple[list[FoundTensor], dict[str, dict[str, Any]]]:
        """fp32 weights and element-wise states; and FQN -> states that are one number.

        Raises:
            CheckpointError: the pieces of a parameter are not as many elements as its shape.
        """
        pieces: dict[tuple[str, str], list[torch.Tensor]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for rank, path in enumerate(self._paths):
            for index, flat, state in self._flat(rank):
                # Per flat tensor, as "step": all parameters in it have the same.
                numbers = {name: each for name, each in state.items() if not _is_flat(each)}
                for fqn, start, numel in self._ranges(rank, index):
                    for kind, values in {WEIGHT: flat, **state}.items():
                        if not _is_flat(values):
                            continue
                        if start < 0 or start + numel > flat.numel():
                            problem = f"'{fqn}' would end at element {start + numel} of {flat.numel()}"
                            raise CheckpointError(path, problem, cure=OF_ONE_SAVE)
                        if start + numel > values.numel():  # moments may lack the padding, but no element
                            raise CheckpointError(
                                path,
                                f"its optimizer keeps '{kind}', which is not one number per element (an 8-bit one?)",
                                cure=ONLY_WEIGHTS,
                            )
                        # Ranks come in order, so a parameter's pieces do as well.
                        pieces.setdefault((fqn, kind), []).append(values[start : start + numel])
                    if state:
                        self._check_scalars(path, fqn, scalars.setdefault(fqn, numbers), numbers)
        return [self._whole(fqn, kind, each) for (fqn, kind), each in pieces.items()], scalars

    def _whole(self, fqn: str, kind: str, pieces: list[torch.Tensor]) -> FoundTensor:
        shape = next(each[fqn] for each in self._model.shapes if fqn in each)
        numel = sum(piece.numel() for piece in pieces)
        if numel != math.prod(shape):
            problem = f"'{fqn}' ({kind}) has {numel} elements in the files of all ranks, not {shape}"
            raise CheckpointError(self._paths[0].parent, problem, cure=OF_ONE_SAVE)
        return FoundTensor(ArraySpec.of("parameters", fqn, kind, shape, torch.float32), pieces)

    def _check_scalars(self, path: Path, fqn: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        if {name: float(each) for name, each in first.items()} != {name: float(each) for name, each in other.items()}:
            self._disagree(path, f"what it has of '{fqn}' besides tensors ({dict(other)}) is")

    def _disagree(self, path: Path, what: str) -> None:
        raise CheckpointError(path, f"{what} not that of '{self._paths[0].name}'", cure=OF_ONE_SAVE)

    def _base(self, rank: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
        base = rank.get(_KEY if self.stage == 3 else "base_optimizer_state")
        if not isinstance(base, dict) or "param_groups" not in base:
            problem = "its optimizer's states have another form ('zero_optimization.elastic_checkpoint')"
            raise CheckpointError(path, problem, cure="Load it with DeepSpeed, and save it with that key set to false")
        return base

    def _flat(self, rank: int) -> Iterator[tuple[int, torch.Tensor, Mapping[str, Any]]]:
        """Index, weights and states of each flat tensor of a rank."""
        path, saved = self._paths[rank], self._ranks[rank]
        flats = saved.get("fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups")
        base = self._base(saved, path)
        # DeepSpeed's base optimizer has flat tensors as its parameters: one per group (stages 1, 2) or sub-group (stage
        # 3).
        ids = [key for group in base["param_groups"] for key in group["params"]]
        if not isinstance(flats, list) or len(flats) != len(self._model.shapes) or len(ids) != len(flats):
            raise CheckpointError(
                path,
                f"it has {len(flats) if isinstance(flats, list) else 'no'} flat tensors of fp32 weights and "
                f"{len(ids)} of states, where the model's file names {len(self._model.shapes)}",
                cure=OF_ONE_SAVE,
            )
        for index, (flat, key) in enumerate(zip(flats, ids, strict=True)):
            state = _with_step(base["param_groups"], key, base["state"].get(key, {}))
            if not flat.numel():
                problem = "its fp32 weights and states are not in it: the optimizer was offloaded to NVMe"
                cure = 'Load it with DeepSpeed, and save it with "offload_optimizer": {"device": "cpu"}'
                raise CheckpointError(path, problem, cure=cure)
            if _ERRORS_OF_ONE_BIT & set(state):
                raise _one_bit(path, "1-bit Adam or LAMB")
            yield index, flat.reshape(-1), state

    def _ranges(self, rank: int, index: int) -> Iterator[tuple[str, int, int]]:
        """FQN, first element and number of elements, of each parameter's part in a flat tensor of a rank."""
        if self.stage != 3:
            mappings = self._ranks[rank].get("param_slice_mappings")
            if not mappings:
                problem = "it lacks the offsets of its parameters ('param_slice_mappings'): an old DeepSpeed wrote it"
                cure = "Load it with a newer DeepSpeed, and save it again"
                raise CheckpointError(self._paths[rank], problem, cure=cure)
            for fqn, address in mappings[index].items():
                yield fqn, int(address.state["start"]), int(address.state["numel"])
            return
        start = 0
        for fqn, shape in self._model.shapes[index].items():
            numel = math.prod(shape)
            part = -(-numel // len(self._paths))
            # Without the padding. In the example above, rank 3 has of a: max(min(3, 10 - 9), 0) = 1, and of b:
            # max(min(2, 6 - 6), 0) = 0.
            yield fqn, start, max(min(part, numel - rank * part), 0)
            start += part


class UniversalStates:
    """The folder ``zero`` of a universal checkpoint: a folder for each FQN, with files fp32.pt, exp_avg.pt, ..."""

    def __init__(self, folder: Path, states: Path, model: ModelStates, *, skips_unknown: bool) -> None:
        """
        Args:
            folder: ``zero``.
            states: the file with the groups.
            skips_unknown: see `read`.

        Raises:
            CheckpointError: ``states`` cannot be read.
        """
        self._folder, self._path, self._model, self._skips_unknown = folder, states, model, skips_unknown
        check_optimizer(states, model.ds_config)
        found = read(states, skips_unknown=skips_unknown)
        if not isinstance(found, dict) or "param_groups" not in found:
            raise CheckpointError(states, "it has no groups of an optimizer", cure=_CONVERT)
        self._states: Mapping[str, Any] = found
        self.scaler = found.get("loss_scaler")
        """DeepSpeed's loss scaler, or None."""

    def groups(self) -> list[dict[str, Any]]:
        """Hyperparameters, and whose they are; see `groups_of`."""
        return groups_of(self._path, self._states["param_groups"], self._model.shapes)

    def tensors(self) -> tuple[list[FoundTensor], dict[str, dict[str, Any]]]:
        """fp32 weights and element-wise states; and FQN -> states that are one number.

        Raises:
            CheckpointError: one is missing, or has another number of elements than its shape.
        """
        found: list[FoundTensor] = []
        scalars: dict[str, dict[str, Any]] = {}
        for index, shapes in enumerate(self._model.shapes):
            for fqn, shape in shapes.items():
                files = {path.stem: path for path in sorted((self._folder / fqn).glob("*.pt"))}
                if _WEIGHTS not in files:
                    raise CheckpointError(self._folder / fqn / f"{_WEIGHTS}.pt", "it is missing", cure=_CONVERT)
                numbers: dict[str, Any] = {}
                for name, path in files.items():
                    value = read(path, skips_unknown=self._skips_unknown)
                    value = value["param"] if isinstance(value, dict) and "param" in value else value
                    # A 0-d tensor of a parameter that is not 0-d is one number for all elements.
                    if name == "step" or (isinstance(value, torch.Tensor) and not value.dim() and shape):
                        numbers[name] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
                        continue
                    kind = WEIGHT if name == _WEIGHTS else name
                    found.append(self._tensor(path, fqn, kind, shape, value))
                if len(files) > 1:
                    scalars[fqn] = {**self._step(index), **numbers}
        return found, scalars

    def _tensor(self, path: Path, fqn: str, kind: str, shape: tuple[int, ...], value: Any) -> FoundTensor:
        if not isinstance(value, torch.Tensor) or value.numel() != math.prod(shape):
            what = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointError(path, f"it holds {what}, and '{fqn}' has shape {shape}", cure=_CONVERT)
        return FoundTensor(ArraySpec.of("parameters", fqn, kind, shape, torch.float32), [value.reshape(-1)])

    def _step(self, index: int) -> dict[str, Any]:
        """The step from the groups: converted from stage 3, parameters have no file for it."""
        group = next(each for each in self._states["param_groups"] if index in each["params"])
        state = (self._states.get("optimizer_state_dict") or {}).get("state", {}).get(index, {})
        step = state.get("step", group.get("step", self._states.get("base_optimizer_state_step")))
        return {} if step is None else {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}


def groups_of(
    path: Path, groups: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Sequence[int]]]
) -> list[dict[str, Any]]:
    """Groups with hyperparameters, and FQNs as "params".

    Args:
        path: of the file, for messages.
        groups: of the base optimizer. Its parameter ``i`` is the flat tensor of ``shapes[i]``.
        shapes: see `ModelStates`.

    Raises:
        CheckpointError: their numbers differ, or Adam has bias_correction=False.
    """
    ids = [key for group in groups for key in group["params"]]
    if sorted(ids) != list(range(len(shapes))):
        problem = f"its groups have {len(ids)} flat tensors, and the model's file names {len(shapes)}"
        raise CheckpointError(path, problem, cure=OF_ONE_SAVE)
    found = []
    for group in groups:
        if group.get("bias_correction", True) is False:
            cure = "Load its weights alone: the states of such an Adam are not converted"
            raise CheckpointError(path, "its Adam has bias_correction=False", cure=cure)
        settings = {name: value for name, value in group.items() if name not in _MECHANICS}
        # A flat tensor is one parameter of the base optimizer, and many of the model.
        found.append({**settings, "params": [fqn for key in group["params"] for fqn in shapes[key]]})
    return found


def loss_scale_of(scaler: Any) -> dict[str, float]:
    """The state of this engine's loss scale. ``scaler``: DeepSpeed's, or None."""
    if not isinstance(scaler, Record):
        return {"dynamic": False, "scale": 1.0, "patience": 1, "num_finite": 0}
    facts = scaler.state
    # Steps since the last overflow: after an overflow at iteration 4, cur_iter = 7 means that 5 and 6 were finite.
    num_finite = int(facts.get("cur_iter", 0)) - int(facts.get("last_overflow_iter", -1)) - 1
    hysteresis_left = int(facts.get("cur_hysteresis", 1))
    scale, is_dynamic = float(facts["cur_scale"]), bool(facts.get("dynamic", True))
    return {"dynamic": is_dynamic, "scale": scale, "patience": hysteresis_left, "num_finite": num_finite}


def stage_of(path: Path, states: Mapping[str, Any], ds_config: Mapping[str, Any]) -> int:
    """The ZeRO stage of a file.

    Raises:
        CheckpointError: it is not 1, 2 or 3.
    """
    stage = states.get("zero_stage", (ds_config.get("zero_optimization") or {}).get("stage"))
    if isinstance(stage, Record):
        # DeepSpeed pickles its enum: a call of the class with the number.
        (stage,) = stage.arguments or (None,)
    if stage not in (1, 2, 3):
        raise CheckpointError(path, f"its ZeRO stage is {stage!r}", cure="Give a checkpoint of stage 1, 2 or 3")
    return int(stage)


def check_optimizer(path: Path, ds_config: Mapping[str, Any]) -> None:
    """Check that the optimizer's states can be converted.

    Raises:
        CheckpointError: it is a 1-bit optimizer, or was divided by MiCS.
    """
    name = str((ds_config.get("optimizer") or {}).get("type", ""))
    if name.lower() in _ONE_BIT:
        raise _one_bit(path, name)
    if int((ds_config.get("zero_optimization") or {}).get("mics_shard_size", -1)) > 0:
        problem = "its states were sharded by MiCS ('mics_shard_size')"
        raise CheckpointError(path, problem, cure="It cannot be converted")


def _one_bit(path: Path, name: str) -> CheckpointError:
    problem = f"its optimizer, {name}, compresses gradients, and keeps their errors"
    return CheckpointError(path, problem, cure=ONLY_WEIGHTS)


def _with_step(groups: Sequence[Mapping[str, Any]], key: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """States with "step" as an fp32 tensor. DeepSpeed's fused optimizers keep it in the group."""
    group = next(each for each in groups if key in each["params"])
    state = {name: each for name, each in state.items() if each is not None}  # SGD's momentum before the first step
    if state and "step" not in state and "step" in group:
        state = {**state, "step": group["step"]}
    step = state.get("step")
    if step is None:
        return state
    return {**state, "step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _read(path: Path, *, skips_unknown: bool) -> Mapping[str, Any]:
    found = read(path, skips_unknown=skips_unknown)
    states = found.get(_KEY) if isinstance(found, dict) else None
    if not isinstance(states, dict):
        raise CheckpointError(path, "it has no optimizer state", cure=OF_DEEPSPEED)
    return states
