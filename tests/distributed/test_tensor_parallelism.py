"""torch's own tensor parallelism (``parallelize_module``, DTensors) beside data parallelism: the bits of plain torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss

import infinity
from infinity.errors import ModelError, OptimizerNotPageableError
from tests.ranks import on_ranks, require_ranks

_WIDTH, _STEPS = 32, 3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.plain = nn.Linear(_WIDTH, _WIDTH)  # that nobody divides
        self.head = nn.Linear(_WIDTH, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.plain(x)).mean(1)


def _parallelized(mesh: Any, *, by_sequence: bool = False) -> nn.Module:
    model = _Model()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(2):
        plan |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
        if by_sequence:
            plan[f"blocks.{number}"] = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)
            )
            plan[f"blocks.{number}.norm"] = SequenceParallel()
            plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
    return parallelize_module(model, mesh, plan)


def _config(directory: Path, stage: int, tier: str = "nvme", **changes: Any) -> dict[str, Any]:
    where = {"device": tier} | ({"nvme_path": str(directory)} if tier == "nvme" else {})
    zero = {"stage": stage, "offload_param": where, "offload_optimizer": where} if stage == 3 else {"stage": stage}
    section: dict[str, Any] = {"progress_bars": False}
    if tier == "nvme":
        section |= {"keep_in_memory": False, "host_memory_budget": "1MB"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "infinity": section,
    } | changes


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(50, (2, 8), generator=generator), torch.randn(2, 4, generator=generator)


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


class _Plain:
    """In plain torch: each process computes the data of all data ranks, whose gradients are averaged."""

    def __init__(self, model: nn.Module, num_data: int, *, is_fused: bool = True) -> None:
        self.model, self.num_data = model, num_data
        kinds = [
            [each for each in model.parameters() if isinstance(each, DTensor) == is_one] for is_one in (True, False)
        ]
        groups = [{"params": kind} for kind in kinds]  # the fused kernel takes no mixture
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.01, fused=is_fused)

    def step(self, number: int) -> tuple[list[torch.Tensor], float]:
        losses = []
        for rank in range(self.num_data):
            x, y = _batch(number, rank)
            losses.append(mse_loss(self.model(x), y))
            parameters = list(self.model.parameters())
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(losses[-1] / self.num_data, parameters), strict=True
            ):
                if isinstance(parameter, DTensor):
                    # torch adds up sums of parts of several backwards, and then the parts
                    gradient = gradient.redistribute(placements=parameter.placements)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        norms = []
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(parameter.grad)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        coefficient = torch.clamp(0.05 / (norm + 1e-6), max=1.0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                _local(parameter.grad).mul_(coefficient)  # type: ignore[arg-type]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, float(norm)


def _step(engine: Any, number: int, data_rank: int) -> torch.Tensor:
    x, y = _batch(number, data_rank)
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def _require_equal(model: nn.Module, plain: nn.Module) -> None:
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(_local(found[name]), _local(value)), name


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (2, "none"), (3, "nvme")])
@pytest.mark.parametrize("by_sequence", [False, True])
@on_ranks(4)
def test_beside_data_parallelism(rank: int, stage: int, tier: str, by_sequence: bool, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _parallelized(mesh["tp"], by_sequence=by_sequence)
    plain = _Plain(_parallelized(mesh["tp"], by_sequence=by_sequence), 2)
    names = [name for name, _ in model.named_parameters()]
    with infinity.initialize(model=model, config=_config(tmp_path / str(rank), stage, tier), mesh_param=mesh)[
        0
    ] as engine:
        assert [name for name, _ in engine.module.named_parameters()] == names
        assert isinstance(model.blocks[0].up.weight, DTensor) and type(model.blocks[0].up).__name__ == "Linear"
        for number in range(_STEPS):
            losses, norm = plain.step(number)
            assert torch.equal(_step(engine, number, rank // 2), losses[rank // 2])
            assert engine.get_global_grad_norm() == norm
        _require_equal(engine.module, plain.model)
    assert type(model.blocks[0].up) is nn.Linear
    kinds = [type(parameter.data) for parameter in plain.model.parameters()]
    assert [type(parameter.data) for parameter in model.parameters()] == kinds
    _require_equal(model, plain.model)
    x, _ = _batch(9, 0)
    assert torch.equal(model(x), plain.model(x))


@pytest.mark.deep
@on_ranks(2)
def test_an_optimizer_and_groups_of_dtensors(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plain = _Plain(_parallelized(mesh["tp"]), 1, is_fused=False)
    losses = [plain.step(number)[0][0] for number in range(_STEPS)]
    config = _config(tmp_path / str(rank), 3)
    del config["optimizer"]
    for how in ("optimizer", "model_parameters"):
        model = _parallelized(mesh["tp"])
        own: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
        wanted: dict[str, Any] = {"optimizer": own}
        if how == "model_parameters":
            groups = [{"params": {"one": parameter}.values()} for parameter in model.parameters()]
            wanted = {"model_parameters": groups, "optimizer": lambda each: torch.optim.AdamW(each, lr=0.01)}
        with infinity.initialize(model=model, config=config, mesh_param=mesh, **wanted)[0] as engine:
            assert [_step(engine, number, 0) for number in range(_STEPS)] == losses
        _require_equal(model, plain.model)
        held = {id(each) for group in own.param_groups for each in group["params"]}
        assert held == {id(each) for each in model.parameters()}


@pytest.mark.deep
def test_what_all_processes_share_needs_no_mesh(tmp_path: Path) -> None:
    """As tutorials make it, and as transformers divides a model that is loaded with a plan."""
    transformers = pytest.importorskip("transformers")
    tensors = pytest.importorskip("transformers.distributed").DistributedConfig
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**settings, num_key_value_heads=4, vocab_size=50)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "saved")

    def of_transformers(engine: Any, number: int) -> torch.Tensor:
        x, _ = _batch(number, 0)
        return engine(input_ids=x, labels=x).loss

    def of_torch(engine: Any, number: int) -> torch.Tensor:
        x, y = _batch(number, 0)
        return mse_loss(engine(x), y)

    def train(rank: int) -> None:
        warnings.simplefilter("ignore")  # transformers' own

        def loaded() -> Any:
            plan = tensors(tp_plan="auto")
            return transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved", distributed_config=plan)

        made: tuple[tuple[Any, Any], ...] = (
            (loaded, of_transformers),
            (lambda: _parallelized(init_device_mesh("cpu", (2,))), of_torch),
        )
        for make, loss_of in made:
            plain, model = make(), make()
            assert any(isinstance(each, DTensor) for each in plain.parameters())
            settings = _config(tmp_path / str(rank), 3, gradient_clipping=0.0)
            with infinity.initialize(model=model, config=settings)[0] as engine:
                optimizer = _Plain(plain, 1).optimizer
                for number in range(_STEPS):
                    expected = loss_of(plain, number)
                    expected.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    loss = loss_of(engine, number)
                    engine.backward(loss)
                    engine.step()
                    assert torch.equal(loss, expected)
            _require_equal(model, plain)

    require_ranks(2, train, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["Lamb", "Muon"])
@on_ranks(2)
def test_a_rule_for_whole_parameters_is_refused(rank: int, name: str, tmp_path: Path) -> None:
    """It would see the norm of a part, where torch's would see that of the whole."""
    model = _parallelized(init_device_mesh("cpu", (2,)))
    config = _config(tmp_path / str(rank), 0, "none", optimizer={"type": name, "params": {"lr": 0.01}})
    with pytest.raises(OptimizerNotPageableError, match="each rank has a part of them"):
        infinity.initialize(model=model, config=config)
    assert isinstance(model.blocks[0].up.weight, DTensor)


@pytest.mark.deep
@on_ranks(2)
def test_weights_in_another_dtype_are_given_back_to_all_that_hold_them(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = _parallelized(mesh["tp"])
    model.also = model.head  # the same weight in two places
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = _config(tmp_path / str(rank), 3, bf16={"enabled": True})
    del config["optimizer"]
    with infinity.initialize(model=model, optimizer=own, config=config, mesh_param=mesh)[0] as engine:
        x, y = _batch(0, 0)
        engine.backward(mse_loss(engine(x).float(), y))
        engine.step()
        expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    assert model.also.weight is model.head.weight and isinstance(model.head.weight, DTensor)
    held = {id(each) for group in own.param_groups for each in group["params"]}
    assert held == {id(each) for each in model.parameters()}
    for name, value in model.state_dict().items():
        assert torch.equal(_local(value), expected[name].to(value.dtype)), name


@pytest.mark.deep
@on_ranks(4)
def test_a_mesh_that_says_something_else_is_refused(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _parallelized(mesh["tp"])
    before = list(model.parameters())
    for wrong in ({}, {"mesh_param": init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))}):
        with pytest.raises(ModelError, match=r"embed.weight' is a DTensor of the ranks .*pass mesh\["):
            infinity.initialize(model=model, config=_config(tmp_path, 3), **wrong)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert isinstance(model.head.weight, DTensor) and type(model.head) is nn.Linear
