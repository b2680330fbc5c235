"""Reads a universal checkpoint: a folder for each parameter, a file for each of its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.arrays import ArraySpec
from infinity.deepspeed.importer.contents import FoundTensor
from infinity.deepspeed.importer.model_states import ModelStates
from infinity.deepspeed.importer.optimizer_states import check_optimizer, groups_of
from infinity.deepspeed.importer.pickles import read
from infinity.errors import CheckpointError
from infinity.numerics.chunk_format import WEIGHT

_WEIGHTS = "fp32"
_CURE = "Convert the checkpoint again, with deepspeed's ds_to_universal"


class UniversalStates:
    """The folder ``zero`` of a universal checkpoint."""

    def __init__(self, folder: Path, states: Path, model: ModelStates, *, skips_unknown: bool) -> None:
        """
        Args:
            folder: that of the parameters' folders.
            states: the file of what is no tensor.
            model: names and shapes.
            skips_unknown: as `read` takes it.

        Raises:
            CheckpointError: it cannot be read.
        """
        self._folder, self._path, self._model, self._skips_unknown = folder, states, model, skips_unknown
        check_optimizer(states, model.ds_config)
        found = read(states, skips_unknown=skips_unknown)
        if not isinstance(found, dict) or "param_groups" not in found:
            raise CheckpointError(states, "it has no groups of an optimizer", cure=_CURE)
        self._states: Mapping[str, Any] = found
        self.scaler = found.get("loss_scaler")
        """DeepSpeed's loss scaler, or None."""

    def groups(self) -> list[dict[str, Any]]:
        """Hyperparameters, and whose they are; see `groups_of`."""
        return groups_of(self._path, self._states["param_groups"], self._model.shapes)

    def tensors(self) -> tuple[list[FoundTensor], dict[str, dict[str, Any]]]:
        """fp32 weights and element-wise states; and per FQN those states that are one number.

        Raises:
            CheckpointError: one is missing, or has more or fewer elements than its shape.
        """
        found: list[FoundTensor] = []
        scalars: dict[str, dict[str, Any]] = {}
        for index, shapes in enumerate(self._model.shapes):
            for fqn, shape in shapes.items():
                files = {path.stem: path for path in sorted((self._folder / fqn).glob("*.pt"))}
                if _WEIGHTS not in files:
                    raise CheckpointError(self._folder / fqn / f"{_WEIGHTS}.pt", "it is missing", cure=_CURE)
                numbers: dict[str, Any] = {}
                for name, path in files.items():
                    value = read(path, skips_unknown=self._skips_unknown)
                    value = value["param"] if isinstance(value, dict) and "param" in value else value
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
            raise CheckpointError(path, f"it holds {what}, and '{fqn}' has shape {shape}", cure=_CURE)
        return FoundTensor(ArraySpec.of("parameters", fqn, kind, shape, torch.float32), [value.reshape(-1)])

    def _step(self, index: int) -> dict[str, Any]:
        """Of stage 3, the files of parameters have no step."""
        group = next(each for each in self._states["param_groups"] if index in each["params"])
        state = (self._states.get("optimizer_state_dict") or {}).get("state", {}).get(index, {})
        step = state.get("step", group.get("step", self._states.get("base_optimizer_state_step")))
        return {} if step is None else {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
