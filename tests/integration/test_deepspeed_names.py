"""What scripts for DeepSpeed ask engine, optimizer, scheduler and parameters for, and what they import."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
import infinity.deepspeed as deepspeed
from infinity.deepspeed.utils import logger
from infinity.errors import CheckpointError, ConfigError, ModelError, NonFiniteLossWarning
from tests.exactness.case import loss_of
from tests.exactness.lockstep import PLAIN, Lockstep, engine_on_nvme, everything_on_nvme, make_batch, take_steps
from tests.warm_process import run_script


def test_names_of_deepspeeds_alone_are_in_a_package_of_their_own(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'zero'.*: import infinity\.deepspeed as deepspeed"):
        infinity.zero  # noqa: B018
    with engine_on_nvme(tmp_path, nn.Linear(4, 4)) as plain:
        assert (type(plain), type(engine)) == (infinity.Engine, deepspeed.DeepSpeedEngine)
        assert engine.zero_optimization_stage() == 3
        with pytest.raises(AttributeError, match=r"'zero_optimization_stage'.*infinity\.deepspeed\.initialize makes"):
            plain.zero_optimization_stage()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
    found, *_ = deepspeed.initialize(
        model=PLAIN.make("none"), config=everything_on_nvme(tmp_path, {"scheduler": scheduler})
    )
    with found:
        yield found


def test_the_optimizer_tells_of_the_loss_scale(tmp_path: Path) -> None:
    changes = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=everything_on_nvme(tmp_path, changes))
    with engine:
        assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.dynamic_loss_scale) == (16.0, 16.0, True)
        scaler = optimizer.loss_scaler
        assert scaler is optimizer.loss_scale_config and optimizer.needs_scaler()
        assert (scaler.cur_iter, scaler.scale_window, scaler.min_scale, scaler.cur_hysteresis) == (0, 1000, 1.0, 1)
        engine.backward(engine(torch.ones(2, 4, dtype=torch.half)).sum())
        engine.step()
        assert not optimizer.overflow and engine.was_step_applied()
        with pytest.warns(NonFiniteLossWarning):
            engine.backward(engine(torch.ones(2, 4, dtype=torch.half)).sum() * float("inf"))
        engine.step()
        assert optimizer.overflow and not engine.was_step_applied()
        assert optimizer.cur_scale == 8.0 == engine.loss_scale()
        assert (scaler.cur_scale, scaler.loss_scale, scaler.dynamic, scaler.cur_iter) == (8.0, 8.0, True, 2)
        engine.save_checkpoint(str(tmp_path / "saved"))
        engine.backward(engine(torch.ones(2, 4, dtype=torch.half)).sum())
        engine.step()
        engine.load_checkpoint(str(tmp_path / "saved"))
        assert scaler.cur_iter == 2
        assert (engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.global_samples) == (2, 1, 2, 2)


def test_the_optimizer_and_the_schedule_that_deepspeed_wraps(engine: Any, tmp_path: Path) -> None:
    from infinity.deepspeed.runtime import config as names  # type: ignore[import-not-found]

    assert (engine.optimizer.loss_scale, engine.optimizer.dynamic_loss_scale) == (1.0, False)
    assert not engine.optimizer.needs_scaler() and engine.optimizer.loss_scaler.scale_window is None
    assert engine.lr_scheduler.last_batch_iteration == -1
    take_steps(engine, 0)
    assert engine.lr_scheduler.last_batch_iteration == 0
    inner = engine.optimizer.optimizer
    assert inner.param_groups is engine.optimizer.param_groups
    weight = engine.module.head.weight
    assert torch.equal(inner.state[weight]["exp_avg"], engine.optimizer.state[weight]["exp_avg"])
    unwrapped = engine.basic_optimizer
    while hasattr(unwrapped, "optimizer"):
        unwrapped = unwrapped.optimizer
    assert isinstance(unwrapped, torch.optim.Optimizer) and unwrapped.param_groups is inner.param_groups
    assert type(unwrapped).__name__ == "AdamW" and unwrapped == inner
    engine.lr_scheduler.last_batch_iteration = 5
    take_steps(engine, 0)
    assert (engine.lr_scheduler.last_batch_iteration, engine.lr_scheduler.last_epoch) == (6, 7)
    assert engine.optimizer_name() == names.ADAMW_OPTIMIZER
    assert names.ONEBIT_LAMB_OPTIMIZER in names.DEEPSPEED_OPTIMIZERS
    model = nn.Linear(4, 4)
    config = everything_on_nvme(tmp_path)
    with deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config)[0] as other:
        assert other.optimizer_name() == "SGD"


def test_parameters_answer_as_those_of_stage_3(engine: Any) -> None:
    from infinity.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus  # type: ignore[import-not-found]

    weight, bias = engine.module.blocks[0].up.weight, engine.module.blocks[0].up.bias
    assert weight.ds_id != bias.ds_id
    assert (weight.ds_numel, weight.ds_shape) == (weight.numel(), weight.shape)
    assert weight.partition_numel() == weight.numel()
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    missing = [p for p in (weight, bias) if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    with deepspeed.zero.GatheredParameters(missing):
        assert weight.ds_status == ZeroParamStatus.AVAILABLE


def test_calls_that_move_states_move_nothing(engine: Any) -> None:
    from infinity.deepspeed.runtime.zero import offload_config  # type: ignore[import-not-found]

    take_steps(engine, 0)
    before = engine.module.head.weight.clone()
    states = [offload_config.OffloadStateTypeEnum.optim_states]
    engine.offload_states(include=states, device=offload_config.OffloadDeviceEnum.cpu, pin_memory=True)
    engine.reload_states(non_blocking=True)
    engine.empty_partition_cache()
    assert torch.equal(engine.module.head.weight.clone(), before)


@pytest.mark.deep
def test_hooks_that_trl_takes_off(engine: Any) -> None:
    utils = pytest.importorskip("trl.models.utils")
    batch = make_batch(0)
    before = engine(**batch)
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        utils.remove_hooks(engine)
        assert torch.equal(loss_of(engine.module(**batch)), loss_of(before))
        utils.add_hooks(engine)
    take_steps(engine, 0)


def test_files_that_lightning_converts(engine: Any, tmp_path: Path) -> None:
    from infinity.deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files  # type: ignore[import-not-found]

    engine.save_checkpoint(str(tmp_path / "saved"), client_state={"epoch": 3, "loops": {"fit": 1}}, tag="checkpoint")
    folder = str(tmp_path / "saved" / "checkpoint")
    stage = torch.load(get_optim_files(folder)[0], weights_only=False)["optimizer_state_dict"]["zero_stage"]
    found = torch.load(get_model_state_file(folder, stage), weights_only=False)
    assert (stage, found) == (3, {"epoch": 3, "loops": {"fit": 1}})
    with pytest.raises(CheckpointError, match="import-deepspeed"):
        get_optim_files(str(tmp_path))


def test_groups_without_experts() -> None:
    from infinity.deepspeed.moe import utils  # type: ignore[import-not-found]

    layer, split = nn.Linear(2, 2), utils.split_params_into_different_moe_groups_for_optimizer
    groups = split({"params": layer.parameters(), "name": "all"})
    assert groups == [{"params": [layer.weight, layer.bias], "name": "all"}]
    assert utils.has_moe_layers(layer) == (False, 0)
    layer.weight.allreduce = False  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"allreduce = False.*Experts in a ModuleList"):
        split(tuple(groups))


def test_the_accelerators_interface() -> None:
    from infinity.deepspeed.accelerator.real_accelerator import get_accelerator  # type: ignore[import-not-found]

    here = get_accelerator()
    assert 0 <= here.memory_reserved() <= here.total_memory() and 0 < here.available_memory() <= here.total_memory()
    assert here.memory_cached() <= here.max_memory_cached() and isinstance(here.memory_stats(), dict)
    here.reset_max_memory_allocated()
    tensor = here.FloatTensor([1.0, 2.0])
    assert here.on_accelerator(tensor) and tensor.dtype == torch.float32
    state = here.get_rng_state()
    here.set_rng_state(state)
    assert torch.equal(here.default_generator(0).get_state(), state)
    with pytest.raises(AttributeError, match=r"no 'capture_to_graph' here.*Call what torch has"):
        here.capture_to_graph(None)


def test_timers_and_monitor(engine: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = engine.timers("read")
    timer.start()
    timer.stop()
    assert engine.timers("read") is timer and timer.elapsed(reset=False) >= 0 and timer.mean() >= 0
    assert engine.get_wall_clock_timers().keys() == {"read"}
    monkeypatch.setattr(logger, "propagate", True)
    engine.timers.log(["read", "unknown"])
    assert "time (ms) | read: " in caplog.text
    assert timer.elapsed() == 0
    with pytest.raises(RuntimeError, match="'read' does not run"):
        timer.stop()
    if not engine.monitor.enabled:
        engine.monitor.write_events([("Train/loss", 1.0, engine.global_samples)])
    assert not engine.flops_profiler_enabled() and engine.get_sequence_parallel_group() is None
    assert engine.tput_timer.avg_samples_per_sec() == float("-inf")  # DeepSpeed-Chat ends each epoch with it
    engine.tput_timer.start()
    take_steps(engine, 0)
    engine.tput_timer.stop(global_step=True)
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1
    assert engine.tput_timer.avg_samples_per_sec() == engine.report.num_samples / engine.report.seconds


def test_what_is_not_there_says_what_to_do(engine: Any) -> None:
    assert not hasattr(engine, "flops_profiler")
    with pytest.raises(AttributeError, match="FlopCounterMode"):
        _ = engine.flops_profiler
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = engine.nothing
    with pytest.raises(ModuleNotFoundError, match=r"infinity.deepspeed.moe.layer.* ModuleList"):
        importlib.import_module("infinity.deepspeed.moe.layer")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'infinity\.nothing'"):
        importlib.import_module("infinity.nothing")


# --------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.deep
@pytest.mark.parametrize("num_micro_batches", [None, 3])
def test_eval_batch_is_the_mean_without_gradients(num_micro_batches: int | None, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes={"gradient_accumulation_steps": 2}) as both:
        both.engine_step(0)
        both.model.blocks[1].eval()
        batches = [make_batch(9, number) for number in range(4)]
        num = num_micro_batches or 2
        with torch.no_grad():
            expected = torch.stack([both.reference.forward(batch).float() for batch in batches[:num]])
        iterator = iter(batches)
        loss = both.engine.eval_batch(iterator, num_micro_batches=num_micro_batches)
        assert torch.equal(loss, expected.mean()) and not loss.requires_grad
        assert len(list(iterator)) == 4 - num
        assert both.model.training and not both.model.blocks[1].training
        losses, outputs = both.engine.eval_batch(iter(batches), return_logits=True, reduce_output=None)
        assert torch.equal(torch.stack(losses), torch.stack([loss_of(output) for output in outputs]))
        assert torch.equal(both.engine.eval_batch(batches[0]), expected[0])
        assert torch.equal(both.engine.eval_batch(batches[0], compute_loss=False)[0], expected[0])
        with pytest.raises(ValueError, match="avg"):
            both.engine.eval_batch(batches[0], reduce_output="sum")
        both.engine_step(1)
        both.require_equal()


def test_the_engine_that_has_the_model_evaluates_where_nothing_is_trained(engine: Any) -> None:
    config = {"train_micro_batch_size_per_gpu": 1}
    found, optimizer, *_ = deepspeed.initialize(model=engine.module, model_parameters=[], config=config)
    assert found is engine and optimizer is None
    with pytest.raises(ModelError):
        deepspeed.initialize(model=engine.module, config=config)


# ------------------------------------------------------------------------------------------------------------ loaders


def test_the_loader_shuffles_as_deepspeeds_and_needs_a_batch_size(tmp_path: Path) -> None:
    data = torch.arange(20.0).reshape(10, 2)
    config = everything_on_nvme(tmp_path, {"train_micro_batch_size_per_gpu": 3})
    engine, _, loader, _ = deepspeed.initialize(model=nn.Linear(2, 2), config=config, training_data=data)
    with engine:
        # What DeepSpeedDataLoader passes to torch's DistributedSampler: its order for one process, by a seed of its own.
        for epoch in (0, 0, 1):
            loader.data_sampler.set_epoch(epoch)
            order = torch.randperm(10, generator=torch.Generator().manual_seed(epoch))
            assert torch.equal(torch.cat(list(loader)), data[order])
        assert [len(batch) for batch in loader] == [3, 3, 3, 1]
        assert torch.equal(torch.cat(list(engine.deepspeed_io(data, batch_size=5, route="eval"))), data)
        assert torch.equal(torch.cat(list(engine.deepspeed_io(data, data_sampler=[1, 0]))), data[[1, 0]])
    changes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=everything_on_nvme(tmp_path, changes))
    with engine, pytest.raises(ConfigError, match="batch_size="):
        engine.deepspeed_io([1, 2])


# ------------------------------------------------------------------------------------------------------------ modules


_IMPORTS = {
    "accelerator": "get_accelerator",
    "checkpointing": "checkpoint configure",
    "comm": "get_rank get_world_size barrier all_reduce",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "ops.lamb": "FusedLamb",
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "runtime.activation_checkpointing": "checkpointing",
    "runtime.config": "DeepSpeedConfig DeepSpeedConfigError",
    "runtime.dataloader": "RepeatingLoader",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
    "runtime.utils": "see_memory_usage",
    "runtime.zero": "GatheredParameters Init ZeroParamStatus register_external_parameter",
    "utils": "logger log_dist safe_get_full_fp32_param safe_set_full_grad set_z3_leaf_modules",
    "utils.timer": "SynchronizedWallClockTimer",
    "zero": "GatheredParameters Init",
}


@pytest.mark.parametrize("module", _IMPORTS)
def test_modules_that_scripts_import(module: str) -> None:
    found = importlib.import_module(f"infinity.deepspeed.{module}")
    assert [name for name in _IMPORTS[module].split() if not hasattr(found, name)] == []


def test_what_deepspeeds_config_answers(tmp_path: Path) -> None:
    """By default, and what is written: the values of DeepSpeed 0.19.8."""
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 4}')
    plain = deepspeed.DeepSpeedConfig(str(path))
    off = (
        "zero_enabled fp16_enabled bfloat16_enabled amp_enabled prescale_gradients sparse_gradients_enabled dump_state"
    )
    none = "optimizer_name optimizer_params scheduler_name dynamic_loss_scale_args communication_data_type"
    for value, names in ((False, f"{off} wall_clock_breakdown checkpoint_tag_validation_fail"), (None, none)):
        assert {getattr(plain, name) for name in names.split()} == {value}
    assert (plain.train_micro_batch_size_per_gpu, plain.gradient_accumulation_steps, plain.world_size) == (4, 1, 1)
    assert (plain.zero_config.stage, plain.zero_config.offload_optimizer, plain.loss_scale) == (0, None, 0)
    zero = {"stage": 3, "offload_param": {"device": "CPU"}, "stage3_gather_16bit_weights_on_model_save": True}
    written: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    written |= {"gradient_allreduce_op": "MEAN", "communication_data_type": "bf16", "zero_optimization": zero}
    written |= {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 9}}
    written |= {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "checkpoint": {"tag_validation": "FAIL"}}
    found = deepspeed.DeepSpeedConfig(written, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 4))
    assert (found.train_batch_size, found.zero_optimization_stage) == (24, 3)
    assert found.zero_config.offload_param.device == "cpu"
    assert found.zero_config.gather_16bit_weights_on_model_save and found.checkpoint_tag_validation_fail
    assert (found.initial_dynamic_scale, found.communication_data_type) == (16, torch.bfloat16)
    args = {"init_scale": 16, "scale_window": 9, "delayed_shift": 2, "consecutive_hysteresis": False, "min_scale": 1}
    assert found.dynamic_loss_scale_args == args
    assert (found.optimizer_name, found.optimizer_params) == ("adamw", {"lr": 0.5})
    found.train_batch_size = 48
    assert found.train_batch_size == 48 and found["gradient_allreduce_op"] == "MEAN"
    with pytest.raises(ConfigError):
        deepspeed.DeepSpeedConfig({"train_batch_siez": 2})


def test_what_deepspeed_says_of_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers' tests look for it."""
    assert deepspeed.__git_hash__ is deepspeed.__git_branch__ is None
    assert deepspeed.__version__ == deepspeed.version == "0.19.8+infinity"
    with caplog.at_level(logging.INFO, logger.name):
        logger.addHandler(caplog.handler)
        deepspeed.initialize(model=nn.Linear(4, 4), config=everything_on_nvme(tmp_path))[0].close()
        logger.removeHandler(caplog.handler)
    assert "DeepSpeed info: version=0.19.8" in caplog.text


def test_optimizers_by_deepspeeds_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from infinity.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad  # type: ignore[import-not-found]
    from infinity.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam  # type: ignore[import-not-found]
    from infinity.deepspeed.ops.lion import FusedLion  # type: ignore[import-not-found]

    model = nn.Linear(4, 4)
    made = DeepSpeedCPUAdam(model.parameters(), 0.1, True, (0.8, 0.9))
    assert type(made) is torch.optim.AdamW
    group = made.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["fused"]) == (0.1, (0.8, 0.9), 0, True)
    assert type(DeepSpeedCPUAdam(model.parameters(), adamw_mode=False)) is torch.optim.Adam
    assert type(FusedAdam(model.parameters(), adam_w_mode=False)) is torch.optim.Adam
    assert type(FusedAdam(params=model.parameters())) is torch.optim.AdamW
    assert FusedLion(model.parameters()).param_groups[0]["lr"] == 1e-3
    assert DeepSpeedCPUAdagrad(model.parameters(), amsgrad=False).param_groups[0]["lr"] == 1e-2
    assert type(FusedAdam(model.parameters(), bias_correction=False)).__name__ == "UncorrectedAdam"
    with pytest.raises(ConfigError, match="set_grad_none"):
        FusedAdam(model.parameters(), set_grad_none=False)
    with pytest.raises(ConfigError, match="state_dtype"):
        DeepSpeedCPUAdam(model.parameters(), fp32_optimizer_states=False)
    # as accelerate calls them: with Adam's argument, and with the groups of whatever it does not know
    groups = [kind(model.parameters(), lr=0.1).param_groups for kind in (torch.optim.Adagrad, torch.optim.RMSprop)]
    assert type(DeepSpeedCPUAdagrad(groups[0], lr=0.1, adamw_mode=False)) is torch.optim.Adagrad
    assert "zero_force_ds_cpu_optimizer" not in caplog.text
    DeepSpeedCPUAdam(groups[1], lr=0.1, adamw_mode=False)
    assert "alpha" in caplog.text and '"zero_force_ds_cpu_optimizer": false' in caplog.text
    config = everything_on_nvme(tmp_path, {"optimizer": None})
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=DeepSpeedCPUAdam, config=config
    )
    with engine:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        assert set(optimizer.state[model.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_leaf_modules_are_found() -> None:
    from infinity.deepspeed import utils

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert utils.set_z3_leaf_modules(model, [nn.Linear]) == [model[0]] == utils.get_z3_leaf_modules(model)
    assert utils.set_z3_leaf_modules(model, ["ReLU"]) == [model[1]]
    assert utils.unset_z3_leaf_modules(model, ["torch.nn.modules.linear.Linear"]) == [model[0]]
    assert utils.z3_leaf_module(model[1]) and not utils.z3_leaf_module(model[0])
    assert utils.set_z3_leaf_modules_by_name(model, ["0", "7"], raise_if_not_found=False) == ([model[0]], ["7"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["1"], flag=False) == ([model[1]], [])
    with pytest.raises(ValueError, match="no module"):
        utils.set_z3_leaf_modules(model, [nn.Conv1d])


@pytest.fixture
def no_group() -> Iterator[None]:
    deepspeed.comm.destroy_process_group()
    yield
    deepspeed.comm.destroy_process_group()
    assert not deepspeed.comm.is_initialized()


@pytest.mark.usefixtures("no_group")
def test_a_script_begins_as_deepspeeds_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(everything_on_nvme(tmp_path)))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
        if name == "WORLD_SIZE":
            with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
                deepspeed.init_distributed()
        monkeypatch.delenv(name)
    assert not deepspeed.comm.is_initialized()
    deepspeed.init_distributed()
    deepspeed.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.Linear(2, 2)
    parameters = filter(lambda parameter: parameter.requires_grad, model.parameters())
    with deepspeed.initialize(args=args, model=model, model_parameters=parameters)[0] as engine:
        assert (engine.local_rank, torch.distributed.get_rank(), args.deepspeed) == (0, 0, True)
        assert torch.device(deepspeed.get_accelerator().device_name(engine.local_rank)) == engine.device


@pytest.mark.usefixtures("no_group")
def test_exchanges_of_one_process_with_itself() -> None:
    dist = deepspeed.comm
    given, taken = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)
    assert (dist.get_rank(), dist.get_world_size(), dist.barrier()) == (0, 1, None) and not dist.is_initialized()
    each = ([taken], given), ([taken], [given]), (taken, [given]), (taken, given)
    calls = [(dist.all_gather, each[0]), (dist.all_to_all, each[1]), (dist.scatter, each[2])]
    calls += [(dist.reduce_scatter, each[2]), (dist.all_gather_into_tensor, each[3])]
    calls += [(dist.reduce_scatter_tensor, each[3]), (dist.all_to_all_single, each[3])]
    for call, arguments in calls:
        taken.zero_()
        assert call(*arguments) is None
        assert torch.equal(taken, given)
        assert call(*arguments, async_op=True).wait()
    for call, arguments in ((dist.all_reduce, ()), (dist.broadcast, (0,)), (dist.reduce, (0,))):
        before = given.clone()
        assert call(given, *arguments) is None and torch.equal(given, before)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}]
    assert (dist.get_rank(), dist.get_world_size(), dist.get_all_ranks_from_group()) == (0, 1, [0])
    with pytest.raises(RuntimeError, match="expected length 1, got 2"):
        dist.all_gather([taken, taken], given)
    group = dist.new_group([0])
    assert isinstance(group, torch.distributed.ProcessGroup)
    assert torch.distributed.get_world_size(group) == 1 == deepspeed.utils.groups.get_data_parallel_world_size()
    assert dist.get_world_group() is torch.distributed.group.WORLD is deepspeed.utils.groups._get_data_parallel_group()
    with pytest.raises(ConfigError, match="one process"):
        dist.new_group([0, 1])


def test_local_parts_are_the_whole(tmp_path: Path) -> None:
    from infinity.deepspeed import utils

    config = everything_on_nvme(tmp_path, {"infinity": {"update": "step"}})
    with deepspeed.initialize(model=PLAIN.make("none"), config=config)[0] as engine:
        weight = engine.module.head.weight
        halves, quarters = (torch.full((weight.numel(),), value) for value in (0.5, 0.25))
        take_steps(engine, 0)
        utils.safe_set_local_fp32_param(weight, halves)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), halves.view(weight.shape))
        assert torch.equal(utils.safe_get_local_fp32_param(weight), halves)
        utils.safe_set_local_optimizer_state(weight, quarters.view(weight.shape), "exp_avg")
        assert torch.equal(utils.safe_get_local_optimizer_state(weight, "exp_avg"), quarters)
        engine.backward(loss_of(engine(**make_batch(1))))
        before = utils.safe_get_full_grad(weight)
        utils.safe_update_full_grad_vectorized(
            [weight], lambda gradient, parameter: gradient * (parameter is weight) * 2
        )
        assert torch.equal(utils.safe_get_local_grad(weight), 2 * before.flatten())
        utils.safe_set_local_grad(weight, torch.zeros(weight.numel()))
        assert not utils.safe_get_full_grad(weight).any()
        with pytest.raises(ValueError, match="elements"):
            utils.safe_set_local_grad(weight, torch.zeros(1))
        engine.step()


def test_small_functions() -> None:
    from infinity.deepspeed.runtime.utils import clip_grad_norm_, set_random_seed
    from infinity.deepspeed.utils import OnDevice, recursive_getattr, should_log_le

    set_random_seed(3)
    first = torch.rand(2)
    set_random_seed(3)
    assert torch.equal(torch.rand(2), first)
    with pytest.raises(ImportError, match=r"tensor.to\(device\)"):
        from infinity.deepspeed.runtime.utils import move_to_device  # noqa: F401
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    assert clip_grad_norm_([parameter], 1.0) == 4.0
    with pytest.raises(ConfigError, match='Set "gradient_clipping"'):
        clip_grad_norm_([parameter], 1.0, mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 2))
    clip_grad_norm_([parameter], 1.0, mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 1))
    with OnDevice(dtype=torch.float16, device="meta"):
        layer = nn.Linear(2, 2)
    assert layer.weight.is_meta and layer.weight.dtype == torch.float16 and torch.get_default_dtype() == torch.float32
    model = nn.Sequential(nn.Sequential(layer))
    assert recursive_getattr(model, "0.0.weight") is layer.weight
    assert should_log_le("info") and not should_log_le("debug")


def test_the_script_beside_a_checkpoint_writes_its_weights(engine: Any, tmp_path: Path) -> None:
    take_steps(engine, 0)
    engine.save_checkpoint(tmp_path / "saved")
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    saved = tmp_path / "saved"
    status, printed = run_script(saved / "zero_to_fp32.py", saved, words=[".", str(tmp_path / "out")])
    assert status == 0, printed
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert engine.load_checkpoint(tmp_path / "saved")[0] is not None


@pytest.mark.deep
def test_fp32_weights_of_a_checkpoint(engine: Any, tmp_path: Path) -> None:
    from infinity.deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found]
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

    take_steps(engine, 0)
    engine.save_checkpoint(tmp_path / "saved", tag="one")
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    model = load_state_dict_from_zero_checkpoint(PLAIN.make("none"), tmp_path / "saved")
    assert torch.equal(model.head.weight, expected["head.weight"])
    for size, is_safe in (("1KB", False), (None, True)):
        out = tmp_path / f"out{is_safe}"
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", out, size, is_safe)
        files = [
            load_file(path) if is_safe else torch.load(path)
            for path in sorted(out.glob("*.safetensors" if is_safe else "*.bin"))
        ]
        again = {name: value for file in files for name, value in file.items()}
        assert again.keys() == found.keys() and all(torch.equal(again[name], found[name]) for name in found)
    with pytest.raises(ConfigError, match="exclude_frozen"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
