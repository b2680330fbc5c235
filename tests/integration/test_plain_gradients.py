"""In the plain loop, ``p.grad`` between backward and step is the gradient, or raises: never silently nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import AccessError, OtherNumbersWarning
from tests.exactness.case import loss_of
from tests.exactness.lockstep import BF16, Lockstep


def _weights(both: Lockstep) -> dict[str, torch.Tensor]:
    params = dict(both.model.named_parameters())
    with infinity.GatheredParameters(list(params.values())):
        return {fqn: param.detach().clone() for fqn, param in params.items()}


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, BF16])
def test_grad_is_the_gradient_or_raises_with_a_cure(changes: dict[str, Any], tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=changes) as both:
        assert all(param.grad is None for param in both.model.parameters())
        both.plain_step(0)
        both.plain_backward(1)
        num_seen = 0
        for fqn, param in both.model.named_parameters():
            try:
                gradient = param.grad
            except AccessError as error:
                assert fqn in str(error)
                continue
            expected = both.reference.main[fqn].grad
            assert gradient is not None and expected is not None, fqn
            assert torch.equal(gradient.float(), expected), fqn
            num_seen += 1
        assert num_seen == len(both.reference.main), "the budget holds all gradients here"
        both.plain_update()
        assert all(param.grad is None for param in both.model.parameters())
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, BF16])
@pytest.mark.parametrize("kind", ["norm", "value"])
def test_clipping_by_hand_clips_exactly_or_raises(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(3):
            both.plain_backward(step)
            main = list(both.reference.main.values())
            if kind == "norm":
                expected = torch.nn.utils.clip_grad_norm_(main, 0.05)
                both.note(f"norm {step}", expected, torch.nn.utils.clip_grad_norm_(both.model.parameters(), 0.05))
            else:
                torch.nn.utils.clip_grad_value_(main, 1e-3)
                torch.nn.utils.clip_grad_value_(both.model.parameters(), 1e-3)
            both.plain_update()
        both.require_equal()


def test_clipping_by_hand_with_spilled_gradients_is_never_silently_nothing(tmp_path: Path) -> None:
    probe = {"infinity": {"host_memory_budget": 1}}
    with pytest.raises(infinity.errors.BudgetTooSmallError) as refused:
        Lockstep.start(tmp_path, changes=probe)
    tight = {"infinity": {"host_memory_budget": refused.value.minimum_bytes}}
    with Lockstep.start(tmp_path, changes=tight) as both:
        both.plain_backward(0)
        expected = torch.nn.utils.clip_grad_norm_(list(both.reference.main.values()), 0.05)
        try:
            norm = torch.nn.utils.clip_grad_norm_(both.model.parameters(), 0.05)
        except AccessError as error:
            assert "gradient_clipping" in str(error) or "host_memory_budget" in str(error)
            return
        both.note("norm", expected, norm)
        both.plain_update()
        both.require_equal()


def test_gradients_scaled_in_place_are_the_ones_that_count(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        for step in range(2):
            both.plain_backward(step)
            for main in both.reference.main.values():
                assert main.grad is not None
                main.grad.mul_(0.5)
            for param in both.model.parameters():
                assert param.grad is not None
                param.grad.mul_(0.5)
            both.plain_update()
        both.require_equal()


def test_a_gradient_that_is_assigned_counts(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.plain_step(0)
        both.plain_backward(1)
        names = list(both.reference.main)
        params = dict(both.model.named_parameters())
        both.reference.main[names[0]].grad = None
        params[names[0]].grad = None
        both.reference.main[names[1]].grad = torch.ones_like(both.reference.main[names[1]])
        params[names[1]].grad = torch.ones(params[names[1]].shape)
        both.plain_update()
        both.require_equal()


def test_a_sparse_gradient_that_is_assigned_counts_as_a_dense_one(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.plain_step(0)
        both.plain_backward(1)
        fqn, param = next(iter(both.model.named_parameters()))
        values = torch.zeros(param.shape)
        values[0] = 0.5
        with pytest.warns(OtherNumbersWarning, match=fqn):
            param.grad = values.to_sparse()
        both.reference.main[fqn].grad = values
        assert torch.equal(param.grad, values)
        both.plain_update()
        both.require_equal()


def test_hooks_of_the_user_on_a_parameter_change_its_gradient(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        name = "blocks.1.up.weight"
        dict(both.reference.model.named_parameters())[name].register_hook(lambda gradient: gradient * 3)
        dict(both.model.named_parameters())[name].register_hook(lambda gradient: gradient * 3)
        for step in range(2):
            both.plain_step(step)
        both.require_equal()


def test_autograd_grad_is_exact_or_raises(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.plain_step(0)
        batch = both.batch(1)
        names = ["blocks.0.up.weight", "blocks.2.down.weight"]
        reference_params = dict(both.reference.model.named_parameters())
        params = dict(both.model.named_parameters())
        expected = torch.autograd.grad(both.reference.forward(batch), [reference_params[name] for name in names])
        loss = loss_of(both.model(**batch))
        try:
            actual = torch.autograd.grad(loss, [params[name] for name in names])
        except AccessError:
            return
        for name, want, got in zip(names, expected, actual, strict=True):
            both.note(name, want, got)
        both.plain_step(2)
        both.require_equal()


def test_a_penalty_on_weights_outside_the_forward_is_exact_or_raises(tmp_path: Path) -> None:
    """Code that reads a weight after the forward, with grad: never zeros, never garbage."""
    with Lockstep.start(tmp_path) as both:
        both.plain_step(0)
        batch = both.batch(1)
        name = "blocks.1.up.weight"
        weight = dict(both.model.named_parameters())[name]
        loss = loss_of(both.model(**batch))
        try:
            loss = loss + weight.square().sum()
        except AccessError as error:
            assert name in str(error)
            return
        expected = both.reference.forward(batch)
        expected = expected + dict(both.reference.model.named_parameters())[name].square().sum()
        both.note("penalized loss", expected, loss)
        both.reference.backward(expected)
        loss.backward()
        both.plain_update()
        both.require_equal()
