"""``infinity.activation_checkpointing``: blocks are computed once more in backward, to the bits of torch's own checkpointing."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import BudgetTooSmallError
from tests.exactness import families
from tests.internals import find_blocks
from tests.twins import Twins

_ON = {"activation_checkpointing": True}
_NUM_BLOCKS = 3
_CALLS: Counter[str] = Counter()
"""Of blocks; not in the model, whose attributes a vertical step looks at."""


class Block(nn.Module):
    """With dropout, a parameter of its own, and an argument by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.up = nn.Linear(8, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(24, 8)

    def forward(self, x: Tensor, *, shift: Tensor) -> tuple[Tensor, str]:
        if not torch.compiler.is_compiling():
            _CALLS["forward"] += 1
        hidden = self.drop(torch.relu(self.frozen(self.up(x * self.scale))))
        return x + self.down(hidden) + shift, "and something that is no tensor"


class Model(nn.Module):
    def __init__(self, how: str = "none") -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(_NUM_BLOCKS))
        self.head = nn.Linear(8, 16)
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        shift = x.mean(dim=-1, keepdim=True)
        if self.how == "reentrant":
            shift = shift.detach()  # a partial function carries no gradient through it
        for block in self.blocks:
            if self.how == "none":
                x, _ = block(x, shift=shift)
            else:
                call = functools.partial(block, shift=shift) if self.how == "reentrant" else block
                keywords = {} if self.how == "reentrant" else {"shift": shift}
                x, _ = checkpoint(call, x, use_reentrant=self.how == "reentrant", **keywords)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    _CALLS.clear()


def _model(how: str = "none") -> Model:
    torch.manual_seed(3)
    return Model(how)


def _tokens(step: int) -> Tensor:
    return torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(step))


def _twins(plain: nn.Module, model: nn.Module, directory: Path, **changes: Any) -> Twins:
    changes["infinity"] = {**_ON, **changes.get("infinity", {})}
    return Twins(directory, model, is_tight=True, plain=plain, **changes)


def _losses(step: int) -> Callable[[Any], Tensor]:
    return lambda model: model(_tokens(step))


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("with_autocast", [False, True])
def test_the_bits_are_those_of_torchs_checkpointing(with_autocast: bool, tmp_path: Path) -> None:
    plain, model = _model("non-reentrant"), _model()
    changes = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if with_autocast else {}
    if with_autocast:
        plain.forward = torch.autocast("cpu", torch.bfloat16)(plain.forward)  # type: ignore[method-assign]
    with _twins(plain, model, tmp_path, **changes) as twins:
        for step in range(3):
            twins.step(_losses(step))
        assert _CALLS == {"forward": 2 * 3 * 2 * _NUM_BLOCKS}  # of both models
        twins.require_equal()
    assert all("forward" not in block.__dict__ for block in model.blocks)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_what_the_model_checkpoints_by_itself_is_computed_twice_only(how: str, tmp_path: Path) -> None:
    with _twins(_model(how), _model(how), tmp_path) as twins:
        for step in range(3):
            twins.step(_losses(step))
        assert _CALLS == {"forward": 2 * 3 * 2 * _NUM_BLOCKS}  # of both models
        twins.require_equal()


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(24, 40), nn.Linear(40, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(4):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return x.square().sum()


def test_parts_of_a_gradient_are_added_one_by_one_to_those_of_the_micro_batches_before(tmp_path: Path) -> None:
    """Each checkpoint of a shared layer is a backward of its own, which autograd adds to ``p.grad`` by itself."""
    torch.manual_seed(0)
    with _twins(copy.deepcopy(model := _Shared()), model, tmp_path) as twins:
        for step in range(2):
            twins.step(*[_losses(10 * step + number) for number in range(4)], by_hand=True)
        twins.require_equal()


class _FrozenStart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.layer = nn.Parameter(torch.ones(1, 40), requires_grad=False), nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.start.expand(len(x), -1))


class _WithFrozenStart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(16, 40), _FrozenStart()

    def forward(self, tokens: Tensor) -> Tensor:
        return checkpoint(self.block, self.embedding(tokens).mean(1), use_reentrant=False).square().sum()


def test_a_view_of_a_frozen_parameter_that_a_checkpoint_keeps_has_its_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with _twins(copy.deepcopy(model := _WithFrozenStart()), model, tmp_path) as twins:
        for step in range(2):
            twins.step(_losses(step))
        twins.require_equal()


class _InOne(nn.Module):
    """One checkpoint over several units."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.is_reentrant = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), is_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.one_hot(tokens, 64).float().requires_grad_()
        result: Tensor = checkpoint(self.blocks, x, use_reentrant=self.is_reentrant)
        return result.square().sum()


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_checkpoint_over_several_units_that_keeps_their_weights_is_named(is_reentrant: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _InOne(is_reentrant)
    with Twins(tmp_path, model, is_tight=True) as twins:
        if is_reentrant:
            twins.step(_losses(0))
            twins.require_equal()
        else:
            with pytest.raises(BudgetTooSmallError, match=r"several units at once.*with use_reentrant=True"):
                twins.step(_losses(0))
            twins.engine.reset()


class _Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale, (gradients[0] * x).flatten(0, -2).sum(0)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Scaling.apply(x, self.scale)
        return result


class _WithScaled(nn.Module):
    """A unit by itself, so that no hook of the engine's enters it when the child is computed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scaled = nn.Embedding(16, 8), _Scaled()

    def forward(self, tokens: Tensor) -> Tensor:
        return checkpoint(self.scaled, self.embedding(tokens), use_reentrant=False).square().sum()


def test_a_weight_that_a_function_saves_while_a_checkpoint_computes_anew_has_its_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with _twins(copy.deepcopy(model := _WithScaled()), model, tmp_path) as twins:
        for step in range(2):
            twins.step(_losses(step))
        twins.require_equal()


def _around_model(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).sin()


def _around_head(model: Any, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model.head(model.embedding(tokens).sin()).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("compute", [_around_model, _around_head])
def test_what_a_script_computes_in_a_checkpoint_around_the_model(compute: Any, tmp_path: Path) -> None:
    """torch finds what was saved by its number among all that the function saves, the model's own included."""
    with _twins(_model(), _model(), tmp_path) as twins:
        for step in range(3):
            twins.step(lambda model, step=step: checkpoint(compute, model, _tokens(step), use_reentrant=False))
        twins.require_equal()


def test_an_interrupt_in_a_checkpoint_around_the_model_leaves_no_hooks(tmp_path: Path) -> None:
    """The checkpoint would take the engine's hooks down in place of its own, which would go on to count what is saved."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with _twins(_model(), _model(), tmp_path) as twins:
        handle = twins.model.blocks[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoint(_around_model, twins.engine, _tokens(0), use_reentrant=False)
        handle.remove()
        twins.step(_losses(0))
        twins.require_equal()


def test_evaluation_keeps_nothing_and_computes_once(tmp_path: Path) -> None:
    with _twins(_model(), _model(), tmp_path) as twins:
        engine = twins.engine
        with torch.no_grad():
            engine(_tokens(0))
        assert _CALLS == {"forward": _NUM_BLOCKS}
        engine.eval()
        engine.backward(engine(_tokens(0)))
        assert _CALLS == {"forward": 2 * _NUM_BLOCKS}


def test_a_vertical_step_computes_units_twice_only(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical"}}
    with _twins(_model(), _model(), tmp_path, **changes) as twins:
        engine = twins.engine
        data = iter([(_tokens(number),) for number in range(4)])
        for _ in range(2):
            engine.train_batch(data)
        assert engine.report.schedule == "vertical"
        assert _CALLS == {"forward": 2 * 2 * 2 * _NUM_BLOCKS}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("make", [families.llama, families.gpt2, families.t5], ids=lambda make: make.__name__)
@pytest.mark.parametrize("use_cache", [False, True])
def test_transformers(make: Callable[[], Any], use_cache: bool, tmp_path: Path) -> None:
    """Caches that layers would fill twice are left out, as the library leaves them out."""

    def build() -> Any:
        torch.manual_seed(5)
        model = make()
        model.config.use_cache = use_cache
        return model

    def batch(number: int) -> dict[str, Tensor]:
        tokens = torch.randint(3, families.VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}

    plain = build()
    plain.config.use_cache = False
    for fqn in find_blocks(plain):
        block = plain.get_submodule(fqn)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    with _twins(plain, build(), tmp_path) as twins:
        for step in range(3):
            twins.step(lambda model, step=step: model(**batch(step)).loss)
        twins.require_equal()


def _llama() -> Any:
    torch.manual_seed(5)
    return families.llama()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("what", ["frozen layer in evaluation", "given cache"])
def test_a_cache_that_is_not_empty(what: str, tmp_path: Path) -> None:
    """Filled by a layer that is computed once, or before the call, as prefix tuning does."""
    tokens = torch.randint(3, families.VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])

    def prepared() -> Any:
        model = _llama()
        if what != "given cache":
            model.model.layers[0].requires_grad_(False)
        return model

    def call(model: Any) -> Tensor:
        if what != "given cache":
            model.model.layers[0].eval()
            return model(input_ids=tokens, labels=tokens, attention_mask=mask, use_cache=True).loss
        with torch.no_grad():
            cache = model(input_ids=tokens[:, :2], use_cache=True).past_key_values
        return model(input_ids=tokens[:, 2:], labels=tokens[:, 2:], past_key_values=cache).loss

    with _twins(prepared(), prepared(), tmp_path) as twins:
        for _ in range(3):
            twins.step(call)
        twins.require_equal()
