"""What optimizers of whole parameters refuse, as far as it needs several processes."""

from __future__ import annotations

import pytest
import torch

from infinity.errors import OptimizerNotPageableError
from infinity.optim.classes.lamb import Lamb
from infinity.optim.piece import PieceUpdater
from infinity.optim.state_support import check_parts
from infinity.optim.template import build_template


def test_ranks_with_parts_of_the_states_are_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    for optimizer, is_refused in ((Lamb([param]), True), (torch.optim.AdamW([param]), False)):
        template = build_template(optimizer, [("weight", param)], "cpu")
        updater = PieceUpdater(template)
        check_parts(template, updater, 0, is_divided=False)
        if is_refused:
            with pytest.raises(OptimizerNotPageableError, match=r"Lamb .*stage 2 .*Set zero_optimization\.stage to 0"):
                check_parts(template, updater, 2, is_divided=True)
        else:
            check_parts(template, updater, 2, is_divided=True)
