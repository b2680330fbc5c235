"""ZeRO's stages: what each rank keeps and moves, and the same bits as stage 0 where every rank keeps all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss

import infinity
from tests.distributed.common import offload, require_same, states_of, weights_of
from tests.ranks import on_ranks

_WIDTH = 96


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))
        self.head = nn.Linear(_WIDTH, 4)
        self.rarely = nn.Linear(_WIDTH, 4, bias=False)

    def forward(self, x: torch.Tensor, *, is_rare: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.rarely(x) if is_rare else self.head(x)


def _config(directory: Path, stage: int, optimizer: str, parameters: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": offload(optimizer, directory),
            "offload_param": offload(parameters, directory),
        },
    } | changes


def _batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(4, _WIDTH, generator=generator), torch.randn(4, 4, generator=generator)


def _backward(engine: Any, rank: int, number: int, *, is_rare: bool = False) -> torch.Tensor:
    x, y = _batch(rank, number)
    loss = mse_loss(engine(x.to(engine.config.compute_dtype), is_rare=is_rare).float(), y)
    engine.backward(loss)
    return loss.detach()


def _train(engine: Any, rank: int, num_steps: int = 3) -> dict[str, torch.Tensor]:
    """All that a training leaves behind, by name."""
    found: dict[str, torch.Tensor] = {}
    for step in range(num_steps):
        for part in range(2):
            is_rare = part == 1 and step == rank  # on one rank only
            found[f"loss {step} {part}"] = _backward(engine, rank, 2 * step + part, is_rare=is_rare)
            engine.step()
        found[f"norm {step}"] = torch.tensor(engine.get_global_grad_norm())
    return found | weights_of(engine) | states_of(engine)


_DIVIDED = {"infinity": {"host_memory_budget": "800KiB", "keep_in_memory": False}}
"""Gradients are spilled as well, and units make room for each other: in stage 3 each rank keeps its shard of them alone."""


@pytest.mark.deep
@pytest.mark.parametrize(("precision", "num"), [("fp32", 2), ("fp16", 2), ("bf16", 3)])
@on_ranks()
def test_all_stages_and_offloads_are_equal(rank: int, precision: str, num: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    kinds = [(0, "none", "none", changes), (1, "nvme", "none", changes), (2, "cpu", "cpu", changes)]
    kinds += [(3, "nvme", "nvme", changes | _DIVIDED), (2, "none", "none", changes), (3, "cpu", "nvme", changes)]
    expected: dict[str, torch.Tensor] = {}
    for stage, optimizer, parameters, others in kinds:
        config = _config(tmp_path, stage, optimizer, parameters, others)
        with infinity.initialize(model=_Model(), config=config)[0] as engine:
            found = _train(engine, rank)
        expected = expected or found
        require_same(found, expected)


@pytest.mark.deep
@pytest.mark.parametrize("num", [1, 2, 4])
@on_ranks()
def test_what_each_rank_keeps_and_moves(rank: int, num: int, tmp_path: Path) -> None:
    numel = 2 * 512 * 512
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
    config = _config(tmp_path, 1, "nvme", "none", {"infinity": {"keep_in_memory": False}})
    config |= {"gradient_accumulation_steps": 1, "bf16": {"enabled": True}}
    with infinity.initialize(model=model, config=config)[0] as engine:
        storage = engine._parts.storage
        for _ in range(2):
            before = storage.counters()
            engine.backward(engine(torch.ones(2, 512, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
            engine.flush()
            after = storage.counters()
        extents = [each.extent for each in storage.records._records.values() if each.extent is not None]
        kept = sum(extent.num_bytes for extent in extents)
        # A remainder of 2 bytes and two states of 4 for each element, of which a rank keeps 1/num.
        for found in (kept, after.read_bytes - before.read_bytes, after.write_bytes - before.write_bytes):
            assert found == pytest.approx(10 * numel / num, rel=0.02)


@pytest.mark.deep
@on_ranks(2)
def test_what_is_read_and_replaced_together(rank: int, tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    for stage in (0, 2, 3):
        changes = {"bf16": {"enabled": True}} | (_DIVIDED if stage == 3 else {})
        config = _config(tmp_path, stage, "nvme", "nvme", changes)
        with infinity.initialize(model=_Model(), config=config)[0] as engine:
            found = _train(engine, rank)
            weight = engine.module.layers[0].weight
            main = infinity.safe_get_full_fp32_param(weight)
            assert main is not None
            found["main"] = main
            infinity.safe_set_full_fp32_param(weight, main * 1.5)
            with torch.no_grad(), infinity.GatheredParameters(engine.module.head.parameters(), modifier_rank=1):
                if rank == 1:
                    engine.module.head.weight.mul_(2)
            found |= {f"then {name}": value for name, value in _train(engine, rank, 1).items()}
            engine.save_fp32_model(tmp_path / f"exported {stage}")
            saved = engine.optimizer.state_dict()
            engine.save_checkpoint(tmp_path / "saved", tag=stage)
            engine.optimizer.load_state_dict(saved)
            found |= {f"loaded {name}": value for name, value in _train(engine, rank, 1).items()}
            for other in {0, stage}:
                engine.load_checkpoint(tmp_path / "saved", tag=other)
                require_same(_train(engine, rank, 1), {k[7:]: v for k, v in found.items() if k.startswith("loaded ")})
            infinity.deepspeed.comm.barrier()
            found |= {f"file {k}": v for k, v in load_file(tmp_path / f"exported {stage}/model.safetensors").items()}
        expected = expected or found
        require_same(found, expected)


@on_ranks(2)
def test_gradients_before_a_step(rank: int, tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    for stage in (0, 2):
        config = _config(tmp_path, stage, "cpu", "none", {"gradient_accumulation_steps": 1})
        with infinity.initialize(model=_Model(), config=config)[0] as engine:
            weight, found = engine.module.layers[1].weight, {}
            _backward(engine, rank, 0)
            found["mean"] = weight.grad.clone()
            _backward(engine, rank, 1)  # with a mean that has been computed before
            engine.step()
            found |= {f"two {name}": value for name, value in weights_of(engine).items()}
            with engine.no_sync():
                _backward(engine, rank, 2)
            found["own"] = weight.grad.clone()
            _backward(engine, rank, 3)
            engine.zero_grad()
            x, y = _batch(rank, 4)
            mse_loss(engine(x), y).backward()
            found["whole"] = weight.grad.clone()
            nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            found |= weights_of(engine)
        expected = expected or found
        require_same(found, expected)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("changes", [{}, _DIVIDED, {"fp16": {"enabled": True}}], ids=["in memory", "spilled", "fp16"])
@on_ranks(2)
def test_gradients_are_read_and_set_between_backward_and_step(
    rank: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """In all stages, as DeepSpeed's: all processes call it. One parameter has a gradient on one rank alone."""
    sizes = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    expected: dict[str, torch.Tensor] = {}
    for stage in (0, 1, 2, 3):
        parameters = "nvme" if stage == 3 else "none"
        config = _config(tmp_path, stage, "nvme", parameters, changes | sizes)
        engine, found = infinity.initialize(model=_Model(), config=config)[0], {}
        weights = dict(engine.module.named_parameters())
        for number in range(4):
            _backward(engine, rank, number, is_rare=number == rank)
            for name, weight in weights.items() if number != 2 else ():
                gradient = infinity.safe_get_full_grad(weight)
                found[f"{number} {name}"] = torch.zeros(0) if gradient is None else gradient
            if number == 1:
                nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01)
            if number:
                infinity.safe_set_full_grad(weights["head.weight"], torch.full((4, _WIDTH), 0.5))
            engine.step()
            found[f"norm {number}"] = torch.tensor(engine.get_global_grad_norm())
        found |= weights_of(engine) | states_of(engine)
        engine.close()
        expected = expected or found
        require_same(found, expected)


class _Deep(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(num_blocks))
        self.head = nn.Linear(_WIDTH, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return mse_loss(self.head(x).float(), y)


def _train_deep(engine: Any, rank: int, schedule: str) -> list[Any]:
    values: list[Any] = []
    for step in range(3):
        batches = [_batch(rank, 4 * step + part) for part in range(4)]
        loss = engine.train_batch(iter((x.to(engine.config.compute_dtype), y) for x, y in batches))
        assert engine.report.schedule == schedule, engine.report.schedule_reason
        values += [loss.clone(), engine.get_global_grad_norm(), engine.was_step_applied()]
    return values + [value.clone() for value in engine.module.state_dict().values()]


@pytest.mark.deep
@on_ranks(2)
def test_vertical_steps_are_equal_to_ordinary_ones(rank: int, tmp_path: Path) -> None:
    """Also where one rank cannot take them."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 20}}  # the first steps are skipped
    for stage, changes in [(0, {}), (1, {}), (3, fp16), (3, _DIVIDED)]:
        found: list[list[Any]] = []
        mixed = [("ordinary", "vertical")] if changes is not _DIVIDED else []  # else they gather in other orders
        for of_ranks in (("ordinary", "ordinary"), ("vertical", "vertical"), *mixed):
            asked = "vertical" if "vertical" in of_ranks else "ordinary"
            also = {**changes.get("infinity", {}), "schedule": asked, "keep_in_memory": False}
            config = _config(tmp_path, stage, "nvme", "nvme" if stage == 3 else "none", changes | {"infinity": also})
            model = _Deep()
            with infinity.initialize(model=model, config=config | {"gradient_accumulation_steps": 4})[0] as engine:
                if asked != of_ranks[rank]:  # a hook that would see what the schedule sums
                    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
                found.append(_train_deep(engine, rank, of_ranks[rank]))
        for values in zip(*found, strict=True):
            torch.testing.assert_close(values[1:], values[:1] * (1 + len(mixed)), rtol=0, atol=0, equal_nan=True)
