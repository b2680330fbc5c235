"""The same training run twice, in plain torch and paged, behind the same calls."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from infinity.deepspeed.ops.lamb import FusedLamb
from tests.exactness.paged import least_budget
from tests.exactness.reference import _half_up
from tests.states import state_of

Batch = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """How a run is set up.

    Attributes:
        loop: ``engine`` (engine.backward, engine.step), ``plain`` (loss.backward, optimizer.step), ``batch`` (train_batch).
        groups_frozen: whether what is frozen at first stands in the optimizer's groups.
    """

    loop: str
    is_bf16: bool
    has_remainder: bool
    accumulation: int
    max_norm: float
    optimizer: str
    arguments: Mapping[str, Any]
    num_groups: int
    offload: tuple[str, str]
    is_tight: bool
    own: Mapping[str, Any]
    groups_frozen: bool

    def members(self, params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """What is in the optimizer's groups at first."""
        return {fqn: p for fqn, p in params.items() if p.requires_grad or self.groups_frozen}

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        kind: Any = FusedLamb if self.optimizer == "Lamb" else getattr(torch.optim, self.optimizer)
        return kind(groups, **self.arguments)

    def groups(self, named: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Parameter groups as users make them: weights decay, biases and norms do not."""
        if self.num_groups == 1:
            return [{"params": list(named.values())}]
        split: tuple[list[Any], list[Any]] = ([], [])
        for name, value in named.items():
            split[value.dim() < 2 or "head" in name].append(value)
        return [{"params": split[0]}, {"params": split[1], "weight_decay": 0.0}]


class PlainSide:
    """Plain torch. With bf16 the optimizer works on fp32 main weights, whose cast the model computes with."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.setting = setting
        self.params = dict(model.named_parameters())
        if setting.is_bf16:
            self.main = {fqn: nn.Parameter(p.detach().clone(), p.requires_grad) for fqn, p in self.params.items()}
            model.to(torch.bfloat16)
        else:
            self.main = self.params
        self.model = model
        self.trainable = setting.members(self.main)
        self.optimizer = setting.make_optimizer(setting.groups(self.trainable))
        self._cast(self.params)

    def _cast(self, fqns: Any) -> None:
        if self.setting.is_bf16:
            with torch.no_grad():
                for fqn in fqns:
                    main = self.main[fqn].detach()
                    is_halved = self.setting.has_remainder and fqn in self.trainable
                    self.params[fqn].copy_(_half_up(main) if is_halved else main)

    def of(self, fqn: str) -> nn.Parameter:
        """The parameter in the optimizer's groups and state."""
        return self.main[fqn]

    def forward(self, batch: Batch) -> Tensor:
        return self.model(**batch)

    def backward(self, loss: Tensor) -> None:
        divisor = 1 if self.setting.loop == "plain" else self.setting.accumulation
        (loss / divisor).backward()
        if self.setting.is_bf16:
            for fqn, param in self.params.items():
                if param.grad is not None:
                    main, gradient = self.main[fqn], param.grad.float()
                    main.grad = gradient if main.grad is None else main.grad + gradient
                    param.grad = None

    def step(self) -> Tensor:
        """The boundary: clip, update, drop the gradients. Returns the norm before clipping."""
        with_gradients = [main for main in self.main.values() if main.grad is not None]
        norm = torch.nn.utils.get_total_norm([main.grad for main in with_gradients if main.grad is not None])
        if self.setting.max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(with_gradients, self.setting.max_norm, norm)
        self.optimizer.step()
        changed = [fqn for fqn, main in self.main.items() if main.grad is not None]
        self.drop()
        self._cast(changed)
        return norm

    def micro_batch(self, batch: Batch) -> Tensor:
        """One forward and backward."""
        loss = self.forward(batch)
        self.backward(loss)
        return loss.detach()

    def whole_step(self, batches: list[Batch]) -> tuple[list[Tensor], Tensor]:
        """Losses and norm of a whole step."""
        losses = [self.micro_batch(batch) for batch in batches]
        if self.setting.loop == "batch":
            losses = [torch.stack([loss.float() for loss in losses]).mean()]
        return losses, self.step()

    def gradient(self, fqn: str) -> Tensor | None:
        return self.main[fqn].grad

    def set_gradient(self, fqn: str, gradient: Tensor | None) -> None:
        self.main[fqn].grad = gradient

    def drop(self) -> None:
        for parameter in (*self.main.values(), *self.params.values()):  # of those in no group, too
            parameter.grad = None

    def recover(self) -> None:
        """After an exception in forward or backward."""
        self.drop()

    def weight(self, fqn: str) -> Tensor:
        return self.params[fqn].detach().clone()

    def write(self, fqn: str, change: Callable[[Tensor], Any]) -> None:
        param = self.params[fqn]
        before = param.detach().clone()
        with torch.no_grad():
            change(param)
        if self.setting.is_bf16:
            is_kept = before.view(torch.int16) == param.detach().view(torch.int16)
            self.main[fqn].data.copy_(torch.where(is_kept, self.main[fqn], param.float()))

    def main_weight(self, fqn: str) -> Tensor:
        return self.main[fqn].detach().clone()

    def state(self, fqn: str) -> dict[str, Any]:
        return dict(self.optimizer.state.get(self.main[fqn], {}))

    def thaw(self, fqns: list[str]) -> None:
        """Begin to train what was frozen and in no group: from the weight that the model has."""
        for fqn in fqns:
            if self.setting.is_bf16:
                self.main[fqn].data.copy_(self.params[fqn])
            self.trainable[fqn] = self.main[fqn]
        _thaw(self, fqns)

    def close(self) -> None:
        pass


class PagedSide:
    """The engine, as a user of one of its loops calls it."""

    def __init__(self, model: nn.Module, setting: Setting, directory: Path) -> None:
        self.setting = setting
        self.model = model
        self.params = dict(model.named_parameters())
        trainable = setting.members(self.params)
        config = self._config(directory)
        optimizer = setting.make_optimizer(setting.groups(trainable))
        if setting.is_tight:
            config["infinity"]["host_memory_budget"] = least_budget(model, config, optimizer=optimizer)
        self.engine, self.optimizer, _, _ = infinity.initialize(model=model, optimizer=optimizer, config=config)

    def _config(self, directory: Path) -> dict[str, Any]:
        setting = self.setting

        def tier(device: str) -> dict[str, Any]:
            return {"device": device, **({"nvme_path": str(directory)} if device == "nvme" else {})}

        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1 if setting.loop == "plain" else setting.accumulation,
            "gradient_clipping": setting.max_norm,
            "bf16": {"enabled": setting.is_bf16},
            "zero_optimization": {
                "stage": 3,
                "offload_param": tier(setting.offload[0]),
                "offload_optimizer": tier(setting.offload[1]),
            },
            "infinity": {
                "host_memory_budget": "64MiB",
                "keep_in_memory": False,
                "direct_io": False,
                "io_backend": "threads",
                **({"main_weights": "remainder" if setting.has_remainder else "fp32"} if setting.is_bf16 else {}),
                **setting.own,
            },
        }

    def of(self, fqn: str) -> nn.Parameter:
        return self.params[fqn]

    def forward(self, batch: Batch) -> Tensor:
        return (self.model if self.setting.loop == "plain" else self.engine)(**batch)

    def backward(self, loss: Tensor) -> None:
        if self.setting.loop == "plain":
            loss.backward()
        else:
            self.engine.backward(loss)

    def micro_batch(self, batch: Batch) -> Tensor:
        loss = self.forward(batch)
        self.backward(loss)
        if self.setting.loop != "plain" and not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()
        return loss.detach()

    def step(self) -> Tensor:
        if self.setting.loop == "plain":
            self.optimizer.step()
            norm = self.engine.report.grad_norm
            self.model.zero_grad()
        else:
            self.engine.step()
            norm = self.engine.report.grad_norm
        return torch.as_tensor(norm, dtype=torch.float32)

    def whole_step(self, batches: list[Batch]) -> tuple[list[Tensor], Tensor]:
        if self.setting.loop == "batch":
            loss = self.engine.train_batch(iter(batches))
            return [loss], torch.as_tensor(self.engine.report.grad_norm, dtype=torch.float32)
        return [self.micro_batch(batch) for batch in batches], self.step()

    def gradient(self, fqn: str) -> Tensor | None:
        return self.params[fqn].grad

    def set_gradient(self, fqn: str, gradient: Tensor | None) -> None:
        self.params[fqn].grad = gradient

    def drop(self) -> None:
        if self.setting.loop == "plain":
            self.model.zero_grad()
        else:
            self.engine.reset()

    def recover(self) -> None:
        if self.setting.loop != "plain":
            self.engine.zero_grad()  # raises if updates have begun: `reset` alone would accept them as they are
        self.engine.reset()

    def weight(self, fqn: str) -> Tensor:
        with infinity.GatheredParameters(self.params[fqn]):
            return self.params[fqn].detach().clone()

    def write(self, fqn: str, change: Callable[[Tensor], Any]) -> None:
        with torch.no_grad(), infinity.GatheredParameters(self.params[fqn], modifier_rank=0):
            change(self.params[fqn])

    def main_weight(self, fqn: str) -> Tensor:
        return state_of(self.engine, self.params[fqn])["weight"]

    def state(self, fqn: str) -> dict[str, Any]:
        return dict(self.optimizer.state.get(self.params[fqn], {}))

    def thaw(self, fqns: list[str]) -> None:
        """As `PlainSide.thaw`."""
        _thaw(self, fqns)

    def close(self) -> None:
        self.engine.close()


Side = PlainSide | PagedSide


def _thaw(side: Side, fqns: list[str]) -> None:
    side.optimizer.add_param_group({"params": [side.of(fqn) for fqn in fqns], "lr": 0.01})
    for fqn in fqns:
        for param in (side.params[fqn], side.of(fqn)):
            param.requires_grad_(True)


@contextlib.contextmanager
def two_sides(model: nn.Module, setting: Setting, directory: Path) -> Iterator[tuple[PlainSide, PagedSide]]:
    """Both sides, from equal models."""
    plain = PlainSide(copy.deepcopy(model), setting)
    paged = PagedSide(model, setting, directory)
    try:
        yield plain, paged
    finally:
        paged.close()
