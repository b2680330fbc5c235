"""What users do with ``p.grad`` between backward and step: the same as in plain torch, in every budget and mode."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import AccessError, OtherNumbersWarning, StepError
from tests.exactness.case import Case
from tests.exactness.lockstep import BF16, PLAIN, Lockstep, engine_on_nvme
from tests.exactness.shapes.blocks import WIDTH, Net, token_batch
from tests.twins import MODES, Side, Twins, config_for, require_same

Scenario = Callable[[Side], None]
_SCENARIOS: dict[str, Scenario] = {}


def _scenario(function: Scenario) -> Scenario:
    _SCENARIOS[function.__name__] = function
    return function


def _finish(side: Side) -> None:
    side.optimizer.step()
    side.optimizer.zero_grad()


@_scenario
def clipping_by_norm_and_by_value(side: Side) -> None:
    for number in range(3):
        side.loss(number).backward()
        side.note(torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.05, foreach=None if number else False))
        torch.nn.utils.clip_grad_value_(side.model.parameters(), 1e-3)
        _finish(side)


@_scenario
def scaling_as_mixed_precision_does(side: Side) -> None:
    """Its kernel writes to all gradients and counts that in no version."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number in range(4):
        loss = side.loss(number) * (float("inf") if number == 2 else 1.0)
        scaler.scale(loss).backward()
        if number == 3:
            scaler.unscale_(side.optimizer)
            side.note(torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.05))
        scaler.step(side.optimizer)
        scaler.update()
        side.note(torch.tensor(scaler.get_scale()))
        side.optimizer.zero_grad()


@_scenario
def gradients_in_one_vector_of_the_users(side: Side) -> None:
    """They stay views of it: backward adds to it, and ``zero_grad(set_to_none=False)`` clears it."""
    parameters = side.parameters
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    for number in range(3):
        side.loss(number).backward()
        side.note(flat)
        flat.mul_(0.3)
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=False)
        side.note(flat)


@_scenario
def putting_gradients_aside(side: Side) -> None:
    for number in range(2):
        side.loss(number).backward()
        aside = [parameter.grad for parameter in side.parameters]
        for parameter in side.parameters:
            parameter.grad = None
        side.loss(number + 10).backward()
        for parameter, gradient in zip(side.parameters, aside, strict=True):
            parameter.grad += gradient
        _finish(side)


@_scenario
def accumulating_without_zero_grad(side: Side) -> None:
    for number in range(3):
        side.loss(number).backward()
        side.optimizer.step()
    side.note_gradients()
    side.optimizer.step()
    side.note_gradients()


@_scenario
def zeros_in_place_of_none(side: Side) -> None:
    side.step(0)
    for number in range(2):
        side.loss(number).backward()
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=False)
        side.note_gradients()
    side.optimizer.step()
    side.loss(7).backward()
    side.optimizer.step()
    side.model.zero_grad(set_to_none=False)
    side.optimizer.step()


@_scenario
def hooks_after_accumulation_that_write(side: Side) -> None:
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    def clamp(parameter: torch.Tensor) -> None:
        parameter.grad = parameter.grad.clamp(-1e-3, 1e-3)

    for number, parameter in enumerate(side.parameters):
        parameter.register_post_accumulate_grad_hook(halve if number % 2 else clamp)
    for step in range(2):
        for micro_batch in range(2):
            side.loss(2 * step + micro_batch).backward()
        _finish(side)


@_scenario
def hooks_that_read_the_gradients_of_others(side: Side) -> None:
    seen: list[torch.Tensor | None] = []

    def read_all(*_: Any) -> None:
        seen.extend(None if p.grad is None else p.grad.clone() for p in side.parameters)

    side.parameters[0].register_post_accumulate_grad_hook(read_all)
    side.parameters[3].register_post_accumulate_grad_hook(read_all)
    side.model.blocks[1].register_full_backward_hook(read_all)
    for step in range(2):
        for micro_batch in range(2):
            side.loss(2 * step + micro_batch).backward()
        _finish(side)
    side.note(*seen)


@_scenario
def two_backwards_through_one_graph(side: Side) -> None:
    loss = side.loss(0)
    loss.backward(retain_graph=True)
    side.note_gradients()
    loss.backward()
    side.note_gradients()
    _finish(side)


@_scenario
def derivatives_that_are_returned(side: Side) -> None:
    for number in range(2):
        found = torch.autograd.grad(side.loss(number), side.parameters)
        side.note(*found)
        for parameter, gradient in zip(side.parameters, found, strict=True):
            parameter.grad = gradient
        _finish(side)
    unused = nn.Parameter(torch.ones(2))
    inputs = [*side.parameters, unused]
    side.note(*torch.autograd.grad(side.loss(5), inputs, materialize_grads=True))
    side.note(*torch.autograd.grad(side.loss(5), inputs, allow_unused=True))


@_scenario
def a_penalty_on_derivatives(side: Side) -> None:
    for number in range(2):
        with torch.no_grad():
            torch._foreach_mul_(side.parameters, 0.5)
        loss = side.loss(number)
        found = torch.autograd.grad(loss, side.parameters, create_graph=True)
        (loss + sum(gradient.square().sum() for gradient in found)).backward()
        side.note_gradients()
        _finish(side)


@_scenario
def backward_into_some_parameters(side: Side) -> None:
    half = len(side.parameters) // 2
    for number in range(2):
        side.loss(number).backward(inputs=side.parameters[:3])
        side.note_gradients()
        _finish(side)
        loss = side.loss(number)
        loss.backward(inputs=side.parameters[:half], retain_graph=True)
        loss.backward(inputs=side.parameters[half:])
        side.note_gradients()
        _finish(side)


@_scenario
def gradients_with_a_graph(side: Side) -> None:
    for number in range(2):
        side.loss(number).backward(create_graph=True)
        gradients = [parameter.grad for parameter in side.parameters]
        curvature = torch.autograd.grad(
            gradients, side.parameters, grad_outputs=[torch.ones_like(gradient) for gradient in gradients]
        )
        side.note(*curvature)
        side.note(torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.05))
        _finish(side)
        side.loss(number).backward(create_graph=True)
        side.loss(number + 5).backward(create_graph=True)
        side.loss(number + 6).backward()
        sum(parameter.grad.square().sum() for parameter in side.parameters).backward()
        side.note_gradients()
        _finish(side)


@_scenario
def tensors_of_the_users_own(side: Side) -> None:
    for number in range(2):
        own = [torch.full(parameter.shape, 0.1) for parameter in side.parameters]
        for parameter, gradient in zip(side.parameters, own, strict=True):
            parameter.grad = gradient
            assert parameter.grad is gradient
            gradient.mul_(0.5)
        side.loss(number).backward()
        for gradient in own:
            gradient.mul_(0.5)
        side.note(*own)
        side.note_gradients()
        _finish(side)
        side.note(*own)


@_scenario
def perturbing_the_weights(side: Side) -> None:
    gathered: Any = infinity.GatheredParameters if side.engine else lambda _: contextlib.nullcontext()
    for number in range(2):
        side.loss(number).backward()
        norm = torch.stack([parameter.grad.norm() for parameter in side.parameters]).norm()
        before = []
        for parameter in side.parameters:
            with torch.no_grad(), gathered([parameter]):
                before.append(parameter.detach().clone())
                parameter.add_(parameter.grad * (0.05 / norm))
        side.optimizer.zero_grad()
        side.loss(number).backward()
        for parameter, values in zip(side.parameters, before, strict=True):
            with torch.no_grad(), gathered([parameter]):
                parameter.copy_(values)
        _finish(side)


@_scenario
def operations_of_all_kinds(side: Side) -> None:
    for number in range(2):
        side.loss(number).backward()
        first, second, third, fourth, fifth, *_ = side.parameters
        packed = io.BytesIO()
        torch.save(first.grad, packed)
        packed.seek(0)
        side.note(torch.load(packed), copy.deepcopy(first.grad), torch.tensor(first.grad.tolist()))
        first.grad[0] = 0
        first.grad.view(-1)[1:3] += 1
        second.grad.numpy()[:] *= 0.5
        torch.mul(third.grad, 2, out=third.grad)
        fourth.grad.data = fourth.grad.data * 3
        fifth.grad.data /= 3
        gradients = [parameter.grad for parameter in side.parameters]
        torch._foreach_add_(gradients, gradients, alpha=0.5)
        side.note(*torch._foreach_norm(gradients), torch.cat([gradient.flatten() for gradient in gradients]))
        del gradients
        side.note_gradients()
        _finish(side)


@_scenario
def writing_to_what_a_step_may_still_use(side: Side) -> None:
    for number in range(2):
        side.loss(number).backward()
        held = [parameter.grad for parameter in side.parameters]
        side.optimizer.step()
        for gradient in held:
            gradient.fill_(1e3)
        side.note_gradients()
        side.optimizer.zero_grad()
        for gradient in held:
            gradient.fill_(1e4)
        side.loss(number + 5).backward()
        held = [parameter.grad.data for parameter in side.parameters]
        _finish(side)
        for gradient in held:
            gradient.fill_(1e4)


@_scenario
def two_backwards_of_the_engine(side: Side) -> None:
    for number in range(3):
        side.backward(side.loss(number))
        side.backward(side.loss(number + 10))
        side.engine_step()


@_scenario
def gradients_that_are_assigned_before_the_engines_step(side: Side) -> None:
    for number in range(2):
        for parameter in side.parameters:
            parameter.grad = torch.empty_like(parameter)
            parameter.grad.fill_(0.01 * number)
        side.engine_step()


@_scenario
def all_in_inference_mode(side: Side) -> None:
    """torch gives tensors that are made there no version, and refuses to write to them elsewhere."""
    for number in range(2):
        side.loss(number).backward()
        with torch.inference_mode():
            side.note_gradients()
            side.parameters[1].grad.mul_(0.5)
            side.note(*side.model.state_dict().values())
            side.note(*(value + 0 for entry in side.optimizer.state.values() for value in entry.values()))
        _finish(side)
        with torch.inference_mode():  # no gradient is in memory
            for parameter in side.parameters:
                parameter.grad = torch.ones_like(parameter)
        _finish(side)


@pytest.mark.deep(but=1)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(
    ("name", "mode"),
    # For time, each in three of the five modes.
    [(name, list(MODES)[(number + turn) % 5]) for number, name in enumerate(_SCENARIOS) for turn in (0, 1, 3)],
)
def test_as_in_plain_torch(name: str, mode: str, tmp_path: Path) -> None:
    require_same(_SCENARIOS[name], tmp_path, mode)


class _Reversible(torch.autograd.Function):
    """Keeps its output only. Its parameters get their gradients inside its backward, and none from it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inner: nn.Module, *parameters: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        ctx.inner = inner
        y = torch.cat([first, second + inner(first)], -1)
        ctx.save_for_backward(y)
        ctx.num_parameters = len(parameters)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        first = y.chunk(2, -1)[0].detach().requires_grad_(True)
        from_first, from_second = gradient.chunk(2, -1)
        with torch.enable_grad():
            result = ctx.inner(first)
        torch.autograd.backward(result, from_second)
        return torch.cat([from_first + first.grad, from_second], -1), None, *[None] * ctx.num_parameters


class _ReversibleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH // 2, 40), nn.Tanh(), nn.Linear(40, WIDTH // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reversible.apply(x, self.inner, *self.parameters())


class _ForceNet(Net):
    """Differentiates inside its forward, as models of molecules do."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = self.embedding(tokens).detach().requires_grad_(True)
        energy = self.head(self.norm(self.body(places))).square().mean()
        (force,) = torch.autograd.grad(energy, places, create_graph=True)
        return energy + (force - 1).square().mean()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", ["plain", "engine"])
@pytest.mark.parametrize("kind", ["reversible", "force"])
def test_gradients_made_inside_the_model(kind: str, loop: str, mode: str, tmp_path: Path) -> None:
    build = (lambda c: Net(c, make_block=_ReversibleBlock)) if kind == "reversible" else _ForceNet

    def scenario(side: Side) -> None:
        for number in range(3):
            if loop == "plain":
                side.step(number)
            else:
                side.backward(side.loss(number))
                side.engine_step()

    require_same(scenario, tmp_path, mode, case=Case(kind, build, token_batch, has_checkpointing=False))


def test_reading_or_replacing_what_an_update_in_backward_has_used_up_is_an_error_that_names_the_key(
    tmp_path: Path,
) -> None:
    with Lockstep.start(tmp_path) as both:
        for step in range(2):
            both.engine_step(step)
        both.engine.backward(both.engine(**both.batch(2)))
        with pytest.raises(AccessError, match=r"used up.*infinity\.update"):
            torch.nn.utils.clip_grad_norm_(both.model.parameters(), 1.0)
        for gradient in (None, torch.ones(both.model.head.weight.shape)):
            with pytest.raises(AccessError, match=r"used up.*infinity\.update"):
                both.model.head.weight.grad = gradient
        both.engine.step()
        assert all(parameter.grad is None for parameter in both.model.parameters())


def test_it_is_an_error_inside_that_backward_too_while_the_update_waits(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    found: list[str] = []

    def look(gradient: torch.Tensor) -> None:
        with pytest.raises(AccessError, match=r"used up.*infinity\.update"):
            _ = model[-1].weight.grad
        found.append("refused")

    with engine_on_nvme(tmp_path, model) as engine:
        for step in range(3):
            x = torch.randn(2, 8, requires_grad=True)
            if step == 2:
                x.register_hook(look)  # runs last, when all units have their gradients
            engine.backward(engine(x).square().mean())
            engine.step()
    assert found == ["refused"]


def test_a_backward_of_the_users_own_cannot_add_to_what_an_update_in_backward_has_used_up(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        for step in range(2):
            both.engine_step(step)
        loss = both.engine(**both.batch(2))
        more = both.model.get_submodule("embedding")(torch.arange(4)).square().mean()
        both.engine.backward(loss)
        with pytest.raises(StepError, match=r"'embedding\.weight'.*infinity\.update"):
            more.backward()
            both.engine.step()
        both.engine.reset()
        both.engine.backward(both.engine(**both.batch(3)))
        both.engine.step()


@pytest.mark.deep
def test_optimizer_step_ends_the_accumulation(tmp_path: Path) -> None:
    """Micro-batches that are left over at the end of an epoch: the next step takes its full number again."""
    with Lockstep.start(tmp_path, changes={"gradient_accumulation_steps": 3}) as both:
        both.engine_step(0)
        batch = both.batch(1)
        both.reference.backward(both.reference.forward(batch))
        both.engine.backward(both.engine(**batch))
        both.engine.step()
        assert not both.engine.was_step_applied()
        both.plain_update()
        assert both.engine.micro_steps % 3 == 0
        both.engine_step(2)
        assert both.engine.was_step_applied()
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["smallest", "roomy"])
@pytest.mark.parametrize("scale", [1024, 1000])
def test_with_fp16_gradients_are_shown_without_the_loss_scale(scale: int, mode: str, tmp_path: Path) -> None:
    block = {"fp16": {"enabled": True, "loss_scale": scale}}
    config = config_for(tmp_path, mode, PLAIN.make("none"), block)
    with Lockstep.start(tmp_path, changes={**block, "infinity": config["infinity"]}) as both:
        reference = both.reference
        for step in range(3):
            batch = both.batch(step)
            reference.backward(reference.forward(batch))
            reference.scaler.unscale_(reference.optimizer)
            main = list(reference.main.values())
            both.engine.backward(both.engine(**batch))
            both.note(
                f"norm {step}",
                torch.nn.utils.clip_grad_norm_(main, 0.05),
                torch.nn.utils.clip_grad_norm_(both.model.parameters(), 0.05),
            )
            for number, (expected, parameter) in enumerate(zip(main, both.model.parameters(), strict=True)):
                both.note(f"gradient {step} {number}", expected.grad, parameter.grad)
            reference.update()
            both.engine.step()
        both.require_equal()


def test_two_engines_take_turns(tmp_path: Path) -> None:
    """As a GAN's two networks do: gradients of one come in the other's backward, and are dropped."""

    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 70), nn.Tanh(), nn.Linear(70, 16))

    torch.manual_seed(3)
    maker, judge = (Twins(tmp_path, build(width), is_tight=True) for width in (8, 16))
    losses = []
    with maker, judge:
        for side in (0, 1):
            (make, make_optimizer), (look, look_optimizer) = maker.sides[side], judge.sides[side]
            backward = (maker.engine.backward, judge.engine.backward) if side == 0 else (torch.Tensor.backward,) * 2
            draws = torch.Generator().manual_seed(3)
            for _ in range(4):
                look.zero_grad()
                made = make(torch.randn(4, 8, generator=draws))
                backward[1]((look(torch.randn(4, 16, generator=draws)) - 1).square().mean())
                backward[1](look(made.detach()).square().mean())
                look_optimizer.step()
                make.zero_grad()
                losses.append((look(made) - 1).square().mean())
                backward[0](losses[-1])
                make_optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(losses[:4], losses[4:], strict=True))
        maker.require_equal()
        judge.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_own_clipping_in_16_bits_before_the_engines_step(num_micro_batches: int, tmp_path: Path) -> None:
    """From the first step on, though updates run in backward where nobody looks."""
    changes = {**BF16, "gradient_accumulation_steps": num_micro_batches}
    with Lockstep.start(tmp_path, changes=changes) as both:
        assert both.engine.plan.update == "in_backward"
        for step in range(3):
            for number in range(num_micro_batches):
                batch = both.batch(step, number)
                both.reference.backward(both.reference.forward(batch))
                both.engine.backward(both.engine(**batch))
                if number == num_micro_batches - 1:
                    sides = both.reference.main.values(), both.engine.parameters()
                    both.note(f"norm {step}", *(torch.nn.utils.clip_grad_norm_(side, 0.01) for side in sides))
                both.engine.step()
            both.reference.step()
        both.require_equal()


def test_a_sparse_gradient_that_is_assigned_counts_as_a_dense_one(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.plain_backward(0)
        fqn, parameter = next(iter(both.model.named_parameters()))
        values = torch.zeros(parameter.shape)
        values[0] = 0.5
        with pytest.warns(OtherNumbersWarning, match=fqn):
            parameter.grad = values.to_sparse()
        both.reference.main[fqn].grad = values
        assert torch.equal(parameter.grad, values)
        both.plain_update()
        both.require_equal()
