"""Compute alone: the plain torch loop with everything in memory, the floor that offloading is held against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .models import Program, Workload, build_model, micro_batches


class InMemory(Program):
    """Mixed precision as the engine defines it: fp32 main weights and gradients, model weights cast after each step."""

    def __init__(self, workload: Workload, settings: dict[str, Any]) -> None:
        workload = replace(workload, checkpointing=settings.get("checkpointing", workload.checkpointing))
        self._workload = workload
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = build_model(workload, settings.get("build_on", "cpu")).to(self._device)
        for parameter in self._model.parameters():  # buffers keep their dtype, as in the engine
            parameter.data = parameter.data.to(getattr(torch, workload.dtype))
        self._params = [p for p in self._model.parameters() if p.requires_grad]
        # fp32 models are their own main weights: the optimizer updates the parameters themselves.
        self._mains = [p.detach().float() if p.dtype != torch.float32 else p for p in self._params]
        params = workload.optimizer_params()
        self._optimizer = torch.optim.AdamW(self._mains, fused=True, **(params | {"betas": tuple(params["betas"])}))
        self._batches = micro_batches(workload, self._device)

    def step(self) -> float:
        total = 0.0
        scale = self._workload.num_micro_batches
        for _ in range(scale):
            loss = self._model(**next(self._batches)).loss
            # The mean over the micro-batches, as the engine divides it.
            (loss / scale).backward()
            total += float(loss.detach())
            self._accumulate()
        if self._workload.clip:
            torch.nn.utils.clip_grad_norm_(self._mains, self._workload.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for param, main in zip(self._params, self._mains, strict=True):
            if param is not main:
                param.data.copy_(main.data)
        return total / scale

    def _accumulate(self) -> None:
        for param, main in zip(self._params, self._mains, strict=True):
            if param is main or param.grad is None:
                continue
            # bf16 gradients are added up in fp32, and freed at once.
            grad = param.grad.float()
            main.grad = grad if main.grad is None else main.grad.add_(grad)
            param.grad = None

    def flush(self) -> None:
        """Waits for the device: nothing else is pending in plain torch."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def describe(self) -> dict[str, Any]:
        return {"num_parameters": sum(p.numel() for p in self._params), "device": str(self._device)}
