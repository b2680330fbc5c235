"""Steps inside `GatheredParameters`, and what is left of a load or a block that an exception has cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.exactness.lockstep import BF16, IN_MEMORY, Lockstep

_MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "fp32 beside bf16": {**BF16, "infinity": {"main_weights": "fp32"}},
    "in memory": {**BF16, **IN_MEMORY},
    "deferred": {**BF16, "gradient_clipping": 1.0},
    "deferred in memory": {**BF16, **IN_MEMORY, "gradient_clipping": 1.0},
    "step": {**BF16, "infinity": {"update": "step"}},
}


def _halve_first_rows(both: Lockstep) -> None:
    with torch.no_grad():
        for fqn, parameter in both.model.named_parameters():
            if parameter.dim() == 2:
                value = parameter[0].clone() * 0.5
                parameter[0].copy_(value)
                both.reference.main[fqn][0].copy_(value)
                both.reference.trainable[fqn][0].copy_(value)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", _MODES)
def test_steps_and_changes_inside_the_block_keep_every_bit(mode: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_MODES[mode]) as both:
        both.engine_step(0)
        with infinity.GatheredParameters(both.model.parameters(), modifier_rank=0):
            both.engine_step(1)
            _halve_first_rows(both)
            both.engine_step(2)
            with infinity.GatheredParameters(both.model.parameters(), modifier_rank=0):
                _halve_first_rows(both)
            both.engine_step(3)
            _halve_first_rows(both)
        both.engine_step(4)
        both.require_equal()


def test_a_forward_that_is_cut_off_inside_the_block_leaves_it_open(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=BF16) as both:
        both.engine_step(0)
        handle = both.model.register_forward_hook(_fail)
        with infinity.GatheredParameters(both.model.parameters(), modifier_rank=0):
            with pytest.raises(_Oops):
                both.engine(**both.batch(1))
            handle.remove()
            both.engine.reset()
            _halve_first_rows(both)
        both.engine_step(1)
        both.require_equal()


class _Oops(Exception):
    pass


def _fail(*_: Any) -> None:
    raise _Oops


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", ["bf16", "in memory"])
def test_a_hook_that_raises_in_load_state_dict_leaves_nothing_open(mode: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_MODES[mode]) as both:
        both.engine_step(0)
        same = {key: value.clone() for key, value in both.reference.model.state_dict().items()}
        last = [module for module in both.model.modules() if list(module.parameters(recurse=False))][-1]
        handle = last.register_load_state_dict_pre_hook(_fail)
        with pytest.raises(_Oops):
            both.model.load_state_dict(same)
        handle.remove()
        both.engine_step(1)
        both.model.load_state_dict({key: value.clone() for key, value in both.reference.model.state_dict().items()})
        both.engine_step(2)
        both.require_equal()
        assert not any(unit.num_active or unit.gathered for unit in both.engine._parts.parameter_map.units)
