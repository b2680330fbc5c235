"""Random sequences of what scripts do, on several ranks: where states are divided, the bits of stage 0."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process
from torch import nn

import infinity
from tests.ranks import on_ranks

_NUM = 4
"""Sequences with each number of processes; raise it for more by hand (60 were tried)."""
_WIDTH = 64


class _Failed(Exception):
    pass


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise _Failed


class _Experts(nn.Module):
    """A unit of which ranks use other parts."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.members[number](x)


class _Model(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(1000))
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=rng.random() < 0.5), nn.Tanh())
            for _ in range(rng.randint(1, 4))
        )
        self.experts = _Experts()
        self.head = nn.Linear(_WIDTH, _WIDTH)
        if rng.random() < 0.3:
            self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor, expert: int, *, fails: bool = False) -> torch.Tensor:
        x = self.first(x)
        if fails:
            x = _Fail.apply(x)
        for block in self.blocks:
            x = x + block(x)
        x = x + self.experts(x, expert)
        return self.head(x).float().square().mean()


class _Script:
    """One sequence, which is the same on all ranks and in all stages, on data of each rank's own."""

    def __init__(self, seed: int, rank: int, config: dict[str, Any]) -> None:
        self.rng, self.of_rank = random.Random(seed), random.Random(f"{seed} {rank}")
        self.rank = rank
        self.engine = infinity.initialize(model=_Model(self.rng), config=config)[0]
        self.found: list[Any] = []

    def run(self) -> list[Any]:
        actions = [self.step, self.step, self.step, self.plain_step, self.drop, self.fail, self.replace, self.once_more]
        actions += [self.evaluate, self.change_rate, self.write, self.freeze, self.reload]
        for _ in range(self.rng.randint(3, 8)):
            self.rng.choice(actions)()
        self.step()
        self.found += [value.clone() for value in self.engine.module.state_dict().values()]
        self.engine.close()
        return self.found

    def loss(self, **kwargs: Any) -> torch.Tensor:
        x = torch.randn(2, _WIDTH, generator=torch.Generator().manual_seed(self.of_rank.randrange(10**6)))
        expert = self.of_rank.choice([0, 1])
        return self.engine(x.to(self.engine.config.compute_dtype), expert, **kwargs)

    def backwards(self) -> None:
        """Those of a step, and none that has been made already."""
        for _ in range(self.engine.gradient_accumulation_steps()):
            if self.rng.random() < 0.1:
                with self.engine.no_sync():
                    self.engine.backward(self.loss())
            loss = self.loss()
            self.engine.backward(loss)
            self.found.append(loss.detach().clone())
            if not self.engine.is_gradient_accumulation_boundary():
                self.engine.step()

    def step(self) -> None:
        self.backwards()
        self.engine.step()
        self.found.append(self.engine.get_global_grad_norm())

    def plain_step(self) -> None:
        if self.engine.config.compute_dtype == torch.float16:  # where the loss scale has to follow
            self.step()
            return
        self.loss().backward()
        weight = self.parameter()
        self.found.append(None if weight.grad is None else weight.grad.clone())
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()

    def drop(self) -> None:
        self.backwards()
        self.engine.zero_grad()

    def fail(self) -> None:
        with pytest.raises(_Failed):
            self.engine.backward(self.loss(fails=True))
        self.engine.zero_grad()

    def replace(self) -> None:
        self.backwards()
        weight = self.parameter()
        weight.grad = self.rng.choice([None, torch.full_like(weight, 0.01)])
        self.engine.step()

    def once_more(self) -> None:
        self.backwards()
        self.engine.backward(self.loss())
        self.engine.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.found.append(self.loss().clone())

    def change_rate(self) -> None:
        self.engine.optimizer.param_groups[0]["lr"] *= 0.7

    def write(self) -> None:
        weight = self.parameter()
        with torch.no_grad(), infinity.GatheredParameters([weight], modifier_rank=0):
            if self.rank == 0:
                weight.mul_(0.9)

    def freeze(self) -> None:
        weight = self.parameter()
        weight.requires_grad_(not weight.requires_grad)

    def reload(self) -> None:
        self.engine.optimizer.load_state_dict(self.engine.optimizer.state_dict())

    def parameter(self) -> nn.Parameter:
        parameters = [*self.engine.module.parameters()]
        return parameters[self.rng.randrange(len(parameters))]


def _config(rng: random.Random, directory: Path) -> Callable[[int], dict[str, Any]]:
    dtype: dict[str, Any] = rng.choice(
        [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 12}}]
    )
    memory: dict[str, Any] = {"keep_in_memory": False} | ({"host_memory_budget": "1MiB"} if rng.random() < 0.5 else {})
    base = dtype | {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": rng.choice([1, 1, 2]),
        "gradient_clipping": rng.choice([0.0, 0.05]),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "infinity": memory | {"units": ["first", "blocks.*", "experts", "head"]},
    }

    def config(stage: int) -> dict[str, Any]:
        drive = {"device": "nvme", "nvme_path": str(directory)}
        return base | {
            "zero_optimization": {"stage": stage, "offload_optimizer": drive}
            | ({"offload_param": drive} if stage == 3 else {})
        }

    return config


@pytest.mark.deep
@pytest.mark.parametrize("num", [2, 3])
@on_ranks()
def test_divided_states_have_the_bits_of_stage_0(rank: int, num: int, tmp_path: Path) -> None:
    for seed in range(num * _NUM, (num + 1) * _NUM):
        config = _config(random.Random(seed), tmp_path)
        expected = _Script(seed, rank, config(0)).run()
        for stage in {3, 1 + seed % 2}:
            found = _Script(seed, rank, config(stage)).run()
            assert len(found) == len(expected), (seed, stage)
            for place, (one, other) in enumerate(zip(found, expected, strict=True)):
                is_same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
                assert is_same, (seed, stage, place, one, other)
