"""What an optimizer keeps per parameter, and whether it may be run slice by slice: found out by running it on a little.

[Note: slices and bits]
A kernel gives an element the same bits wherever it lies only if its vector code and its scalar code agree: the tail of
a tensor, and of every thread's part of a large one, goes through the latter. add, mul, div, sqrt, lerp, addcmul and
addcdiv agree; pow with a fractional exponent and atan2 do not. Torch's fused optimizers do not either, but they split a
tensor between threads at multiples of 16 elements, so that only its end is a tail. Hence slices are cut at multiples of
64 elements from the parameter's start, and a class that is not known to consist of such operations is compared: the
whole tensor (large enough to be split between threads, of odd size) against slices of it.

[Note: rules that seldom apply]
A rule that looks at a whole tensor now and then (clipping above a norm, a trust ratio within bounds, a reset every so many
steps, a guard against infinities) shows only where it applies, or where it applies to the whole and not to a slice. So the
trials contain tensors in which two elements are far larger than all others, at every magnitude: whatever the threshold is, some
whole tensor lies above it, and all of its slices but one below. Step counts are moved on to numbers around which periods and
warm-ups end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise, takewhile
from typing import Any

import numpy
import torch
from torch import Tensor

from infinity.errors import OptimizerNotPageableError
from infinity.numerics.random_states import random_states, set_random_states
from infinity.optim.executor import OptimizerExecutor, copy_scalar, same_values
from infinity.torch_internals.operations import leaves, replaced

#: Slices of a parameter start at multiples of this many elements.
SLICE_ALIGNMENT = 64

_NUM_STEPS = 3  # the first step creates states, the others use them
# Of a first trial: small, of odd size. A matrix for rules that take no vector (Muon).
_VECTOR, _MATRIX = (67,), (11, 7)


_Shapes = tuple[tuple[tuple[int, ...], list[int]], ...]
"""Shapes of whole parameters, and where they are cut."""


def _cut(*shape: int, at: Sequence[int] = (1,)) -> tuple[tuple[int, ...], list[int]]:
    """A shape, cut ``at`` these multiples of `SLICE_ALIGNMENT`."""
    return shape, [0, *(SLICE_ALIGNMENT * place for place in at), math.prod(shape)]


_ONE = _cut(at=())
# The first is split between threads (torch does so from 32768 elements on), and its parts end at no vector's end.
_CUTS: _Shapes = (_cut(263, 509, at=(1, 10, 100, 911, 1500)), _cut(3, 5, 7), _cut(1001, at=(7,)), _ONE)
# Small ones, of every number of dimensions that layers have.
_TENSORS = (_cut(13, 11), _cut(3, 5, 7), _cut(4, 3, 3, 3), _cut(2, 3, 2, 3, 2))
_SMALL_CUTS: _Shapes = (_cut(1001, at=(3, 7)), *_TENSORS, _ONE)
# 4 MiB in fp32, in slices of 1 MiB and 3 MiB.
_LARGE_CUTS: _Shapes = (_cut(1 << 20, at=(1 << 12,)),)
# Shorter than torch's vector loops, so that nearly all elements go through scalar code.
_POSITION_CUTS: _Shapes = (
    ((4096,), [0, *takewhile(lambda cut: cut < 4096, accumulate(cycle(range(1, 30, 4)))), 4096]),
)
_SHAPES = (_CUTS, _POSITION_CUTS, _SMALL_CUTS, _LARGE_CUTS)
# For rules that take matrices only, which are never cut.
_SMALL_MATRICES: _Shapes = (((13, 11), []), ((8, 24), []), ((16, 16), []))
_LARGE_MATRICES: _Shapes = (((263, 109), []), ((13, 11), []))
_MATRICES: tuple[_Shapes, ...] = (_SMALL_MATRICES, (), _SMALL_MATRICES, _LARGE_MATRICES)


_Draw = Callable[[tuple[int, ...], int], Tensor]
"""Shape, number of the step from 0 -> float32 values on the CPU."""

_LATE_COUNTS = (49, 99, 249, 719, 999, 4095, 5039, 9999, 65_535, 99_999, 999_999)
"""Step counts that a trial continues from: many periods end in the two steps after each."""
_NUM_CONSECUTIVE = 12  # steps before those: a counter is then 11 to 13, which hardly any other value is
# Of single large elements: thresholds of clipping are anywhere between.
_MAGNITUDES = (1e-30, 1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e12)


@dataclass(frozen=True)
class Trial:
    """Some steps from fresh states.

    Attributes:
        what: for messages: "steps <what>".
        weight: before the first step.
        gradient: of each step.
        num_steps: how many.
    """

    what: str
    weight: _Draw
    gradient: _Draw
    num_steps: int


@dataclass(frozen=True)
class StateSchema:
    """What the optimizer keeps for each parameter of one group.

    Attributes:
        elementwise: names of tensors with the parameter's shape, float32, in the order in which they were made.
        scalars: names of everything else: step counts and the like, one value per parameter.
        tensors: those of the scalars that are tensors, of one element.
        shape: of a small parameter that the optimizer takes.
    """

    elementwise: tuple[str, ...]
    scalars: tuple[str, ...]
    tensors: frozenset[str]
    shape: tuple[int, ...] = _VECTOR


def learn_schema(executor: OptimizerExecutor, group: Mapping[str, Any]) -> StateSchema:
    """Find out which state the optimizer keeps under these hyperparameters, by three steps on a vector, else on a matrix.

    Raises:
        OptimizerNotPageableError: a step on either fails, or the state cannot be cut into slices.
    """
    failures: list[Exception] = []
    for shape in (_VECTOR, _MATRIX):
        try:
            names, state = _first_steps(executor, group, shape)
            break
        except OptimizerNotPageableError:  # a matrix would not change that
            raise
        except Exception as error:
            failures.append(error)
    else:
        raise executor.unpageable(
            f"a step on a small float32 tensor on {executor.device} failed ({type(failures[0]).__name__}: {failures[0]})",
            cure="Correct its hyperparameters, if the error is about them (as many betas as it unpacks). A class of your own "
            "must run on such a tensor without a closure, and start its state in step()",
        ) from failures[0]
    # By shape: a state of the parameter's shape is cut as the parameter is, all else is kept once for each parameter.
    elementwise = [name for name, value in state.items() if isinstance(value, Tensor) and tuple(value.shape) == shape]
    scalars = [name for name in state if name not in elementwise]
    for name in elementwise:
        dtype = state[name].dtype
        if dtype != torch.float32:
            raise executor.unpageable(f"its state '{name}' is {dtype}, only float32 can be paged")
        # A record has its states from the first update on, see `ParameterState.names`.
        if name not in names:
            raise executor.unpageable(f"its state '{name}' does not exist after the first step")
    for name in scalars:
        value = state[name]
        if isinstance(value, Tensor) and tuple(value.shape[1:]) == shape:
            raise executor.unpageable(
                f"its state '{name}' is one tensor for all parameters of a group, stacked, and they are updated one by one",
                cure="Keep a state for each parameter, as torch.optim.Muon does",
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise executor.unpageable(
                f"its state '{name}' has shape {tuple(value.shape)} for a parameter of shape {shape}"
            )
        if any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in leaves(value)):
            raise executor.unpageable(f"its state '{name}' holds tensors inside a container")
    tensors = frozenset(name for name in scalars if isinstance(state[name], Tensor))
    return StateSchema(tuple(elementwise), tuple(scalars), tensors, shape)


def _first_steps(
    executor: OptimizerExecutor, group: Mapping[str, Any], shape: tuple[int, ...]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the state after the first step, and all of it after the last."""
    draw = _normal(torch.Generator().manual_seed(0), device=executor.device)
    weight = draw(shape, 0)
    state: dict[str, Any] = {}
    names: list[tuple[str, ...]] = []
    with _without_random_numbers(executor):
        for _ in range(_NUM_STEPS):
            (state,) = executor.run(copy_scalar(dict(group)), [weight], [draw(shape, 0)], [state])
            names.append(tuple(state))
    return names[0], state


def advanced(
    executor: OptimizerExecutor, group: Mapping[str, Any], schema: StateSchema, *, has_gradient: bool = True
) -> dict[str, Any]:
    """The entries of a group as they are after a step: some classes count in it. They are those after a step on a few zeros."""
    # Computed from zeros alone: an entry that follows from the gradients, or from how many there are, shows in `_step`.
    after: dict[str, Any] = copy_scalar(dict(group))
    weight = torch.zeros(schema.shape, dtype=torch.float32, device=executor.device)
    executor.run(after, [weight], [torch.zeros_like(weight) if has_gradient else None], [{}])
    return after


def probe(executor: OptimizerExecutor, group: Mapping[str, Any], schema: StateSchema, *, is_whole: bool) -> bool:
    """Compare steps on whole tensors, made in one call, with steps on slices of them, bit by bit: about a third of a second.

    The slices are updated one by one, so anything that looks at several elements or parameters at once (norms, trust ratios),
    at shapes, or at counters outside the state shows up; also what does so only now and then, see [Note: rules that seldom
    apply]. The global random generators are left as they were.

    Args:
        is_whole: compare with steps on each of the tensors instead.

    Returns:
        Whether any weight was changed in it.

    Raises:
        OptimizerNotPageableError: they differ, the optimizer keeps something outside its state, or, if ``is_whole``, a tensor
            whose shape is not the parameter's.
    """
    usable = _usable(group)
    takes_vectors = schema.shape == _VECTOR or not is_whole  # else the first step on slices, which are vectors, tells
    usual_shapes, odd_places, small_shapes, large_shapes = _SHAPES if takes_vectors else _MATRICES
    compare = functools.partial(_Comparison, executor, schema, usable, is_whole)
    with _without_random_numbers(executor):
        generator = torch.Generator().manual_seed(1)
        usual = _normal(generator)
        compare(usual_shapes).run(Trial("", usual, usual, _NUM_STEPS))
        if not usable.get("fused"):  # see [Note: slices and bits]: fused code has the same bits on aligned slices only
            compare(odd_places).run(Trial("", usual, usual, _NUM_STEPS))
        small = compare(small_shapes)
        has_moved = small.run(Trial("", usual, usual, _NUM_CONSECUTIVE), _LATE_COUNTS)
        for trial in _seldom_trials(generator):
            small.run(trial)
        compare(large_shapes).run(Trial("", usual, usual, 1))
    return has_moved


def probe_groups(
    executor: OptimizerExecutor, groups: Sequence[Mapping[str, Any]], schemas: Sequence[StateSchema]
) -> None:
    """Compare steps on all groups at once, with learning rates that differ, with steps on each of them alone.

    Args:
        schemas: of each group.

    Raises:
        OptimizerNotPageableError: there is a difference.
    """
    draw = _normal(torch.Generator().manual_seed(2), device=executor.device)
    usable = [_usable(group) for group in groups]
    # Rates that differ, so that a rule that mixes groups shows.
    for number, group in enumerate(usable):
        if isinstance(group.get("lr"), float):
            group["lr"] *= 1 + number / 16
    # A list of one parameter for each group.
    together = [[draw(schema.shape, 0)] for schema in schemas]
    alone = [[weight.clone()] for (weight,) in together]
    states: list[list[dict[str, Any]]] = [[{}] for _ in usable]
    states_alone: list[list[dict[str, Any]]] = [[{}] for _ in usable]
    with _without_random_numbers(executor):
        for _ in range(_NUM_STEPS):
            grads = [[draw(schema.shape, 0)] for schema in schemas]
            for number, (group, (grad,)) in enumerate(zip(usable, grads, strict=True)):
                states_alone[number] = executor.run(
                    copy_scalar(group), alone[number], [grad.clone()], states_alone[number]
                )
            states = executor.run_groups(_copied_together(usable), together, grads, states)
    for number in range(len(usable)):
        if not same_values((together[number], states[number]), (alone[number], states_alone[number])):
            raise executor.unpageable(
                f"a step on all its groups together gives group {number} other bits than a step on that group alone, so "
                "it reads other groups or a group's place in the list",
                cure="Store what it reads there as an entry of each parameter group",
            )


def _copied_together(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of groups, which share what those share: a step that writes to it in one group changes the next."""
    copies: dict[int, Any] = {}
    return [
        dict(replaced(dict(group), lambda leaf: copies.setdefault(id(leaf), copy_scalar(leaf)))) for group in groups
    ]


@contextmanager
def _without_random_numbers(executor: OptimizerExecutor) -> Iterator[None]:
    """Put all generators back afterwards, the optimizer's own too.

    Raises:
        OptimizerNotPageableError: any of them has been used.
    """
    own = [value for value in vars(executor.optimizer).values() if isinstance(value, torch.Generator)]

    def read() -> list[Any]:
        return [random_states(), [each.get_state() for each in own]]

    before = read()
    try:
        yield
        if not same_values(before, read()):
            raise executor.unpageable(
                "it draws random numbers in step(), and parameters are updated in another order than in plain torch",
                cure="Draw them in the training loop: add the noise, divided by -lr, to p.grad before the step of an SGD",
            )
    finally:
        set_random_states(before[0])
        for each, state in zip(own, before[1], strict=True):
            each.set_state(state)


@dataclass(eq=False)
class _Comparison:
    """The same steps on several whole tensors together, and on slices of them or, ``_is_whole``, each by itself."""

    _executor: OptimizerExecutor
    _schema: StateSchema
    _group: dict[str, Any]
    _is_whole: bool
    _cases: _Shapes

    def run(self, trial: Trial, late_counts: Sequence[int] = ()) -> bool:
        """Make the trial's steps, and two more from each of ``late_counts`` on. Returns whether any weight was changed.

        Raises:
            OptimizerNotPageableError: a step fails, or there is a difference.
        """
        # Whatever step() keeps on the instance would be one value for all slices: compared at the end.
        attributes = copy_scalar(vars(self._executor.optimizer))
        self._present = dict(self._group)
        self._wholes = [trial.weight(shape, 0).to(self._executor.device) for shape, _ in self._cases]
        before = [whole.clone() for whole in self._wholes]
        self._apart = [self._formed(whole) for whole in self._wholes]
        self._whole_states: list[dict[str, Any]] = [{} for _ in self._wholes]
        self._apart_states: list[dict[str, Any]] = [{} for _ in self._wholes]
        for step in range(trial.num_steps):
            self._make_step(trial, step)
        self._require_equal(trial.what)
        # Counts may also be entries of the group (schedule-free optimizers' "k").
        moved = {name: value for name, value in self._present.items() if not same_values(value, self._group.get(name))}
        counts = [*(_counts(state) for state in self._whole_states), _counts(moved)]
        for count in late_counts:
            if not any(counts):  # without a counter, no rule can follow from the number of steps
                break
            for states in (self._whole_states, self._apart_states):
                for counting, names in zip((*states, self._present), counts, strict=True):
                    for name in names:
                        now = counting[name]
                        counting[name] = torch.full_like(now, count) if isinstance(now, Tensor) else type(now)(count)
            for step in range(2):
                self._make_step(trial, step)
            self._require_equal(f"from the count of {count} on")
        if not same_values(attributes, vars(self._executor.optimizer)):
            raise self._executor.unpageable("its step() keeps values on the optimizer object itself")
        return not same_values(before, self._wholes)

    def _make_step(self, trial: Trial, step: int) -> None:
        grads = [trial.gradient(shape, step).to(self._executor.device) for shape, _ in self._cases]
        self._after = advanced(self._executor, self._present, self._schema)
        for index, (weight, (_, cuts)) in enumerate(zip(self._apart, self._cases, strict=True)):
            self._apart_states[index] = self._step_apart(
                weight, self._formed(grads[index]), self._apart_states[index], cuts
            )
        self._whole_states = self._step(self._wholes, grads, self._whole_states)
        self._present = self._after

    def _formed(self, values: Tensor) -> Tensor:
        """A copy in the shape in which the tensor is updated by itself."""
        return values.clone() if self._is_whole else values.clone().reshape(-1)

    def _step_apart(self, weight: Tensor, grad: Tensor, state: dict[str, Any], cuts: list[int]) -> dict[str, Any]:
        elementwise = self._schema.elementwise
        places: list[Any] = [...] if self._is_whole else [slice(*ends) for ends in pairwise(cuts)]
        parts: list[dict[str, Any]] = []
        for place in places:
            # Slices of a parameter all start from its scalars as they were before the step.
            given = {name: value[place] if name in elementwise else copy_scalar(value) for name, value in state.items()}
            parts += self._step([weight[place]], [grad[place]], [given])
        if self._is_whole:
            self._check_shapes(tuple(weight.shape), parts[0])
            return parts[0]
        return {
            name: torch.cat([part[name] for part in parts]) if name in elementwise else value
            for name, value in parts[-1].items()
        }

    def _check_shapes(self, expected: tuple[int, ...], state: Mapping[str, Any]) -> None:
        shaped = {
            name: tuple(value.shape)
            for name, value in state.items()
            if isinstance(value, Tensor) and value.numel() != 1
        }
        other = next((name for name, shape in shaped.items() if shape != expected), None)
        if other is not None:
            raise self._executor.unpageable(
                f"its state '{other}' has shape {shaped[other]} for a parameter of shape {expected}"
            )
        if math.prod(expected) != 1 and shaped.keys() != set(self._schema.elementwise):
            raise self._executor.unpageable(
                f"which state it keeps depends on the shape of the parameter, here {expected}"
            )

    def _step(self, weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        used = copy_scalar(self._present)
        try:
            states = self._executor.run(used, weights, grads, states)
        except OptimizerNotPageableError:
            raise
        except Exception as error:
            raise self._executor.unpageable(f"a trial step failed ({type(error).__name__}: {error})") from error
        # Quantized states (torchao, bitsandbytes) are tensor subclasses.
        for name, value in (item for state in states for item in state.items()):
            if isinstance(value, Tensor) and type(value) is not Tensor:
                raise self._executor.unpageable(
                    f"its state '{name}' is a {type(value).__name__}, and only dense tensors can be stored",
                    cure='Take an optimizer with plain states: config key "infinity.state_dtype" stores them in fewer bits',
                )
        if not same_values(used, self._after):
            names = [name for name in used | self._after if not same_values(used.get(name), self._after.get(name))]
            raise self._executor.unpageable(
                f"its step() computes an entry of a parameter group, '{names[0]}', from all parameters of the group or from "
                "their number, and parameters are updated one after the other",
                cure="Take AdamW with a schedule of the learning rate, or a schedule-free one. In your own class, let the entry "
                "follow from the entries before alone",
            )
        return states

    def _require_equal(self, what: str) -> None:
        for whole, apart, whole_state, apart_state in zip(
            self._wholes, self._apart, self._whole_states, self._apart_states, strict=True
        ):
            different = [] if same_values(self._formed(whole), apart) else ["the weights"]
            if set(whole_state) != set(apart_state):
                different.append("the names of the state")
            else:
                different += [
                    f"state '{name}'"
                    for name, value in whole_state.items()
                    if not same_values(
                        self._formed(value) if name in self._schema.elementwise else value, apart_state[name]
                    )
                ]
            if different:
                shape = tuple(whole.shape)
                where = f"on slices and on the whole of a tensor of shape {shape}"
                why = "it mixes elements or depends on their position"
                if self._is_whole:
                    where = f"on a tensor of shape {shape} alone and beside others"
                    why = "the update of a parameter depends on other parameters"
                steps = f"steps {what} {where}" if what else f"steps {where}"
                raise self._executor.unpageable(f"{steps} gave different bits in {', '.join(different)}: {why}")


def _counts(state: Mapping[str, Any]) -> list[str]:
    """Names of what counts steps: it is as large as the number of steps so far, or one off."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, Tensor | int | float)
        and not isinstance(value, bool)
        and (not isinstance(value, Tensor) or (value.numel() == 1 and not value.is_complex()))
        and abs(float(value) - _NUM_CONSECUTIVE) <= 1
    ]


def _usable(group: Mapping[str, Any]) -> dict[str, Any]:
    # With a learning rate of zero (a warm-up's first step) any two runs would agree, and with NaN as well.
    usable = dict(group)
    lr = usable.get("lr")  # other hyperparameters stay: they decide which rule is tried
    if isinstance(lr, Tensor | float | int | numpy.generic) and (float(lr) == 0 or not math.isfinite(float(lr))):
        usable["lr"] = torch.full_like(lr, 1e-3) if isinstance(lr, Tensor) else 1e-3
    return usable


# ---------------------------------------------------------------------------------------- weights and gradients of trials


def _normal(generator: torch.Generator, scale: float = 1.0, device: torch.device | str = "cpu") -> _Draw:
    """Normal numbers. Explicit dtype and device: users set others as defaults to build their models with."""

    def draw(shape: tuple[int, ...], step: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * scale
        return values.to(device)

    return draw


def _seldom_trials(generator: torch.Generator) -> Iterator[Trial]:
    """Trials with unusual numbers, of a few steps each."""
    usual = _normal(generator)
    yield Trial("with gradients of zeros", usual, _zeros, 3)
    yield Trial("with weights of zeros", _zeros, usual, 2)
    for scale in (1e-8, 1e4, 1e15):
        yield Trial(f"with gradients around {scale:g}", usual, _normal(generator, scale), 2)
    for scale in (1e-8, 1e4):
        yield Trial(f"with weights around {scale:g}", _normal(generator, scale), usual, 2)
    for magnitude in _MAGNITUDES:
        yield Trial(f"with gradients of {magnitude:g} among zeros", usual, functools.partial(_spikes, magnitude), 2)
        yield Trial(f"with weights of {magnitude:g} among zeros", functools.partial(_spikes, magnitude), usual, 2)
    for magnitude in (float("inf"), float("nan")):
        yield Trial(
            f"with one gradient of {magnitude} among others", usual, functools.partial(_once, usual, magnitude), 2
        )


def _zeros(shape: tuple[int, ...], step: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _spikes(magnitude: float, shape: tuple[int, ...], step: int) -> Tensor:
    values = _zeros(shape, step)
    values.view(-1)[0] = magnitude / 7  # in another slice: the norm of the whole is that of no slice
    values.view(-1)[-1] = magnitude
    return values


def _once(others: _Draw, value: float, shape: tuple[int, ...], step: int) -> Tensor:
    values = others(shape, step)
    if step == 0:  # the next step, with usual gradients, shows how far the states have carried it
        values.view(-1)[-1] = value
    return values
