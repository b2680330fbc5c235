"""Two processes that share a GPU, joined by gloo: stages 1 to 3 have the bits of stage 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.internals import world

pytestmark = pytest.mark.gpu

_NUM = 2
_WIDTH = 256


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().square().mean()


def _found(rank: int, config: dict[str, Any], zero: dict[str, Any]) -> list[torch.Tensor]:
    with infinity.initialize(model=_Model(), config=config | {"zero_optimization": zero})[0] as engine:
        assert engine.device.type == "cuda"
        found = []
        for number in range(6):
            numbers = torch.Generator().manual_seed(1000 * rank + number)
            loss = engine(torch.randn(4, _WIDTH, generator=numbers).to(engine.device, engine.config.compute_dtype))
            engine.backward(loss)
            engine.step()
            found.append(loss.detach().cpu())
        found += [torch.tensor(engine.get_global_grad_norm())]
        found += [value.cpu().clone() for value in engine.module.state_dict().values()]
    return found


def _train(rank: int, directory: str, config: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=_NUM)
    drive = {"device": "nvme", "nvme_path": directory}
    settings: dict[str, dict[str, Any]] = {
        "0": {"stage": 0, "offload_optimizer": drive},
        "1": {"stage": 1, "offload_optimizer": drive},
        "2": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "3": {"stage": 3, "offload_optimizer": drive, "offload_param": drive},
    }
    found = {name: _found(rank, config, zero) for name, zero in settings.items()}
    # As little of the GPU's memory as there has to be: weights come from both ranks' shares.
    little = config | {"infinity": config["infinity"] | {"device_memory_budget": 3 * 4 * _WIDTH * (_WIDTH + 1)}}
    for tier in ({"device": "none"}, {"device": "cpu"}, drive):
        zero = {"stage": 3, "offload_optimizer": drive, "offload_param": tier}
        found[f"3 divided on {tier['device']}"] = _found(rank, little, zero)
    assert world().sent_bytes["fetches"] > 0
    is_early = config.get("gradient_clipping") == 0
    resolved = infinity.load_config(config | {"zero_optimization": settings["3"]})
    assert resolved.infinity.update == ("in_backward" if is_early else "step")
    for name, values in found.items():
        for place, (one, other) in enumerate(zip(values, found["0"], strict=True)):
            assert torch.equal(one, other), (name, place)
    on_the_gpu = [_found(rank, config, {"stage": stage}) for stage in (0, 2)]  # which updates there
    assert all(torch.equal(one, other) for one, other in zip(*on_the_gpu, strict=True))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_clipping": 0},
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05},
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "gradient_clipping": 0},
    ],
    ids=["fp32", "fp32-in-backward", "bf16", "bf16-in-backward"],
)
@pytest.mark.parametrize(
    "memory", [{}, {"keep_in_memory": False, "host_memory_budget": "14MiB"}], ids=["roomy", "little"]
)
def test_divided_states_have_the_bits_of_stage_0(
    changes: dict[str, Any], memory: dict[str, Any], tmp_path: Path
) -> None:
    base = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    config = base | {"infinity": memory} | changes
    torch.multiprocessing.spawn(_train, args=(str(tmp_path), config), nprocs=_NUM)  # a fork has no CUDA
