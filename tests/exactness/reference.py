"""The loop in plain torch that says which bits are right. Nothing here knows of the packages under test.

- The main weight is the parameter as it came, in fp32; the model weight is its cast to the compute dtype. Buffers keep their
  dtype, but for those of BatchNorms with weights and spectral norms, for which torch wants one dtype.
- Each micro-batch runs backward on its share of the loss; its gradient is added to the main gradient in fp32, by autograd
  itself if the weights are fp32.
- A parameter without a gradient in all micro-batches of a step is left alone.
- The norm is taken over whole main gradients in the order of ``model.parameters()``, and clips by torch's own rule.
- The optimizer updates the main weights, and their cast goes back into the model. It is torch's, or, where main weights are
  split (bf16 weight and 16-bit remainder), rounds to the nearest with halves away from zero.
- With a scaler, torch's own, losses are scaled, main gradients unscaled, and steps whose gradients are not finite skipped.
- If asked, the main gradient is rounded to bf16 after each addition.
- If asked, the states of the parameters that were updated are rounded after each step: see ``rounding``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.exactness.case import loss_of
from tests.exactness.record import Snapshot
from tests.exactness.rounding import rounded


class PlainTorch:
    """Trains a model without anything being paged.

    Args:
        model: as the user made it. Cast and trained in place.
        make_optimizer: takes the trainable main weights by FQN.
        num_micro_batches: the share of each loss is 1 / this; 1 where the user divides, or does not, himself.
        device, main_device: where the model computes, and where its main weights are (None: there as well).
        max_norm: of the clipped gradient; 0 for no clipping.
        rounds_half_up: how trainable main weights are cast to bf16.
        rounds_gradients: whether main gradients are rounded to bf16.
        state_dtype: as what states are kept between steps: ``fp32``, ``bf16`` or ``int8``.
        scaler: scales losses.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
        *,
        compute_dtype: torch.dtype,
        num_micro_batches: int = 1,
        max_norm: float = 0.0,
        device: torch.device | str = "cpu",
        main_device: torch.device | str | None = None,
        rounds_half_up: bool = False,
        rounds_gradients: bool = False,
        state_dtype: str = "fp32",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        model.to(device)
        self.main = {
            fqn: nn.Parameter(param.detach().to(main_device or param.device, torch.float32, copy=True))
            for fqn, param in model.named_parameters()
            if param.requires_grad
        }
        self.model = cast_parameters(model, compute_dtype)
        self.trainable = {fqn: param for fqn, param in model.named_parameters() if param.requires_grad}
        self.optimizer = make_optimizer(self.main)
        self.num_micro_batches = num_micro_batches
        self.max_norm = max_norm
        self._rounds_half_up = rounds_half_up
        self._rounds_gradients = rounds_gradients
        self._state_dtype = state_dtype
        self.scaler = scaler or torch.amp.GradScaler(enabled=False)
        self.was_skipped = False
        self._num_updates = dict.fromkeys(self.main, 0)
        self._cast()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return loss_of(self.model(**batch))

    def backward(self, loss: torch.Tensor) -> None:
        share = loss.float() if self.scaler.is_enabled() else loss
        added_by_autograd = {
            fqn
            for fqn, param in self.trainable.items()
            if param.dtype == torch.float32 and param.device == self.main[fqn].device
        }
        for fqn in added_by_autograd:
            self.trainable[fqn].grad = self.main[fqn].grad
        self.scaler.scale(share / self.num_micro_batches).backward()
        for fqn, param in self.trainable.items():
            if param.grad is None:
                continue
            main = self.main[fqn]
            gradient = param.grad.float()
            main.grad = gradient if main.grad is None or fqn in added_by_autograd else main.grad + gradient
            if self._rounds_gradients:
                main.grad = main.grad.bfloat16().float()
            param.grad = None

    def step(self) -> torch.Tensor:
        self.scaler.unscale_(self.optimizer)
        with_gradient = [main for main in self.main.values() if main.grad is not None]
        norm = torch.nn.utils.get_total_norm([main.grad for main in with_gradient if main.grad is not None])
        if self.max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(with_gradient, self.max_norm, norm)
        self.update()
        return norm

    def update(self) -> None:
        """The optimizer's step with the main gradients, and what follows from it."""
        gradients = {fqn: main.grad for fqn, main in self.main.items() if main.grad is not None}
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        self.was_skipped = self.scaler.is_enabled() and not is_finite
        updated = [] if self.was_skipped else list(gradients)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for main in self.main.values():
            main.grad = None
        for fqn in updated:
            self._num_updates[fqn] += 1
            main = self.main[fqn]
            for name, value in self.optimizer.state[main].items():
                if isinstance(value, torch.Tensor) and value.shape == main.shape and name != "step":
                    value.copy_(rounded(value, self._state_dtype, fqn, name, self._num_updates[fqn]))
        self._cast()

    def _cast(self) -> None:
        with torch.no_grad():
            for fqn, param in self.trainable.items():
                main = self.main[fqn].detach()
                param.copy_(_half_up(main) if self._rounds_half_up else main)

    def evaluate(self, batch: dict[str, Any]) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            loss = loss_of(self.model(**batch))
        self.model.train()
        return loss

    def snapshot(self) -> Snapshot:
        state = {fqn: dict(self.optimizer.state.get(main, {})) for fqn, main in self.main.items()}
        return Snapshot.copied(
            weights=dict(self.model.named_parameters()),
            buffers=dict(self.model.named_buffers()),
            main_weights=self.main,
            state=state,
        )

    def close(self) -> None:
        """Nothing to release; here because the other trainers have it."""


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast what is trained, and what is frozen beside it; returns the model."""
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param.is_floating_point():
                param.data = param.data.to(dtype)
        is_statistic = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine
        if is_statistic or type(module).__name__ == "_SpectralNorm":
            module.to(dtype)
    return model


def _half_up(values: torch.Tensor) -> torch.Tensor:
    """Finite fp32 values rounded to what bf16 can hold: to the nearest, halves away from zero."""
    bits = values.reshape(-1).cpu().numpy().view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x8000) // 0x10000 * 0x10000).astype(np.uint32)
    return torch.from_numpy(rounded.view(np.float32)).view(values.shape).to(values.device)
