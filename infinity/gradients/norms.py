"""The norm of all gradients, also when processes have different parts of the model, and the factor of clipping.

[Note: norms of parts] The processes of a row (`Mesh.parts`) exchange the norm of each parameter, by name. The result
has the bits of torch's ``clip_grad_norm_``, for which a stage of a pipeline is a piece of ``model.parameters()``, and a
tensor that is divided has one norm, the root of the sum of squares of its parts' (as of a DTensor). What each tensor
rank has whole (biases, layer norms) counts once. An attribute of the parameter says which is which, as in Megatron and
DeepSpeed: without it, a parameter must have the same gradient on all tensor ranks. So a forgotten attribute, and a sum
over tensor ranks that the script forgot, are errors and not a wrong norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from infinity.distributed.agreement import gather_results
from infinity.distributed.meshes import Mesh
from infinity.errors import RankError

_MARKS = ("tensor_model_parallel", "model_parallel")
"""Attributes of a parameter of which each tensor rank has its own part."""


def total_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The global 2-norm from the norms per parameter, in the order of ``model.parameters()``. 0-dim fp32 tensor."""
    if not norms:
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")
    # torch.stack needs one device. Norms of loose parameters may be on a GPU while those of main gradients are not.
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
    # 1e-6 is torch's constant, which keeps the quotient finite for a norm of 0.
    return torch.clamp(maximum / (norm + 1e-6), max=1.0)


class ParameterNorm(NamedTuple):
    """The norm of one gradient, as one process has it."""

    fqn: str
    is_part: bool
    """Whether other tensor ranks have other parts of the same parameter."""
    norm: torch.Tensor
    """2-norm, 0-dim fp32."""


def is_part(parameter: Any) -> bool:
    """Whether the script says that other tensor ranks have other parts of the parameter."""
    return any(getattr(parameter, mark, False) is True for mark in _MARKS)


def norm_of_model(mesh: Mesh, norms: Sequence[ParameterNorm], scale: float, step: int) -> torch.Tensor:
    """The 2-norm of all gradients of all parts, 0-dim fp32, divided by their scale.

    Args:
        mesh: who has which part. All processes of a row call it at the same point.
        norms: of this process's part, in the order of ``model.parameters()``.
        scale: by which they are multiplied.
        step: for messages.

    Raises:
        RankError: tensor ranks have different norms of a parameter of which each has the whole; or as of
        `Ranks.all_gather_ints`.
    """
    if not mesh.is_divided:
        return total_norm([each.norm for each in norms]) / scale
    what = f"the norm of all parts' gradients in step {step}"
    own = {each.fqn: (each.is_part, float(each.norm)) for each in norms}
    of_parts: list[tuple[dict[str, tuple[bool, float]], float]] = gather_results(mesh.parts, what, lambda: (own, scale))
    # Ranks may have looked at gradients or not, which takes the scale out: with several scales each norm is divided. A
    # process without gradients has no scale that would count.
    scales = {its_scale for of_part, its_scale in of_parts if of_part} or {scale}
    common = scales.pop() if len(scales) == 1 else None
    of_ranks = {
        place: {fqn: (is_part, norm if common else norm / its_scale) for fqn, (is_part, norm) in of_part.items()}
        for place, (of_part, its_scale) in zip(mesh.places, of_parts, strict=True)
    }
    found: list[torch.Tensor] = []
    # In the order of torch's `model.parameters()` over all stages: another order of the sum could give other bits.
    for stage in sorted({place.stage for place in of_ranks}):
        of_stage = [of_ranks[place] for place in sorted(of_ranks) if place.stage == stage]
        for fqn in {fqn: None for of_part in of_stage for fqn in of_part}:
            found.append(_merged(mesh, what, fqn, [of_part.get(fqn) for of_part in of_stage]))
    return total_norm(found) / (common or 1.0)


def _merged(mesh: Mesh, what: str, fqn: str, of_tensor_ranks: Sequence[tuple[bool, float] | None]) -> torch.Tensor:
    """The norm of one parameter, from what the tensor ranks of a stage have of it; None: no gradient.

    See [Note: norms of parts].
    """
    of_ranks = [each for each in of_tensor_ranks if each is not None]
    norms = [norm for _, norm in of_ranks]
    values = torch.tensor(norms, dtype=torch.float32, device="cpu")
    if len(of_tensor_ranks) == 1:
        return values[0]
    if all(is_part for is_part, _ in of_ranks):
        return values.pow(2.0).sum().pow(0.5)  # as DTensor does it
    # NaN is not equal to itself, but a NaN on all ranks is an overflow, not a difference.
    is_same = len({*norms}) == 1 or all(math.isnan(norm) for norm in norms)
    if len(of_ranks) == len(of_tensor_ranks) and is_same and not any(is_part for is_part, _ in of_ranks):
        return values[0]
    shown = [None if each is None else each[1] for each in of_tensor_ranks]
    raise RankError(
        what,
        f"that of '{fqn}' is {shown} on the tensor ranks, which all have the whole parameter",
        rank=mesh.data.number,
        cure=f"If each has a part of it, set parameter.{_MARKS[0]} = True on all of them before infinity.initialize; if not, add "
        "its gradients up over the tensor ranks in backward (in a hook of the parameter)",
    )
