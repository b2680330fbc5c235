"""Graphs that are made of weights while those are gathered, and have their backward when they are not any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.exactness.case import loss_of
from tests.exactness.lockstep import Lockstep
from tests.twins import Side, require_same

_NAMES = ("blocks.0.up.weight", "blocks.2.down.weight")
_PENALTIES: dict[str, Callable[[Iterable[nn.Parameter]], torch.Tensor]] = {
    "norm": lambda ps: torch.cat([p.square().flatten() for p in ps]).sum().sqrt(),
    "orthogonality": lambda ps: sum(((p @ p.t()).square().mean() for p in ps), torch.zeros(())),
    "smooth": lambda ps: sum(((p[1:] - p[:-1]).abs().pow(3).sum() for p in ps), torch.zeros(())),
}
_MODES: dict[str, dict[str, Any]] = {
    "in backward": {"infinity": {"update": "in_backward"}},
    "deferred": {"gradient_clipping": 0.1},
    "step": {"infinity": {"update": "step"}},
    "in memory": {"infinity": {"keep_in_memory": True}},
    "bf16": {"bf16": {"enabled": True}},
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("penalty", _PENALTIES)
def test_a_penalty_made_of_gathered_weights(penalty: str, mode: str, when: str, tmp_path: Path) -> None:
    of = _PENALTIES[penalty]
    with Lockstep.start(tmp_path, changes=_MODES[mode]) as both:
        theirs = [both.reference.model.get_parameter(name) for name in _NAMES]
        mine = [both.model.get_parameter(name) for name in _NAMES]

        def gathered() -> torch.Tensor:
            with infinity.GatheredParameters(mine):
                return of(mine)

        for step in range(2):
            batch = both.batch(step)
            early = of(theirs) if when == "before" else None
            expected = both.reference.forward(batch)
            expected = expected + 0.01 * (of(theirs) if early is None else early)
            both.reference.backward(expected)
            both.reference.step()
            extra = gathered() if when == "before" else None
            loss = loss_of(both.engine(**batch))
            loss = loss + 0.01 * (gathered() if extra is None else extra)
            both.engine.backward(loss)
            both.engine.step()
            both.note(f"loss {step}", expected, loss)
        both.require_equal()


def test_weights_that_the_block_changes_after_that(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        weight = both.model.get_parameter(_NAMES[0])
        with infinity.GatheredParameters([weight], modifier_rank=0):
            penalty = weight.square().sum()
            with torch.no_grad():
                weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"changed|modified"):
            penalty.backward()


def _joined_weights(side: Side) -> None:
    for number in range(2):
        whole = torch.cat([parameter.view(-1) for parameter in side.parameters])
        (side.loss(number) + 0.01 * whole.norm()).backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
    with torch.no_grad():
        side.note(
            nn.utils.parameters_to_vector(side.parameters), torch.stack([p.view(-1)[:4] for p in side.parameters])
        )
        nn.utils.vector_to_parameters(whole.detach() * 0.5, side.parameters)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", ["smallest", "smallest deferred"])
def test_weights_that_do_not_fit_together_are_joined(mode: str, tmp_path: Path) -> None:
    require_same(_joined_weights, tmp_path, mode)
