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
from tests.ranks import on_ranks

_WIDTH, _LAYERS = 512, 12
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
                kind = "fetches" if sent.dtype == torch.int32 else kind
                copies = {
                    "all_gather_into_tensor": ranks.num - 1,
                    "all_to_all_single": 1 - 1 / ranks.num,
                    "norms": 1,
                    "fetches": ranks.num - 1,
                }
                self.num_bytes[kind] += sent.numel() * sent.element_size() * copies[kind]
            run(ranks, what, name, *args, **options)

        Ranks._run = record  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Ranks._run = self._run  # type: ignore[method-assign]


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("num", [2, 4])
@on_ranks()
def test_a_step_sends_what_the_paper_says(rank: int, num: int, tmp_path: Path) -> None:
    for stage, budget in ((0, None), (1, None), (2, None), (3, None), (3, "8MB")):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)))
        drive = {"device": "nvme", "nvme_path": str(tmp_path)}
        offload = {} if budget is None else {"offload_param": drive, "offload_optimizer": drive}
        section = {} if budget is None else {"keep_in_memory": False, "host_memory_budget": budget}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage, **offload},
            "bf16": {"enabled": True},
            "infinity": {"progress_bars": False, **section},
        }
        with infinity.initialize(model=model, config=config)[0] as engine:
            units = engine._parts.parameter_map.units
            for number in range(3):
                with _Recorded() as recorded:
                    x = torch.randn(2, _WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
                    engine.backward(engine(x.bfloat16().requires_grad_()).float().square().mean())
                    engine.step()
                    engine.flush()
                    for unit in units:
                        if unit.arrival is not None:
                            unit.arrival.wait()  # the next step's, which begin in this one
            shard = _NUMEL * (num - 1) / num
            found = recorded.num_bytes
            assert found["all_to_all_single"] == pytest.approx(4 * shard, rel=0.01)
            assert found["norms"] <= 4 * shard / num * 1.01
            if budget is None:
                assert found["all_gather_into_tensor"] == pytest.approx((2 if stage else 4) * shard, rel=0.01)
                assert not found["fetches"]
            else:  # in forward and in backward, but for the units between that are in memory
                num_held = engine._parts.storage.pool.capacity_bytes // (2 * _WIDTH * _WIDTH)
                assert 2 <= num_held < _LAYERS / 2
                gathers = 2 - num_held / _LAYERS
                assert found["fetches"] == pytest.approx(gathers * 2 * shard, rel=0.01)
                assert not found["all_gather_into_tensor"]
            of_ranks: list[Any] = [None] * num
            torch.distributed.all_gather_object(of_ranks, dict(recorded.order))
            assert all(each == of_ranks[0] for each in of_ranks), stage
