"""What an optimizer keeps per parameter, and whether it may be run piece by piece: found out by running it on a little.

[Note: pieces and bits]
A kernel gives an element the same bits wherever it lies only if its vector code and its scalar code agree: the tail of
a tensor, and of every thread's part of a large one, goes through the latter. add, mul, div, sqrt, lerp, addcmul and
addcdiv agree; pow with a fractional exponent and atan2 do not. Torch's fused optimizers do not either, but they split a
tensor between threads at multiples of 16 elements, so that only its end is a tail. Hence pieces are cut at multiples of
64 elements from the parameter's start, and a class that is not known to consist of such operations is compared: the
whole tensor (large enough to be split between threads, of odd size) against pieces of it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from infinity.errors import OptimizerNotPageableError
from infinity.optim.worker import Worker

#: Pieces of a parameter start at multiples of this many elements.
PIECE_ALIGNMENT = 64

_NUM_STEPS = 3
_SCHEMA_NUMEL = 67
# The first is split between threads (torch does so from 32768 elements on), and its parts end at no vector's end.
_SHAPES: tuple[tuple[int, ...], ...] = ((263, 509), (3, 5, 7), (1001,), ())


@dataclass(frozen=True)
class StateSchema:
    """What the optimizer keeps for each parameter of one group.

    Attributes:
        elementwise: names of tensors with the parameter's shape, float32, in the order in which they were made.
        scalars: names of everything else: step counts and the like, one value per parameter.
    """

    elementwise: tuple[str, ...]
    scalars: tuple[str, ...]


def learn_schema(worker: Worker, group: Mapping[str, Any], device: torch.device) -> StateSchema:
    """Find out which state the optimizer keeps under these hyperparameters, by three steps on 67 elements.

    Raises:
        OptimizerNotPageableError: a step fails, or the state cannot be cut into pieces.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_SCHEMA_NUMEL, generator=generator).to(device)
    state: dict[str, Any] = {}
    names: list[tuple[str, ...]] = []
    for _ in range(_NUM_STEPS):
        grad = torch.randn(_SCHEMA_NUMEL, generator=generator).to(device)
        try:
            (state,) = worker.run(dict(group), [weight], [grad], [state])
        except OptimizerNotPageableError:
            raise
        except Exception as error:
            raise OptimizerNotPageableError(
                worker.name,
                f"a step on a small float32 tensor on {device} failed ({type(error).__name__}: {error})",
                cure="Make it run on such a tensor without a closure and with state that is started in step()",
            ) from error
        names.append(tuple(state))
    elementwise = [name for name, value in state.items() if is_elementwise(value, (_SCHEMA_NUMEL,))]
    scalars = [name for name in state if name not in elementwise]
    for name in elementwise:
        dtype = state[name].dtype
        if dtype != torch.float32:
            raise OptimizerNotPageableError(worker.name, f"its state '{name}' is {dtype}, only float32 can be paged")
        if name not in names[0]:
            raise OptimizerNotPageableError(worker.name, f"its state '{name}' does not exist after the first step")
    for name in scalars:
        value = state[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise OptimizerNotPageableError(
                worker.name,
                f"its state '{name}' has shape {tuple(value.shape)} for a parameter of shape ({_SCHEMA_NUMEL},)",
            )
        if isinstance(value, list | tuple | dict) and _holds_large_tensor(value):
            raise OptimizerNotPageableError(worker.name, f"its state '{name}' holds tensors inside a container")
    return StateSchema(tuple(elementwise), tuple(scalars))


def is_elementwise(value: object, shape: tuple[int, ...]) -> bool:
    """Whether a state entry has one value per element of a parameter of this shape."""
    return isinstance(value, Tensor) and tuple(value.shape) == shape


def copy_scalar(value: Any) -> Any:
    """An independent copy of a scalar state entry: steps advance such tensors in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(copy_scalar(item) for item in value)
    return {key: copy_scalar(item) for key, item in value.items()} if isinstance(value, dict) else value


def probe_pageable(worker: Worker, group: Mapping[str, Any], schema: StateSchema, device: torch.device) -> None:
    """Compare three steps on whole tensors with three steps on pieces of them, bit by bit.

    The whole tensors are updated in one call, the pieces one by one, so anything that looks at several elements or
    parameters at once (norms, trust ratios), at shapes, or at counters outside the state shows up. The global random
    generators are left as they were.

    Raises:
        OptimizerNotPageableError: they differ, or the optimizer keeps something outside its state.
    """
    rng_state, python_rng_state = torch.get_rng_state(), random.getstate()
    try:
        _compare(worker, _usable(group), schema, device)
        drew = not torch.equal(torch.get_rng_state(), rng_state) or random.getstate() != python_rng_state
    finally:
        torch.set_rng_state(rng_state)
        random.setstate(python_rng_state)
    if drew:
        raise OptimizerNotPageableError(worker.name, "it draws random numbers in step()")


def _compare(worker: Worker, group: dict[str, Any], schema: StateSchema, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def run(weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        used = dict(group)
        try:
            states = worker.run(used, weights, grads, states)
        except Exception as error:
            raise OptimizerNotPageableError(
                worker.name, f"a trial step failed ({type(error).__name__}: {error})"
            ) from error
        if not _same(used, group):
            raise OptimizerNotPageableError(worker.name, "its step() changes the parameter group it works on")
        return states

    attributes = dict(vars(worker.optimizer))
    wholes = [draw(shape) for shape in _SHAPES]
    whole_states: list[dict[str, Any]] = [{} for _ in wholes]
    flats = [whole.clone().reshape(-1) for whole in wholes]
    flat_states: list[dict[str, Any]] = [{} for _ in wholes]
    for _ in range(_NUM_STEPS):
        grads = [draw(shape) for shape in _SHAPES]
        for index, flat in enumerate(flats):
            flat_states[index] = _run_pieces(run, schema, flat, grads[index].clone().reshape(-1), flat_states[index])
        whole_states = run(wholes, grads, whole_states)
    for whole, flat, whole_state, flat_state in zip(wholes, flats, whole_states, flat_states, strict=True):
        different = [] if torch.equal(whole.reshape(-1), flat) else ["the weights"]
        if set(whole_state) != set(flat_state):
            different.append("the names of the state")
        else:
            different += [
                f"state '{name}'"
                for name, value in whole_state.items()
                if not _same(value.reshape(-1) if name in schema.elementwise else value, flat_state[name])
            ]
        if different:
            raise OptimizerNotPageableError(
                worker.name,
                f"{_NUM_STEPS} steps on pieces and on the whole of a tensor of shape {tuple(whole.shape)} gave "
                f"different bits in {', '.join(different)}: it mixes elements or depends on their position",
            )
    if not _same(attributes, dict(vars(worker.optimizer))):
        raise OptimizerNotPageableError(worker.name, "its step() keeps values on the optimizer object itself")


def _run_pieces(run: Any, schema: StateSchema, flat: Tensor, grad: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    numel = flat.numel()
    cuts = sorted({0, numel, *(cut for cut in (64, 640, 64 * 100, 64 * 911, 64 * 1500) if cut < numel)})
    parts = []
    for start, end in pairwise(cuts):
        # Pieces of a parameter all start from its scalars as they were before the step.
        given = {
            name: value[start:end] if name in schema.elementwise else copy_scalar(value)
            for name, value in state.items()
        }
        parts += run([flat[start:end]], [grad[start:end]], [given])
    return {
        name: torch.cat([part[name] for part in parts]) if name in schema.elementwise else parts[-1][name]
        for name in parts[-1]
    }


def _usable(group: Mapping[str, Any]) -> dict[str, Any]:
    # With a learning rate of zero (a warm-up's first step) any two runs would agree.
    usable = dict(group)
    if isinstance(usable.get("lr"), float | int) and usable["lr"] == 0:
        usable["lr"] = 1e-3
    return usable


def _same(left: object, right: object) -> bool:
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(_same(one, other) for one, other in zip(left, right, strict=True))
    return bool(left == right)


def _holds_large_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() > 1
    if isinstance(value, dict):
        return any(_holds_large_tensor(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_holds_large_tensor(item) for item in value)
