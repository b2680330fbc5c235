"""What tests of several ranks have in common: drives, and values that are to be equal, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.ranks import At

Values = dict[str, torch.Tensor]


def offload(device: str, directory: Path) -> dict[str, str]:
    """An offload block of the config."""
    return {"device": device} | ({"nvme_path": str(directory)} if device == "nvme" else {})


def weights_of(engine: Any) -> Values:
    """Copies of all weights and buffers."""
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def states_of(engine: Any) -> Values:
    """Copies of the optimizer's states."""
    return {
        f"{index} {name}": torch.as_tensor(value).clone()
        for index, state in engine.optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def require_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """All values are equal, and no name is missing."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def require_all_same(found: Mapping[Any, Mapping[str, torch.Tensor]]) -> None:
    """The values of all keys are those of the first."""
    first, *others = found.values()
    for each in others:
        require_same(each, first)


def require_same_everywhere(values: Iterable[torch.Tensor]) -> None:
    """All ranks come with the same values."""
    found = torch.cat([value.flatten().float() for value in values])
    others = [torch.empty_like(found) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, found)
    assert all(torch.equal(other, found) for other in others), "ranks have different values"


WIDTH = 128
LITTLE: dict[str, Any] = {"infinity": {"keep_in_memory": False, "host_memory_budget": "2000KiB"}}
"""Changes of `deep_config` with which gradients of some units of a `Deep` are spilled."""


class Deep(nn.Module):
    """``near_end`` is called when its backward has left all blocks. Without ``expert`` one of its units gets no gradient."""

    def __init__(self, num_blocks: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near_end: Callable[[], Any] = lambda: None
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks))
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.dtype = dtype

    def forward(self, x: torch.Tensor, *, takes_expert: bool = True) -> torch.Tensor:
        x = At.apply(self.first(x.to(self.dtype)), lambda: self.near_end())
        for block in self.blocks:
            x = x + block(x)
        return ((self.expert(x) if takes_expert else x) * self.scale).float().square().mean()


def deep_config(directory: Path, stage: int, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """States on a drive, in stage 3 weights as well."""
    drive = offload("nvme", directory)
    zero = {"stage": stage, "offload_optimizer": drive} | ({"offload_param": drive} if stage == 3 else {})
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
        "infinity": {"keep_in_memory": False},
    } | (changes or {})


def input_of(rank: int, number: int) -> torch.Tensor:
    """A batch for a `Deep`."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + number))
