"""The collectives of a step, recorded one by one: the bytes of the ZeRO paper's formulas, in one order on all ranks."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.distributed.collectives import Ranks
from tests.ranks import require_ranks

_WIDTH, _LAYERS = 512, 4
_NUMEL = _LAYERS * _WIDTH * _WIDTH


class _Recorded:
    """What ranks have exchanged inside the ``with`` block: names and labels by thread, and bytes sent by name."""

    def __init__(self) -> None:
        self.order: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.num_bytes: dict[str, float] = defaultdict(float)

    def __enter__(self) -> _Recorded:
        run = self._run = Ranks._run

        def record(ranks: Ranks, what: str, name: str, *args: Any, **options: Any) -> None:
            self.order[threading.current_thread().name].append((name, what))
            sent = args[1]
            if sent.dtype != torch.uint8:  # a meeting
                kind = "norms" if len(args) > 2 else name  # `collect` sends to one rank alone
                copies = {"all_gather_into_tensor": ranks.num - 1, "all_to_all_single": 1 - 1 / ranks.num, "norms": 1}
                self.num_bytes[kind] += sent.numel() * sent.element_size() * copies[kind]
            run(ranks, what, name, *args, **options)

        Ranks._run = record  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Ranks._run = self._run  # type: ignore[method-assign]


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("num", [2, 4])
def test_a_step_sends_what_the_paper_says(num: int, tmp_path: Path) -> None:
    def train(rank: int) -> None:
        for stage in (0, 1, 2):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)))
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "zero_optimization": {"stage": stage},
                "bf16": {"enabled": True},
                "infinity": {"progress_bars": False},
            }
            engine = infinity.initialize(model=model, config=config)[0]
            for number in range(2):
                with _Recorded() as recorded:
                    x = torch.randn(2, _WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
                    engine.backward(engine(x.bfloat16()).float().square().mean())
                    engine.step()
                    engine.flush()
            shard = _NUMEL * (num - 1) / num
            found = recorded.num_bytes
            assert found["all_to_all_single"] == pytest.approx(4 * shard, rel=0.01)
            assert found["all_gather_into_tensor"] == pytest.approx((2 if stage else 4) * shard, rel=0.01)
            assert found["norms"] <= 4 * shard / num * 1.01
            of_ranks: list[Any] = [None] * num
            torch.distributed.all_gather_object(of_ranks, dict(recorded.order))
            assert all(each == of_ranks[0] for each in of_ranks), stage
            engine.close()

    require_ranks(num, train, tmp_path)
