"""A backend for `PagedOptimizer` that keeps everything in memory, and helpers around it."""

from __future__ import annotations

import copy
import mmap
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from infinity.optim.facade.loose_parameters import LooseParameters
from infinity.optim.facade.paged_optimizer import PagedOptimizer
from infinity.optim.probe import SLICE_ALIGNMENT
from infinity.optim.slice_updater import SliceUpdater
from infinity.optim.wrapped_optimizer import OptimizerSource, WrappedOptimizer, wrap_optimizer


@dataclass(frozen=True)
class Section:
    """The config's optimizer block, as far as it concerns the optimizer."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


def page_aligned(numel: int) -> Tensor:
    """A float32 tensor whose memory starts at a page."""
    size = max(numel * 4, 1)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.float32)[
        :numel
    ]


def cut(numel: int, num_pieces: int, seed: int = 0) -> list[slice]:
    """Up to `num_pieces` slices that cover a parameter, starting at random multiples of the alignment."""
    inner = -(-numel // SLICE_ALIGNMENT) - 1
    generator = torch.Generator().manual_seed(seed)
    places = (torch.randperm(inner, generator=generator)[: num_pieces - 1] + 1).tolist() if inner > 0 else []
    return [
        slice(start, stop)
        for start, stop in pairwise(sorted({0, numel, *(place * SLICE_ALIGNMENT for place in places)}))
    ]


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Whether all bits are the same: -0.0 is not 0.0, and NaN is NaN."""
    return left.shape == right.shape and torch.equal(
        left.detach().contiguous().view(torch.int32), right.detach().contiguous().view(torch.int32)
    )


class MemoryBackend:
    """Keeps states, per parameter. Weights are the parameters themselves."""

    def __init__(self, wrapped_optimizer: WrappedOptimizer, updater: SliceUpdater) -> None:
        self._wrapped_optimizer = wrapped_optimizer
        self._updater = updater
        self._states: dict[Tensor, dict[str, Any]] = {}
        self.num_gathers = self.num_loads = 0
        self.loose = LooseParameters(wrapped_optimizer)

    def was_step_skipped(self) -> bool:
        return False

    def optimizer_lock(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def optimizer_step(self) -> None:
        for param in self._wrapped_optimizer.params():
            if param.grad is not None:
                index = group_index(self._wrapped_optimizer, param)
                names = self._updater.state_names(index)
                kept = self._states.get(param) or None
                tensors = None if kept is None else {name: kept[name].view(-1) for name in names}
                scalars = {name: value for name, value in (kept or {}).items() if name not in names}
                made, scalars = self._updater.update(
                    self._wrapped_optimizer.read().values[index],
                    param.detach().view(-1),
                    param.grad.reshape(-1),
                    tensors,
                    scalars,
                )
                self._states[param] = scalars | {name: tensor.view(param.shape) for name, tensor in made.items()}

    def make_room(self) -> None: ...

    def has_place(self, param: Tensor) -> bool:
        return param.requires_grad

    def has_state(self, param: Tensor) -> bool:
        return bool(self._states.get(param))

    def gather_state(self, param: Tensor) -> dict[str, Any]:
        self.num_gathers += 1
        return copy.deepcopy(self._states.get(param, {}))

    def load_state(self, param: Tensor, state: dict[str, Any]) -> None:
        self.num_loads += 1
        self._states[param] = {name: copy.deepcopy(value) for name, value in state.items()}


def page(
    source: OptimizerSource, model: torch.nn.Module, model_parameters: Any = None
) -> tuple[PagedOptimizer, MemoryBackend]:
    """A paged optimizer over the model's parameters, on a memory backend."""
    wrapped_optimizer = wrap_optimizer(source, model.named_parameters(), "cpu", model_parameters=model_parameters)
    updater = SliceUpdater(wrapped_optimizer)
    backend = MemoryBackend(wrapped_optimizer, updater)
    for param, state in wrapped_optimizer.pop_initial_states():
        backend.load_state(param, state)
    return PagedOptimizer(wrapped_optimizer, updater, backend, backend, backend.loose), backend


class Mixed(torch.nn.Module):
    """Parameters of several shapes: a matrix of odd size, a vector, one element, no dimension."""

    matrix: torch.nn.Parameter
    vector: torch.nn.Parameter
    one: torch.nn.Parameter
    scalar: torch.nn.Parameter

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (("matrix", (37, 29)), ("vector", (131,)), ("one", (1,)), ("scalar", ())):
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=generator)))

    def set_grads(self, seed: int, *, skip: tuple[str, ...] = ()) -> None:
        """Random gradients; None for the parameters in `skip`."""
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            grad = torch.randn(param.shape, generator=generator)
            param.grad = None if name in skip else grad


def different_state(paged: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Where two state dicts differ in a bit."""
    if paged["state"].keys() != plain["state"].keys():
        return [f"{list(paged['state'])} against {list(plain['state'])}"]
    found = []
    for index, expected in plain["state"].items():
        entry = dict(paged["state"][index])
        if entry.keys() != expected.keys():
            found.append(f"{index}: {list(entry)} against {list(expected)}")
            continue
        for name, value in expected.items():
            same = equal_bits(entry[name], value) if isinstance(value, Tensor) else entry[name] == value
            if not same:
                found.append(f"{index}.{name}")
    return found


def group_index(wrapped_optimizer: WrappedOptimizer, param: Tensor) -> int:
    """The index of the group that holds the parameter."""
    return next(
        index
        for index, group in enumerate(wrapped_optimizer.param_groups)
        if any(member is param for member in group["params"])
    )
