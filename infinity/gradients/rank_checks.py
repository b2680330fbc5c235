"""What has to be the same on all ranks before a step, and what to do if it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from infinity.distributed.agreement import require_same
from infinity.distributed.collectives import Ranks
from infinity.errors import RankError


def check_all_held(ranks: Ranks, loose: Iterable[torch.Tensor], step: int) -> None:
    """See that there are no ``loose`` parameters in the groups, whose gradients nobody averages.

    Raises:
        RankError: there are.
    """
    if ranks.num > 1 and any(True for _ in loose):
        raise RankError(
            f"step {step}",
            "parameters are in a group that infinity.initialize did not take over, and their gradients are not averaged",
            rank=ranks.number,
            cure="Put all parameters into the model before infinity.initialize, or train in one process",
        )


def check_same_groups(ranks: Ranks, describe: Callable[[], Mapping[str, str]], step: int) -> None:
    """See that all ranks have the same hyperparameters.

    Args:
        describe: gives them by name.
        step: for messages.

    Raises:
        RankError: they have not.
    """
    if ranks.num == 1:
        return
    what = f"the parameter groups in step {step}"
    cure = "Set the same on all ranks; where a schedule follows a metric, give it the mean over all of them"
    require_same(ranks, what, describe(), cure=cure)


def norms_of_ranks(ranks: Ranks, what: str, norm: torch.Tensor) -> torch.Tensor:
    """The norm (0-dim, fp32) that each rank has, bit for bit: 1-D, on the CPU."""
    bits = int(norm.detach().cpu().float().view(torch.int32))
    of_ranks = [found for (found,) in ranks.all_gather_ints(what, [bits])]
    return torch.tensor(of_ranks, dtype=torch.int32, device="cpu").view(torch.float32)


def check_same(ranks: Ranks, norm: torch.Tensor, step: int) -> None:
    """See that all ranks have the same 2-norm of all gradients (0-dim fp32), bit for bit.

    Raises:
        RankError: they have not.
    """
    if ranks.num == 1:
        return
    what = f"the norm of all gradients in step {step}"
    norms = norms_of_ranks(ranks, what, norm)
    if len({*norms.view(torch.int32).tolist()}) > 1:  # the bits: NaN is not equal to NaN
        raise RankError(
            what,
            f"it is {norms.tolist()} on the ranks {ranks.names(range(ranks.num))}",
            rank=ranks.number,
            cure="Change gradients between backward and step in the same way on all ranks. Parameters that were "
            "frozen in infinity.initialize cannot be trained on several ranks",
        )
