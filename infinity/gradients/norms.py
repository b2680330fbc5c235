"""The norm of all gradients, and what clipping makes of it.

Pure: knows norms; must not know whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def total_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The global 2-norm from the norms per parameter, in the order of ``model.parameters()``. 0-dim fp32 tensor."""
    if not norms:
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")
    found = list(norms)
    apart = next((norm.device for norm in norms if norm.device.type != "cpu"), None)
    here = [place for place, norm in enumerate(norms) if norm.device.type == "cpu"]
    if apart is not None and here:  # in one copy, and to the device: the other way would wait for it
        moved = torch.stack([norms[place] for place in here]).to(apart, non_blocking=True)
        for place, norm in zip(here, moved.unbind(), strict=True):
            found[place] = norm
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(found), 2.0)
    return total


def clip_coefficient(norm: torch.Tensor, maximum: float) -> torch.Tensor:
    """The factor that ``torch.nn.utils.clip_grad_norm_`` multiplies with. 0-dim fp32 tensor."""
    return torch.clamp(maximum / (norm + 1e-6), max=1.0)
