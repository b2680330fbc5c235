"""State dicts of the model and of the optimizer: true, and usable by plain torch, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import infinity
from swapper import Swapper
from tests.exactness.lockstep import BF16, Lockstep
from tests.states import state_of


def test_optimizer_state_dict_has_torchs_layout_and_is_lazy(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        both.engine_step(1)
        both.engine.flush()
        with mock.patch.object(Swapper, "read", side_effect=AssertionError("gathered before an entry was read")):
            lazy = both.optimizer.state_dict()
        expected = both.reference.optimizer.state_dict()
        assert lazy["param_groups"] == expected["param_groups"]
        assert list(lazy["state"]) == list(expected["state"])
        for index, entries in expected["state"].items():
            gathered = dict(lazy["state"][index])
            assert gathered.keys() == entries.keys()
            assert all(torch.equal(torch.as_tensor(gathered[key]), entries[key]) for key in entries)


def test_optimizer_state_dict_goes_through_pickle_into_plain_torch(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    with Lockstep.start(drive) as both:
        both.engine_step(0)
        torch.save(both.optimizer.state_dict(), tmp_path / "optimizer.pt")
        loaded = torch.load(tmp_path / "optimizer.pt", weights_only=False)
        plain = torch.optim.AdamW([nn.Parameter(main.detach().clone()) for main in both.reference.main.values()])
        plain.load_state_dict(loaded)
        expected = both.reference.optimizer.state_dict()["state"]
        for index, entries in plain.state_dict()["state"].items():
            assert all(torch.equal(entries[key], expected[index][key]) for key in expected[index])


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("changes", [{}, BF16])
def test_optimizer_state_is_loaded_from_plain_torch(changes: dict[str, Any], tmp_path: Path) -> None:
    """An engine that gets another run's weights and optimizer state goes on as that run does."""
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(2):
            batch = both.batch(step)
            both.reference.backward(both.reference.forward(batch))
            both.reference.step()
        both.reference.param_groups[0]["lr"] = 1e-3
        weights = {fqn: param.detach().clone() for fqn, param in both.reference.model.named_parameters()}
        with infinity.GatheredParameters(both.model.parameters(), modifier_rank=0), torch.no_grad():
            for fqn, param in both.model.named_parameters():
                param.copy_(weights[fqn])
        if changes:
            # The low bits of the reference's main weights are not in its model weights.
            with torch.no_grad():
                for fqn, main in both.reference.main.items():
                    main.copy_(state_of(both.engine, both.model.get_parameter(fqn))["weight"])
        both.optimizer.load_state_dict(both.reference.optimizer.state_dict())
        assert both.optimizer.param_groups[0]["lr"] == 1e-3
        for step in range(2, 4):
            both.engine_step(step)
        both.require_equal()


def test_a_state_dict_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        other = torch.optim.AdamW([nn.Parameter(torch.ones(2))]).state_dict()
        with pytest.raises(ValueError, match="group"):
            both.optimizer.load_state_dict(other)
        both.engine_step(1)
        both.require_equal()
