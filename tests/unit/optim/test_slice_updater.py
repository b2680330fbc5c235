"""Slices against the whole, bit by bit, for every optimizer that is taken without a trial run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from infinity.errors import OptimizerNotPageableError
from infinity.optim.classes import Lamb, Lion, OneBitAdam, UncorrectedAdam
from infinity.optim.probe import SLICE_ALIGNMENT
from infinity.optim.registry import is_verified
from infinity.optim.slice_updater import SliceUpdater, check_parts
from infinity.optim.wrapped_optimizer import wrap_optimizer
from tests.unit.optim.slices import cut, equal_bits, page_aligned

_NUM_STEPS = 3
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (63,), (64,), (65,), (5, 7, 9), (1000, 37), (100003,))

_PLAIN: list[dict[str, Any]] = [{}]
_FOREACH = [*_PLAIN, {"foreach": True}]
_FUSED = [*_FOREACH, {"fused": True}]
_DECAY = {"weight_decay": 0.1}
_MAXIMIZE = {"maximize": True}
_BY_CLASS: list[tuple[type[Optimizer], list[dict[str, Any]], list[dict[str, Any]]]] = [
    (AdamW, [{}, {"amsgrad": True, "weight_decay": 0.3}, {**_MAXIMIZE, "betas": (0.7, 0.9)}], _FUSED),
    (Adam, [_DECAY, {"amsgrad": True}, {**_MAXIMIZE, **_DECAY}], _FUSED),
    (
        SGD,
        [{}, {"momentum": 0.9, "dampening": 0.3, **_DECAY}, {"momentum": 0.9, "nesterov": True, **_MAXIMIZE}],
        _FUSED,
    ),
    (Adagrad, [{}, {"lr_decay": 0.1, **_DECAY, "initial_accumulator_value": 0.3}, _MAXIMIZE], _FUSED),
    (RMSprop, [{}, {"centered": True}, {"momentum": 0.9, "centered": True, **_DECAY, **_MAXIMIZE}], _FOREACH),
    (NAdam, [{}, {**_DECAY, "decoupled_weight_decay": True}], _FOREACH),
    # Its first steps take another branch than later ones; the small beta reaches that one within the test's steps.
    (RAdam, [{}, {"betas": (0.9, 0.5), **_DECAY}], _FOREACH),
    (Adamax, [_DECAY], _FOREACH),
    (Adadelta, [_DECAY], _FOREACH),
    (ASGD, [_DECAY, {"t0": 1}], _FOREACH),
    (Rprop, [{}], _FOREACH),
    (Lion, [_DECAY, _MAXIMIZE], _PLAIN),
    (UncorrectedAdam, [{}, _DECAY, {**_DECAY, "decoupled_weight_decay": False}], _PLAIN),
    (OneBitAdam, [{**_DECAY, "freeze_step": 1}, {"bias_correction": False, "freeze_step": 2}], _PLAIN),
]
_CASES = [
    pytest.param(cls, {"lr": 3e-3, **arguments, **kind}, id=f"{cls.__name__}-{arguments}-{kind}".replace(" ", ""))
    for cls, options, kinds in _BY_CLASS
    for arguments in options
    for kind in kinds
]


@pytest.fixture
def restore_num_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def _tensors(seed: int, *, is_gradient: bool, device: str = "cpu") -> list[Tensor]:
    return [tensor.to(device, copy=True) for tensor in _drawn(seed, is_gradient)]


@cache
def _drawn(seed: int, is_gradient: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    if is_gradient:
        for tensor in tensors:
            # Gradients of all magnitudes, zeros of both signs, denormals.
            tensor.mul_(10.0 ** torch.randint(-12, 3, tensor.shape, generator=generator))
            tensor.view(-1)[::11] = 0.0
            tensor.view(-1)[5::13] = -0.0
            tensor.view(-1)[7::17] = 1e-40
    return tensors


def _reference(
    cls: type[Optimizer], arguments: dict[str, Any], device: str = "cpu"
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Plain torch on whole parameters, all in one optimizer."""
    params = [torch.nn.Parameter(weight) for weight in _tensors(0, is_gradient=False, device=device)]
    make: Any = cls
    optimizer = make(params, **arguments)
    for step in range(_NUM_STEPS):
        for param, grad in zip(params, _tensors(step + 1, is_gradient=True, device=device), strict=True):
            param.grad = grad
        _set_lr(optimizer, step)
        optimizer.step()
    return [param.detach() for param in params], [optimizer.state[param] for param in params]


def _set_lr(optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 3e-3 / (1 + step)


def _updater(cls: type[Optimizer], arguments: dict[str, Any], device: str = "cpu") -> tuple[SliceUpdater, Optimizer]:
    make: Any = cls
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32, device=device))
    wrapped_optimizer = wrap_optimizer(make([param], **arguments), [("weight", param)], device)
    return SliceUpdater(wrapped_optimizer), wrapped_optimizer.optimizer


class _Paged:
    """A parameter in slices: weight, gradient and each state in a page-aligned buffer at a multiple of 64 elements."""

    def __init__(self, updater: SliceUpdater, weight: Tensor, offset: int, num_pieces: int) -> None:
        self.updater = updater
        self.numel = weight.numel()
        self.offset = offset * SLICE_ALIGNMENT
        self.slices = cut(self.numel, num_pieces, seed=offset)
        self.weight = self.place(weight)
        self.state: dict[str, Tensor] | None = None
        self.scalars: dict[str, Any] = {}

    def place(self, tensor: Tensor) -> Tensor:
        size = self.offset + self.numel
        buffer = page_aligned(size) if tensor.device.type == "cpu" else torch.empty(size, device=tensor.device)
        return buffer[self.offset :].copy_(tensor.reshape(-1))

    def update(self, group: dict[str, Any], grad: Tensor) -> None:
        grad = self.place(grad)
        made: list[dict[str, Tensor]] = []
        for param_slice in self.slices:
            state = (
                {name: tensor[param_slice] for name, tensor in self.state.items()} if self.state is not None else None
            )
            tensors, scalars = self.updater.update(
                group, self.weight[param_slice], grad[param_slice], state, self.scalars
            )
            made.append(tensors)
        if self.state is None:
            self.state = {name: self.place(torch.cat([part[name] for part in made])) for name in made[0]}
        self.scalars = scalars


def _check_pieces(
    cls: type[Optimizer],
    arguments: dict[str, Any],
    expected: tuple[list[Tensor], list[dict[str, Any]]],
    device: str = "cpu",
) -> None:
    updater, optimizer = _updater(cls, arguments, device)
    paged = [
        _Paged(updater, weight, offset=index * 3, num_pieces=4)
        for index, weight in enumerate(_tensors(0, is_gradient=False, device=device))
    ]
    for step in range(_NUM_STEPS):
        _set_lr(optimizer, step)
        for param, grad in zip(paged, _tensors(step + 1, is_gradient=True, device=device), strict=True):
            param.update(dict(optimizer.param_groups[0]), grad)
    wrong = []
    for shape, param, weight, state in zip(_SHAPES, paged, *expected, strict=True):
        if not equal_bits(param.weight, weight.reshape(-1)):
            wrong.append(f"weight {shape}")
        found = {**(param.state or {}), **param.scalars}
        assert found.keys() == state.keys()
        for name, value in state.items():
            expected_value = value.reshape(-1) if name in updater.state_names(0) else value
            if not equal_bits(found[name], expected_value):
                wrong.append(f"{name} {shape}")
    assert wrong == []


@pytest.mark.deep(but=6)
@pytest.mark.parametrize(("cls", "arguments"), _CASES)
def test_pieces_have_the_bits_of_the_whole(
    cls: type[Optimizer], arguments: dict[str, Any], restore_num_threads: None
) -> None:
    """Whatever the numbers of threads: torch splits tensors of this size between them at odd places."""
    assert is_verified(cls)
    torch.set_num_threads(2)
    expected = _reference(cls, arguments)
    torch.set_num_threads(1)
    _check_pieces(cls, arguments, expected)
    alone = _reference(cls, arguments)
    assert all(equal_bits(one, other) for one, other in zip(alone[0], expected[0], strict=True))
    torch.set_num_threads(2)
    _check_pieces(cls, arguments, alone)


@pytest.mark.gpu
@pytest.mark.parametrize(("cls", "arguments"), _CASES)
def test_pieces_have_the_bits_of_the_whole_on_a_gpu(cls: type[Optimizer], arguments: dict[str, Any]) -> None:
    _check_pieces(cls, arguments, _reference(cls, arguments, "cuda"), "cuda")


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("cls", "arguments"),
    [(AdamW, {}), (Adam, {"amsgrad": True}), (SGD, {"momentum": 0.9, "nesterov": True}), (Adagrad, {})],
    ids=["AdamW", "Adam", "SGD", "Adagrad"],
)
def test_fused_kernels_on_many_pieces(
    cls: type[Optimizer], arguments: dict[str, Any], restore_num_threads: None
) -> None:
    """Cut elsewhere, fused kernels differ in one of a thousand elements next to a cut: this many would show it."""
    arguments = {"lr": 1e-2, "fused": True, **_DECAY, **arguments}
    numel = (1 << 18) + 5
    generator = torch.Generator().manual_seed(7)
    weight, *grads = (torch.randn(numel, generator=generator) for _ in range(3))
    whole = torch.nn.Parameter(weight.clone())
    make: Any = cls
    reference = make([whole], **arguments)
    for grad in grads:
        whole.grad = grad.clone()
        reference.step()
    torch.set_num_threads(1)  # fused kernels wake all threads for a few elements, which takes longer than the update
    updater, optimizer = _updater(cls, arguments)
    paged = _Paged(updater, weight, offset=1, num_pieces=3000)
    for grad in grads:
        paged.update(dict(optimizer.param_groups[0]), grad)
    assert len(paged.slices) == 3000
    assert equal_bits(paged.weight, whole)


def test_tensor_hyperparameters_are_taken_at_the_snapshot() -> None:
    """Torch's schedulers fill a tensor lr in place; an update asked for before must not see that."""
    param = torch.nn.Parameter(torch.ones(3))
    lr = torch.tensor(0.5)
    wrapped_optimizer = wrap_optimizer(SGD([param], lr=lr), [("weight", param)], "cpu")
    updater = SliceUpdater(wrapped_optimizer)
    group = wrapped_optimizer.read().values[0]
    lr.fill_(100.0)
    weight = torch.ones(3)
    updater.update(group, weight, torch.ones(3), None, {})
    assert weight.tolist() == [0.5, 0.5, 0.5]
    assert group["lr"] is not lr and param.tolist() == [1.0, 1.0, 1.0]


class _Replacing(Optimizer):
    """Writes new tensors where torch's optimizers change the old ones."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    state["total"] = state.get("total", torch.zeros_like(param)) + param.grad
                    param.data = param.data - group["lr"] * state["total"] / state["count"]


def test_an_optimizer_that_replaces_tensors() -> None:
    updater, optimizer = _updater(_Replacing, {})
    group = dict(optimizer.param_groups[0])
    weight, total = torch.randn(100), torch.zeros(100)
    whole = torch.nn.Parameter(weight.clone())
    reference = _Replacing([whole])
    scalars: dict[str, Any] = {"count": 0}
    for _ in range(3):
        whole.grad = torch.randn(100)
        _, scalars = updater.update(group, weight, whole.grad.clone(), {"total": total}, scalars)
        reference.step()
    assert equal_bits(weight, whole)
    assert equal_bits(total, reference.state[whole]["total"])
    assert scalars == {"count": 3}


def test_state_that_appears_later_is_refused() -> None:
    """E.g. momentum set from zero to something by hand, in the middle of a training."""
    updater, optimizer = _updater(SGD, {"lr": 0.1})
    group = {**optimizer.param_groups[0], "momentum": 0.9}
    with pytest.raises(OptimizerNotPageableError, match="'momentum_buffer' appeared after"):
        updater.update(group, torch.ones(3), torch.ones(3), {}, {})
    with pytest.raises(OptimizerNotPageableError, match="'momentum_buffer' appeared after"):
        updater.update(group, torch.ones(3), torch.ones(3), None, {})


def test_ranks_with_parts_of_the_states_are_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    for optimizer, is_refused in ((Lamb([param]), True), (torch.optim.AdamW([param]), False)):
        wrapped_optimizer = wrap_optimizer(optimizer, [("weight", param)], "cpu")
        updater = SliceUpdater(wrapped_optimizer)
        check_parts(wrapped_optimizer, updater, 0, is_divided=False)
        if is_refused:
            with pytest.raises(OptimizerNotPageableError, match=r"Lamb .*stage 2 .*Set zero_optimization\.stage to 0"):
                check_parts(wrapped_optimizer, updater, 2, is_divided=True)
        else:
            check_parts(wrapped_optimizer, updater, 2, is_divided=True)
