"""Puts the tensors of a checkpoint where the engine keeps them: each byte is read once and written once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.arrays import ElementsInOrder
from infinity.checkpoint.rest_checks import check_groups
from infinity.checkpoint.saved import REST, Checkpoint, SavedTensor
from infinity.checkpoint.state_access import StateAccess
from infinity.checkpoint.stored_weights import in_memory_order
from infinity.errors import CheckpointError
from infinity.numerics.chunk_format import WEIGHT
from infinity.optim.groups import TiledGroups
from infinity.optim.named_groups import in_order_of
from infinity.paging.parameter_map import ParameterMap
from infinity.telemetry.progress import Note
from infinity.units.buffers import write_buffer
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from swapper.volumes.block_files import BlockThreads


class Loading:
    """One load, a ``with`` block. Shapes have been checked; must not be used while updates are pending."""

    def __init__(
        self,
        saved: Checkpoint,
        threads: BlockThreads,
        access: StateAccess,
        parameter_map: ParameterMap,
        tiled: TiledGroups,
    ) -> None:
        self._saved = saved
        self._threads = threads
        self._access = access
        self._parameter_map = parameter_map
        self._tiled = tiled
        self._open = ExitStack()
        self._sources: dict[tuple[str, str], ElementsInOrder] = {}
        """(FQN, kind) of what is tiled -> its elements: those of one tile after those of the one before."""
        self._states: dict[int, dict[str, SavedTensor | torch.Tensor]] = {}
        """id of a held parameter -> its element-wise states."""

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._open.close()

    def in_order(
        self,
        optimizer: torch.optim.Optimizer,
        rest: Mapping[str, Any],
        parameters: Mapping[str, nn.Parameter],
        *,
        is_strict: bool,
    ) -> Mapping[str, Any]:
        """``rest`` with the saved groups in the order of this optimizer's.

        Raises:
            ValueError: they do not fit; nothing has been changed.
        """
        groups = [{**g, "params": self._tiled.without_tiles(g["params"])} for g in optimizer.param_groups]
        if "names" in rest and {id(p) for g in groups for p in g["params"]} <= {id(p) for p in parameters.values()}:
            rest = in_order_of(groups, rest, parameters, is_strict=is_strict)
        try:
            if len(groups) == len(rest["param_groups"]):  # else the optimizer says so
                check_groups(rest["param_groups"], groups)
        except ValueError as error:
            raise CheckpointError(self._saved.folder / REST, str(error)) from error
        return rest

    def optimizer(self, optimizer: torch.optim.Optimizer, rest: Mapping[str, Any]) -> None:
        """Hyperparameters, scalars, and the states of what is held by nobody; `parameters` brings the others' elements.

        Args:
            rest: see `in_order`.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        mine = self._tiled.without_tiles([p for group in optimizer.param_groups for p in group["params"]])
        ids = [key for group in rest["param_groups"] for key in group["params"]]
        parameter_of = dict(zip(ids, mine, strict=False))  # the optimizer says so if they are not as many
        arrays: dict[str, dict[str, SavedTensor | torch.Tensor]] = {}
        for each in self._saved.tensors:
            if each.group == "parameters" and each.kind != WEIGHT:
                arrays.setdefault(each.fqn, {})[each.kind] = each
        state: dict[Any, Any] = {}
        for key, fqn, scalars in rest["states"]:
            state[key] = self._entry(parameter_of.get(key), scalars, arrays.get(fqn, {}))
        for key, entry in rest["others"].items():
            parameter = parameter_of.get(key)
            large: dict[str, SavedTensor | torch.Tensor] = {
                name: each for name, each in entry.items() if isinstance(each, torch.Tensor) and each.dim()
            }
            small = {name: each for name, each in entry.items() if name not in large}
            state[key] = self._entry(parameter, small, large)
        with self._access.elements_following():
            optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})

    def _entry(
        self, parameter: Any, scalars: Mapping[str, Any], large: dict[str, SavedTensor | torch.Tensor]
    ) -> dict[str, Any]:
        parts = self._tiled.all_of(parameter)
        if self._parameter_map.holds(parts[0]):
            for part in parts:
                self._states[id(part)] = large
            stands_for = torch.zeros((), dtype=torch.float32, device="cpu")
            return {**scalars, **{name: stands_for.expand(tuple(each.shape)) for name, each in large.items()}}
        return {**scalars, **{name: self._whole(each) for name, each in large.items()}}

    def _whole(self, value: SavedTensor | torch.Tensor) -> torch.Tensor:
        return value if isinstance(value, torch.Tensor) else value.read(self._threads)

    def buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Into these."""
        for fqn, buffer in buffers.items():
            found = self._saved.tensor("buffers", fqn)
            if found is not None:
                write_buffer(buffer, found.read(self._threads))

    def parameters(self, parameters: Mapping[str, nn.Parameter], note: Note) -> None:
        """Weights and, of those that `optimizer` was told of, states; ``note`` is told of bytes, unit after unit."""
        names = {id(part): fqn for fqn, parameter in parameters.items() for part in self._tiled.all_of(parameter)}
        for fqn, parameter in parameters.items():
            found = self._saved.tensor("parameters", fqn)
            if found is not None and not self._parameter_map.holds(self._tiled.all_of(parameter)[0]):
                with torch.no_grad():
                    parameter.copy_(found.read(self._threads))
        for unit in self._parameter_map.units:
            note(self._unit(unit, names))
        for source in self._sources.values():
            source.end()

    def _unit(self, unit: Unit, names: Mapping[int, str]) -> int:
        """Returns how many bytes it has."""
        num_bytes = 0
        with ExitStack() as stack:
            sources: dict[tuple[int, str], ElementsInOrder] = {}
            frozen: list[tuple[nn.Parameter, SavedTensor]] = []
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                weight = self._saved.tensor("parameters", names.get(id(parameter), ""))
                if not slot.spec.is_trainable:
                    if weight is not None:
                        frozen.append((parameter, weight))
                        num_bytes += slot.numel * weight.dtype.itemsize
                    continue
                kinds: dict[str, SavedTensor | torch.Tensor] = dict(self._states.get(id(parameter), {}))
                if weight is not None:
                    kinds[WEIGHT] = weight
                for kind, value in kinds.items():
                    num_bytes += slot.numel * value.dtype.itemsize
                    sources[slot.index, kind] = self._source(slot, value, stack)
            if sources:
                with self._access.replacing(unit) as stream:
                    stream.fill(unit, sources)
            for source in sources.values():
                if source not in self._sources.values():
                    source.end()
        for parameter, weight in frozen:
            self._access.load_main_weight(parameter, self._copied(parameter, weight))
        return num_bytes

    def _source(self, slot: Slot, value: SavedTensor | torch.Tensor, stack: ExitStack) -> ElementsInOrder:
        if isinstance(value, SavedTensor) and value.shape != slot.spec.shape:
            return self._rows(value)
        if isinstance(value, SavedTensor) and slot.is_in_order:
            parts = value.parts(self._threads)
            stack.enter_context(closing(parts))
            return ElementsInOrder(parts)
        whole = self._copied(slot.spec, value) if isinstance(value, SavedTensor) else value
        return ElementsInOrder(iter([(0, in_memory_order(whole, slot))]))

    def _rows(self, value: SavedTensor) -> ElementsInOrder:
        """The elements of what is tiled, from where the tile before has left them."""
        key = value.fqn, value.kind
        if key not in self._sources:
            parts = value.parts(self._threads)
            self._open.enter_context(closing(parts))
            self._sources[key] = ElementsInOrder(parts)
        return self._sources[key]

    def _copied(self, like: Any, value: SavedTensor) -> torch.Tensor:
        """The whole tensor, or the tile's rows of it; a large one in a file."""
        if value.shape != tuple(like.shape):
            rows, whole = self._rows(value), torch.empty(tuple(like.shape), dtype=value.dtype, device="cpu")
            flat, filled = whole.reshape(-1), 0
            while filled < flat.numel():
                part = rows.some(flat.numel() - filled)
                flat[filled : filled + part.numel()].copy_(part)
                filled += part.numel()
            return whole
        stride = torch.empty(tuple(like.shape), device="meta", dtype=torch.float32).stride()
        with self._access.copies.new(value.shape, stride, value.dtype) as made:
            for start, part in value.parts(self._threads):
                made.write(start, part)
            return made.finish()
