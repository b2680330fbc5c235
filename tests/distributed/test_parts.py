"""Processes that have parts of a model, by tensor parallelism or stages of a pipeline: equal to the same in plain torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers and DDP import at their first use: once here, not in each process
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import linear, mse_loss

import infinity
from infinity.errors import CheckpointError, ConfigError, ModelError, RankError
from tests.distributed.common import require_same, weights_of
from tests.internals import training_checkpoint as checkpoint
from tests.ranks import on_ranks, require_ranks, run_ranks

_WIDTH, _HIDDEN, _LAYERS = 16, 32, 3


class _Sum(torch.autograd.Function):
    """The sum over tensor ranks in forward, and in backward what comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Copy(torch.autograd.Function):
    """What comes in forward, and the sum over tensor ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Layer(nn.Module):
    """Two matrices, the first divided by rows and the second by columns, as in Megatron."""

    def __init__(self, group: Any, place: int, *, is_marked: bool = True, is_summed: bool = True) -> None:
        super().__init__()
        self.group, self.is_summed = group, is_summed
        self.norm = nn.LayerNorm(_WIDTH)
        part = slice(place * _HIDDEN // 2, (place + 1) * _HIDDEN // 2)
        first, second = nn.Linear(_WIDTH, _HIDDEN), nn.Linear(_HIDDEN, _WIDTH)  # of all, so that all draw the same
        self.rows = nn.Parameter(first.weight.detach()[part].clone())
        self.offset = nn.Parameter(torch.zeros(_HIDDEN // 2))
        self.columns = nn.Parameter(second.weight.detach()[:, part].clone())
        self.bias = nn.Parameter(second.bias.detach().clone())
        if is_marked:
            for parameter in (self.rows, self.offset, self.columns):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norm(x)
        if self.is_summed:
            inside = _Copy.apply(inside, self.group)
        inside = linear(torch.tanh(linear(inside, self.rows, self.offset)), self.columns)
        return x + _Sum.apply(inside, self.group) + self.bias


def _groups(rank: int) -> tuple[Any, Any]:
    """Of four processes those with the same part, and those with the other parts: tensor ranks lie beside each other."""
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    return data, tensor


def _mpu(data: Any) -> Any:
    return SimpleNamespace(get_data_parallel_group=lambda: data)


def _tensor_mesh() -> Any:
    """Of four processes the data dimension and that of tensor ranks, which lie beside each other."""
    return _mesh("dp", "tp")


def _model(tensor: Any, rank: int, **how: bool) -> nn.Module:
    torch.manual_seed(rank // 2)  # those with the same part begin as the first of them
    return nn.Sequential(*(_Layer(tensor, rank % 2, **how) for _ in range(_LAYERS)))


def _config(directory: Path, **changes: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "gradient_clipping": 0.05,
    } | changes


def _batch(data_rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * data_rank + number)
    return torch.randn(2, _WIDTH, generator=generator), torch.randn(2, _WIDTH, generator=generator)


def _train(engine: Any, data_rank: int, steps: range) -> list[torch.Tensor]:
    losses = []
    for number in steps:
        for part in range(2):
            x, y = _batch(data_rank, 2 * number + part)
            losses.append(mse_loss(engine(x), y))
            engine.backward(losses[-1])
            engine.step()
    return losses


class _Plain:
    """The same in plain torch: DDP among those with the same part, and torch's norm of what all have."""

    def __init__(self, model: nn.Module, data: Any, tensor: Any) -> None:
        self.model, self.tensor = model, tensor
        self.ddp = nn.parallel.DistributedDataParallel(model, process_group=data)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01, fused=True)
        self.norm = torch.tensor(0.0)

    def train(self, data_rank: int, steps: range, clipping: float = 0.05) -> list[torch.Tensor]:
        losses = []
        for number in steps:
            with self.ddp.no_sync():
                x, y = _batch(data_rank, 2 * number)
                losses.append(mse_loss(self.ddp(x), y))
                (losses[-1] / 2).backward()
            x, y = _batch(data_rank, 2 * number + 1)
            losses.append(mse_loss(self.ddp(x), y))
            (losses[-1] / 2).backward()
            self.norm = self._norm()
            coefficient = torch.clamp(clipping / (self.norm + 1e-6), max=1.0)
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(coefficient)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def _norm(self) -> torch.Tensor:
        norms = []
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(parameter.grad)
            if getattr(parameter, "tensor_model_parallel", False):
                norm = norm**2
                dist.all_reduce(norm, group=self.tensor)
                norm = norm**0.5
            norms.append(norm)
        return torch.linalg.vector_norm(torch.stack(norms))


@pytest.mark.deep
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(4)
def test_tensor_parallelism_beside_ddp(rank: int, stage: int, tmp_path: Path) -> None:
    data, tensor = _groups(rank)
    config = _config(tmp_path)
    config["zero_optimization"]["stage"] = stage
    with infinity.deepspeed.initialize(model=_model(tensor, rank), config=config, mesh_param=_tensor_mesh())[
        0
    ] as engine:
        assert (engine.world_size, engine.dp_world_size, engine.mp_world_size) == (4, 2, 2)
        assert (engine.get_data_parallel_rank(), engine.get_tensor_parallel_rank()) == (rank // 2, rank % 2)
        assert engine.gradient_accumulation_steps() == 2
        plain = _Plain(_model(tensor, rank), data, tensor)
        for step in range(3):
            steps = range(step, step + 1)
            for mine, others in zip(_train(engine, rank // 2, steps), plain.train(rank // 2, steps), strict=True):
                assert torch.equal(mine, others)
            assert engine.get_global_grad_norm() == float(plain.norm)
        require_same(weights_of(engine), plain.model.state_dict())


def _stage(stage: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers[2 * stage : 2 * stage + 2])  # names are the same in both


@pytest.mark.deep
@pytest.mark.parametrize("stage_of_zero", [0, 3])
@on_ranks(4)
def test_stages_of_torchs_pipelining_beside_data_parallelism(rank: int, stage_of_zero: int, tmp_path: Path) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, data_rank = divmod(rank, 2)
    pipe, data = mesh["pp"].get_group(), mesh["dp"].get_group()

    def schedule(module: nn.Module) -> Any:
        of_stage = PipelineStage(module, stage, 2, torch.device("cpu"), group=pipe)
        return Schedule1F1B(of_stage, 4, loss_fn=mse_loss)

    config = _config(tmp_path, train_batch_size=16, train_micro_batch_size_per_gpu=8)
    config["zero_optimization"]["stage"] = stage_of_zero
    with infinity.initialize(model=_stage(stage), config=config, mesh_param=mesh)[0] as engine:
        plain = _stage(stage)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.01, fused=True)
        schedules = schedule(engine.module), schedule(plain)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + data_rank)
            x, y = torch.randn(8, _WIDTH, generator=generator), torch.randn(8, _WIDTH, generator=generator)
            losses: list[list[torch.Tensor]] = [[], []]
            for of_loop, each in zip(losses, schedules, strict=True):
                with engine.no_sync():
                    each.step(*() if stage else (x,), **{"target": y, "losses": of_loop} if stage else {})
            for mine, others in zip(*losses, strict=True):
                assert torch.equal(mine, others)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            norm = _norm_of_stages(plain, data, pipe)
            for parameter in plain.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(torch.clamp(0.05 / (norm + 1e-6), max=1.0))
            optimizer.step()
            optimizer.zero_grad()
            assert engine.get_global_grad_norm() == float(norm)
        require_same(weights_of(engine), plain.state_dict())


def _norm_of_stages(plain: nn.Module, data: Any, pipe: Any) -> torch.Tensor:
    """Average gradients as DDP does; returns their norm as one process with all stages takes it."""
    norms = []
    for parameter in plain.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad.mul_(0.5), group=data)
        norms.append(torch.linalg.vector_norm(parameter.grad))
    own = torch.stack(norms)
    of_stages = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(of_stages, own, group=pipe)
    return torch.linalg.vector_norm(torch.cat(of_stages))


@pytest.mark.deep
@on_ranks(4)
def test_processes_may_be_in_different_numbers_of_groups(rank: int, tmp_path: Path) -> None:
    """As with Megatron's, of which one stage alone has position embeddings."""
    for members in ([0], [1, 2], [0, 3]):
        dist.new_group(members)
    with _tensor_engine(rank, tmp_path) as engine:
        _train(engine, rank // 2, range(1))
        groups = import_module("infinity.deepspeed.utils.groups")
        for name, expected in (
            ("data", [rank % 2, rank % 2 + 2]),
            ("tensor_model", [rank // 2 * 2, rank // 2 * 2 + 1]),
        ):
            assert dist.get_process_group_ranks(getattr(groups, f"get_{name}_parallel_group")()) == expected


@pytest.mark.deep
@pytest.mark.parametrize("forgotten", ["is_marked", "is_summed"])
@on_ranks(4)
def test_a_norm_that_would_be_wrong_is_an_error(rank: int, forgotten: str, tmp_path: Path) -> None:
    """A zero bias is the same on all at first, and so are layer norms: values alone do not tell what is a part."""
    _, tensor = _groups(rank)
    model = _model(tensor, rank, **{forgotten: False})
    with infinity.initialize(model=model, config=_config(tmp_path), mesh_param=_tensor_mesh())[0] as engine:
        before = engine.module.state_dict()
        name = "0.rows" if forgotten == "is_marked" else "0.bias"  # what comes from the layers above
        with pytest.raises(
            RankError, match=rf"that of '{name}' is .*tensor_model_parallel = True on all of them before"
        ):
            _train(engine, rank // 2, range(1))
        for key, value in engine.module.state_dict().items():
            assert torch.equal(value, before[key])


def _other_mesh(rank: int) -> Any:
    meshes = _mesh("dp", "tp"), _mesh("tp", "dp")
    return meshes[rank > 1]


def _mesh(*names: str) -> Any:
    shape = (2, 2) if len(names) != 1 else (4,)
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names or None)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("who", "error", "message"),
    [
        (lambda rank: {"mesh_param": _other_mesh(rank)}, ConfigError, "Pass the same DeviceMesh"),
        (
            lambda rank: {"mpu": _mpu(_groups(rank)[0])},
            ConfigError,
            "parts by mpu are not supported.* pass mesh_param=",
        ),
        (lambda rank: {"mpu": object()}, ConfigError, "pass mesh_param=, a DeviceMesh"),
        (lambda rank: {"mesh_param": (2, 2)}, ConfigError, r"or pass \(4, 1\)"),
        (lambda rank: {"mesh_param": _mesh()}, ConfigError, "Pass mesh_dim_names"),
        (lambda rank: {"mesh_param": _mesh("dp", "cp")}, ConfigError, "dimension 'cp'"),
        (lambda rank: {"mesh_param": _mesh("dp", "tp")["dp"]}, ConfigError, "the DeviceMesh of all processes"),
        (lambda rank: {"mpu": _mpu(None)} if rank else {}, RankError, r"rank \d came with '"),
    ],
)
@on_ranks(4)
def test_what_makes_no_sense_is_refused_by_all(rank: int, who: Any, error: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        infinity.initialize(model=nn.Linear(4, 4), config=_config(tmp_path), **who(rank))


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    "who",
    [
        lambda: {"mesh_param": _mesh("dp_replicate", "dp_shard")},
        lambda: {"mesh_param": _mesh("dp")},
        lambda: {"mesh_param": (4, 1)},
        lambda: {"mpu": _mpu(None)},
    ],
)
@on_ranks(4)
def test_all_may_have_the_whole_model(rank: int, who: Any, tmp_path: Path) -> None:
    with infinity.deepspeed.initialize(
        model=nn.Linear(4, 4), config={"train_batch_size": 4, "optimizer": {"type": "SGD"}}, **who()
    )[0] as engine:
        assert (engine.dp_world_size, engine.mp_world_size, engine.get_data_parallel_rank()) == (4, 1, rank)


@pytest.mark.deep
@on_ranks(4)
def test_several_dimensions_may_divide_tensors(rank: int, tmp_path: Path) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD"}}
    with infinity.deepspeed.initialize(model=nn.Linear(4, 4), config=config, mesh_param=_mesh("tp", "model"))[
        0
    ] as engine:
        assert (engine.dp_world_size, engine.mp_world_size, engine.get_tensor_parallel_rank()) == (1, 4, rank)


@pytest.mark.deep
@on_ranks(4)
def test_a_step_that_overflows_in_one_part_is_skipped_by_all(rank: int, tmp_path: Path) -> None:
    mesh = _mesh("pp", "dp")
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    config = _config(tmp_path, train_batch_size=4, fp16=fp16)
    with infinity.initialize(model=nn.Linear(_WIDTH, 4), config=config, mesh_param=mesh)[0] as engine:
        for is_bad in (True, False):
            x, _ = _batch(rank % 2, 0)
            engine.backward(engine(x.half()).float().square().mean() * (1e30 if is_bad and rank == 3 else 1))
            engine.step()
            assert engine.was_step_applied() is not is_bad
            assert engine.loss_scale() == 8


def _tensor_engine(rank: int, directory: Path, **changes: Any) -> Any:
    _, tensor = _groups(rank)
    config = _config(directory, **changes)
    return infinity.initialize(model=_model(tensor, rank), config=config, mesh_param=_tensor_mesh())[0]


def _fill_drive(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[], bool]) -> None:
    """Saves of this rank fail while ``is_full``."""
    run = checkpoint.Saving.run

    def save(saving: checkpoint.Saving) -> None:
        if is_full():
            raise OSError(28, "No space left on device")
        run(saving)

    monkeypatch.setattr(checkpoint.Saving, "run", save)


@pytest.mark.deep
@on_ranks(4)
def test_what_is_loaded_is_a_checkpoint_that_all_parts_have(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill_drive(monkeypatch, lambda: rank == 1 and engine.global_steps == 3)
    saved = tmp_path / "saved"
    with _tensor_engine(rank, tmp_path) as engine:
        for step in range(2):
            _train(engine, rank // 2, range(step, step + 1))
            engine.save_checkpoint(saved, client_state={"rank": rank}, keep_last=1)
        expected = engine.module.state_dict()
        _train(engine, rank // 2, range(2, 3))
        with pytest.raises(OSError, match="No space left"):
            engine.save_checkpoint(saved, keep_last=1)
        after = engine.module.state_dict()
    with _tensor_engine(rank, tmp_path) as engine:
        path, state = engine.load_checkpoint(saved)
        assert (path, state) == (str(saved / f"part{rank % 2}-of-2" / "global_step2"), {"rank": rank % 2})
        require_same(weights_of(engine), expected)
        _train(engine, rank // 2, range(2, 3))
        require_same(weights_of(engine), after)
        with pytest.raises(CheckpointError, match=r"all 2 parts of the model have; some have global_step3"):
            engine.load_checkpoint(saved, tag="global_step3")
        assert engine.load_checkpoint(tmp_path / "nothing", missing_ok=True) == (None, None)
    refused = pytest.raises(CheckpointError, match=r"of a model in 2 part\(s\), and here it is in 1")
    with infinity.initialize(model=nn.Linear(4, 4), config=_config(tmp_path))[0] as other, refused:
        other.load_checkpoint(saved)


@pytest.mark.deep
@on_ranks(4)
def test_a_first_save_that_was_cut_off_is_none_and_a_lost_part_is_an_error(rank: int, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    own = saved / f"part{rank % 2}-of-2"
    with _tensor_engine(rank, tmp_path) as engine:
        for step in range(2):
            _train(engine, rank // 2, range(step, step + 1))
            engine.save_checkpoint(saved)
            infinity.deepspeed.comm.barrier()
            if rank == 1:
                shutil.move(own, tmp_path / f"away{step}")
            infinity.deepspeed.comm.barrier()
            if step == 0:
                assert engine.load_checkpoint(saved, missing_ok=True) == (None, None)
                assert engine.global_steps == 1
        with pytest.raises(CheckpointError, match="all 2 parts of the model have; some have global_step2"):
            engine.load_checkpoint(saved)


@pytest.mark.deep
@on_ranks(4)
def test_a_tag_that_only_some_parts_saved_again_is_none_that_all_have(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill_drive(monkeypatch, lambda: rank == 1 and engine.global_steps == 2)
    saved = tmp_path / "saved"
    with _tensor_engine(rank, tmp_path) as engine:
        for step in range(2):
            _train(engine, rank // 2, range(step, step + 1))
            with pytest.raises(OSError, match="No space left") if step else contextlib.nullcontext():
                engine.save_checkpoint(saved, tag="last")
        before = engine.module.state_dict()
        for tag in (None, "last"):
            with pytest.raises(CheckpointError, match="last is of the steps 1, 2 in different parts"):
                engine.load_checkpoint(saved, tag=tag)
        require_same(weights_of(engine), before)
        _train(engine, rank // 2, range(2, 3))
        engine.save_checkpoint(saved, tag="last")
        engine.load_checkpoint(saved)
        assert engine.global_steps == 3


@on_ranks(4)
def test_tensor_ranks_draw_numbers_of_their_own(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=nn.Linear(2, 2), config=_config(tmp_path), mesh_param=_mesh("dp", "tp"))
    with engine:
        tracker = infinity.deepspeed.checkpointing.get_cuda_rng_tracker()
        for seed in (infinity.deepspeed.checkpointing.model_parallel_cuda_manual_seed, _seed_again):
            seed(7)
            with tracker.fork():
                found = torch.rand(4)
            torch.manual_seed(7 + 2718 + rank % 2)
            assert torch.equal(found, torch.rand(4))


def _seed_again(seed: int) -> None:
    infinity.deepspeed.checkpointing.model_parallel_reconfigure_tp_seed(seed)


@pytest.mark.deep
@on_ranks(4)
def test_exports_gathered_weights_and_samples_of_a_part(rank: int, tmp_path: Path) -> None:
    _, tensor = _groups(rank)
    samples = [(torch.full((_WIDTH,), float(i)), torch.zeros(_WIDTH)) for i in range(8)]
    engine, _, loader, _ = infinity.initialize(
        model=_model(tensor, rank), config=_config(tmp_path), mesh_param=_tensor_mesh(), training_data=samples
    )
    own = torch.cat([x[:, 0] for x, _ in loader])
    of_all = [torch.empty_like(own) for _ in range(4)]
    dist.all_gather(of_all, own)
    assert torch.equal(of_all[rank], of_all[rank ^ 1])  # tensor ranks see the same samples
    assert sorted(torch.cat(of_all[::2]).tolist()) == list(range(8))
    groups = import_module("infinity.deepspeed.utils.groups")
    assert groups.get_data_parallel_world_size() == groups.get_model_parallel_world_size() == 2
    assert (groups.get_data_parallel_rank(), groups._get_tensor_model_parallel_rank()) == (rank // 2, rank % 2)
    with infinity.GatheredParameters(engine.module[0].rows, modifier_rank=1):
        if rank // 2 == 1:
            engine.module[0].rows.data.fill_(float(rank))
    assert torch.equal(engine.module.state_dict()["0.rows"], torch.full((_HIDDEN // 2, _WIDTH), 2.0 + rank % 2))
    with pytest.raises(ModelError, match="one over the other"):
        engine.save_16bit_model(tmp_path / "one")
    engine.save_16bit_model(tmp_path / f"of{engine.get_model_parallel_rank()}")
    infinity.deepspeed.comm.barrier()
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / f"of{rank % 2}").glob("*.safetensors"):
        found |= load_file(file)
    assert torch.equal(found["0.rows"], engine.module.state_dict()["0.rows"])
    engine.close()


@on_ranks(2)
def test_nothing_is_updated_before_all_parts_have_met(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    config = _config(tmp_path, train_batch_size=2, gradient_clipping=0.0)
    with infinity.initialize(model=nn.Sequential(nn.Linear(8, 8)), config=config, mesh_param=mesh)[0] as engine:
        for is_same in (True, True, False):  # updates in backward would begin with the second step
            before = engine.module.state_dict()
            engine.backward(engine(torch.full((2, 8), 1.0 if is_same else 1.0 + rank)).square().sum())
            if is_same:
                engine.step()
                assert not torch.equal(engine.module.state_dict()["0.weight"], before["0.weight"])
        with pytest.raises(RankError, match=r"that of '0.weight' is"):
            engine.step()
        require_same(weights_of(engine), before)


@on_ranks(2)
def test_tiles_are_parts_as_their_weight_is(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(rank)
    layer = nn.Linear(64, 256, bias=False)
    layer.weight.tensor_model_parallel = True  # type: ignore[assignment]
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    config = _config(tmp_path, train_batch_size=2, infinity={"tile_above": "16KiB"})
    with infinity.initialize(model=nn.Sequential(layer), config=config, mesh_param=mesh)[0] as engine:
        assert len(list(engine.module.parameters())) > 1
        engine.backward(engine(torch.ones(2, 64)).square().sum())
        engine.step()


@pytest.mark.deep
def test_a_durable_run_goes_on_from_a_step_of_all_parts(tmp_path: Path) -> None:
    durable = {"infinity": {"durable": True}}

    def begin(rank: int) -> None:
        engine = _tensor_engine(rank, tmp_path / "drive", **durable)
        _train(engine, rank // 2, range(2))
        engine.flush()
        _train(engine, rank // 2, range(2, 3))
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def go_on(rank: int) -> None:
        with _tensor_engine(rank, tmp_path / "drive", **durable) as engine:
            assert engine.global_steps in (2, 3)
            _train(engine, rank // 2, range(engine.global_steps, 4))
            with _tensor_engine(rank, tmp_path / "other") as plain:
                _train(plain, rank // 2, range(4))
                require_same(weights_of(engine), plain.module.state_dict())

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    run_ranks(4, begin, tmp_path / "first")
    require_ranks(4, go_on, tmp_path / "second")


@pytest.mark.deep
def test_a_rank_that_fails_in_one_part_is_named_in_all(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        engine = _tensor_engine(rank, tmp_path, train_batch_size=4)
        for step in range(2):
            x, y = _batch(rank // 2, step)
            engine.backward(mse_loss(engine(x), y))
            if rank == 3 and step == 1:
                raise ValueError("no more data")
            engine.step()

    *others, _ = run_ranks(4, train, tmp_path)
    for error in others:
        assert "rank 3 failed with ValueError: no more data" in error
