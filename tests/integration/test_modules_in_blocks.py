"""Modules in a block that are called by themselves, late or twice, and user code that holds on to weights or casts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import BudgetTooSmallError, ModelError, StepError
from tests.exactness.lockstep import BF16, engine_on_nvme
from tests.twins import Twins

_WIDTH = 16
_Run = Callable[[nn.Module, Tensor], Tensor]


def _plainly(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def _reentrantly(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=True)


def _anew(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=False)


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Block(nn.Module):
    """Calls the first of its modules twice, each time in a checkpoint of its own."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.shared, self.other = _Inner(), _Inner()
        self.last = nn.Linear(_WIDTH, _WIDTH)
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self._run(self.shared, x)
        x = self._run(self.other, x)
        x = self._run(self.shared, torch.sin(x))
        return x + self.last(x)


class _Model(nn.Module):
    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(_Block(run) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _loss(apart: bool, step: int) -> Callable[[Any], Tensor]:
    x = torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(step))

    def loss(model: Any) -> Tensor:
        found: Tensor = model(x).square().mean()
        return found + model.blocks[1].other(torch.cos(x)).square().mean() if apart else found

    return loss


@pytest.mark.parametrize(
    "first_apart", [99, 0, 2], ids=["in the model", "and by the script", "and by the script later"]
)
@pytest.mark.parametrize("run", [_plainly, _reentrantly, _anew], ids=lambda run: run.__name__.strip("_"))
def test_it_trains_to_the_same_bits(tmp_path: Path, run: _Run, first_apart: int) -> None:
    torch.manual_seed(0)
    with Twins(tmp_path, _Model(run), infinity={"host_memory_budget": "1MB", "staging_buffer_bytes": None}) as twins:
        for step in range(4):
            twins.step(_loss(step >= first_apart, step))
        twins.require_equal()


class Gated(nn.Module):
    """The checkpointed part is gated by the last block, which backward has finished with by then."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.looks_again = False
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def part(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = torch.tanh(self.blocks[0](x))
        return torch.tanh(self.blocks[1](x)) * gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.part, self.blocks[2](x), use_reentrant=self.use_reentrant)
        return self.blocks[0](x).pow(2).mean()


def _late_batch(step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_late_use_is_learned_and_computes_with_the_weights_of_forward(use_reentrant: bool, tmp_path: Path) -> None:
    with Twins(tmp_path, Gated(use_reentrant=use_reentrant)) as twins:
        for step in range(4):
            twins.step(lambda model, step=step: model(_late_batch(step)))


class Unsteady(Gated):
    """Uses the last block in the checkpointed part only when told to, which may be between forward and backward."""

    def part(self, x: torch.Tensor) -> torch.Tensor:
        if self.looks_again:
            with torch.no_grad():
                self.blocks[0](x)
        return torch.tanh(self.blocks[1](x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_unexpected_late_use_is_an_error_and_expected_from_then_on(
    use_reentrant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.updates.stepper._LEAST_BYTES", 0)  # small units would wait, and be used in time
    model = Unsteady(use_reentrant=use_reentrant)
    engine = engine_on_nvme(tmp_path, model)

    def backward(step: int) -> None:
        model.looks_again = False
        loss = engine(_late_batch(step))
        model.looks_again = step >= 2
        engine.backward(loss)

    with engine:
        for step in range(2):
            backward(step)
            engine.step()
        with pytest.raises(StepError, match=r"'blocks\.0'"):
            backward(2)
        with pytest.raises(StepError, match="of 3 units"):
            engine.step()
        engine.reset()
        for step in range(3, 5):
            backward(step)
            engine.step()
        engine.flush()


class _InPieces(torch.autograd.Function):
    """A product with rows of a weight, as fused losses make it: torch does not ask a weight's class about it."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return torch.cat([inputs @ rows.t() for rows in weight.split(4)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        product = torch.empty(len(inputs), 4)
        by_weight = torch.zeros_like(weight)
        for first in range(0, len(weight), 4):
            torch.mm(inputs, weight[first : first + 4].t(), out=product)
            by_weight[first : first + 4] = gradient[:, first : first + 4].t() @ inputs
        return gradient @ weight, by_weight


class _Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4)])
        self.head = nn.Linear(64, 128, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        product: torch.Tensor = _InPieces.apply(inputs, self.head.weight)
        return product.square().mean()


def test_a_function_that_is_given_a_weight_whose_module_nobody_calls(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 64)
    with Twins(tmp_path, _Headed()) as twins:
        for _ in range(4):
            twins.step(lambda model: model(inputs))
        twins.require_equal()


class _Keeping(torch.autograd.Function):
    """As some write it: the weight is an attribute of the context, past ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight.data
        ctx.save_for_backward(inputs)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (inputs,) = ctx.saved_tensors
        return grads[0] @ ctx.weight, grads[0].t() @ inputs


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Keeping.apply(inputs, self.weight)


def test_weights_kept_by_a_function_are_told_with_a_minimum_that_suffices(tmp_path: Path) -> None:
    budget, messages = 1 << 20, []
    for attempt in range(3):
        torch.manual_seed(0)
        model = nn.Sequential(*[_Linear() for _ in range(12)])
        changes = {"infinity": {"host_memory_budget": budget, "staging_buffer_bytes": None}}
        try:
            with engine_on_nvme(tmp_path / str(attempt), model, changes) as engine:
                engine.backward(engine(torch.ones(2, 256)).sum())
                engine.step()
            break
        except BudgetTooSmallError as error:
            budget = error.minimum_bytes
            messages.append(str(error))
    else:
        pytest.fail(f"no budget sufficed: {messages}")
    assert "User code keeps tensors" in messages[-1] and "ctx.save_for_backward(weight)" in messages[-1]


def _switch(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_experts": 4}
    layers = {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    quiet = {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(**sizes, **layers, **quiet, **options)
    return transformers.SwitchTransformersForConditionalGeneration(config)


def test_a_router_that_casts_itself_is_told_with_a_cure_that_works(tmp_path: Path) -> None:
    def train(directory: Path, **options: Any) -> None:
        model = _switch(**options).to(torch.bfloat16)
        ids = torch.ones(2, 6, dtype=torch.long)
        with engine_on_nvme(directory, model, BF16) as engine:
            for _ in range(2):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()

    with pytest.raises(ModelError, match=r"routers of Switch Transformers.*router_dtype='bfloat16'"):
        train(tmp_path / "float32")
    train(tmp_path / "bfloat16", router_dtype="bfloat16")
