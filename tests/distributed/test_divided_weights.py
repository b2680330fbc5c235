"""Stage 3: each rank keeps its shard of the weights, and all gather units in the same order."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss

import infinity
from swapper import TransferRecord
from tests.distributed.common import require_same, weights_of
from tests.internals import Arrival, DividedWeights, Unit, destroy_at_exit, end_all_at_exit, predict, world
from tests.lazy_device import LazyDevice
from tests.ranks import on_ranks, require_ranks, run_ranks

_WIDTH = 64
_FAR_LONGER_SECONDS = 300
"""Than it may take to find a rank that is elsewhere; the process group waits for 500."""


class _Model(nn.Module):
    """With tied weights, and frozen ones in a unit of their own and beside trained ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.last = nn.Linear(_WIDTH, _WIDTH)
        self.last.weight = self.first.weight
        self.layers[1].requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the model computes: in host memory, or on what takes copies as late as a busy GPU may."""
    if request.param == "device":
        module = importlib.import_module("infinity.entry")
        monkeypatch.setattr(module, "device_for", lambda torch_device: LazyDevice())
    return str(request.param)


def _config(directory: Path, stage: int = 3, tier: str = "nvme", **changes: Any) -> dict[str, Any]:
    where = {"device": tier, "nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "offload_param": where, "offload_optimizer": {"device": "cpu"}},
        "infinity": {"keep_in_memory": False},
    } | changes


def _engine(directory: Path, stage: int = 3, **changes: Any) -> Any:
    engine = infinity.initialize(model=_Model(), config=_config(directory, stage, **changes))[0]
    exchange = engine._parts.exchange
    assert all(exchange.divides(unit) == (stage == 3) for unit in engine._parts.parameter_map.units)
    return engine


def _step(engine: Any, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    x, y = (torch.randn(4, _WIDTH, generator=generator).to(engine.config.compute_dtype) for _ in range(2))
    loss = mse_loss(engine(x).float(), y.float())
    engine.backward(loss)
    engine.step()
    return loss.detach()


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@on_ranks(2)
def test_each_rank_gets_all_weights_while_all_are_asleep(rank: int, tier: str, memory: str, tmp_path: Path) -> None:
    with _engine(tmp_path, tier=tier) as engine, _engine(tmp_path, tier=tier) as other:
        for number in range(3):
            assert torch.equal(_step(engine, rank, number), _step(other, rank, number))
            expected = weights_of(other)
            engine.sleep()
            found = dict(engine.iter_weights())
            engine.wake()
            assert expected.keys() - found.keys() == {"last.weight"}
            require_same(found, {name: expected[name] for name in found})
        require_same(weights_of(engine), weights_of(other))


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("num", "changes"), [(2, {}), (4, {"bf16": {"enabled": True}}), (2, {"tier": "none"}), (3, {"tier": "cpu"})]
)
def test_tied_and_frozen_weights_train_as_whole_ones(
    num: int, changes: dict[str, Any], memory: str, tmp_path: Path
) -> None:
    if memory == "device" and changes.get("tier") == "none":
        pytest.skip("all weights stay on a device then, whole")

    def train(rank: int) -> None:
        expected: dict[str, torch.Tensor] = {}
        for stage, more in ((2, {}), (3, {}), (3, {"prefetch": False})):
            section = {"infinity": {"keep_in_memory": False, **more}}
            with _engine(tmp_path, stage, **changes, **section) as engine:
                found = {f"loss {number}": _step(engine, rank, number) for number in range(3)}
                with torch.no_grad():  # all write, each in its own memory
                    engine.module.layers[0].weight.mul_(1.25)
                    engine.module.layers[1].weight.data.add_(0.5)
                found |= {f"then {number}": _step(engine, rank, number) for number in range(3, 5)}
                changed = {name: value * 0.5 for name, value in weights_of(engine).items()}
                engine.module.load_state_dict(changed)
                found["loaded"] = _step(engine, rank, 5)
                for graph in range(2):  # the second backward of a graph, of which a unit's memory is seen by the user
                    kept = engine.module.first.weight.data
                    found[f"kept {graph}"] = _step(engine, rank, 6 + graph)
                    found[f"seen {graph}"] = kept.clone()
                found |= weights_of(engine)
            found |= {f"closed {name}": value for name, value in engine.module.state_dict().items()}
            expected = expected or found
            require_same(found, expected)

    require_ranks(num, train, tmp_path)


@pytest.mark.deep
def test_what_each_rank_keeps_reads_and_sends(memory: str, tmp_path: Path) -> None:
    num_layers, width, num_steps = 16, 128, 2
    unit_bytes = 4 * width * width
    model_bytes = num_layers * unit_bytes
    for num in (2, 4):

        def train(rank: int, num: int = num) -> None:
            fetches: Counter[int] = Counter()
            moved: Counter[str] = Counter()
            fetch = DividedWeights.fetch

            def counted(self: DividedWeights, unit: Unit, *, is_demand: bool) -> Arrival:
                fetches[unit.index] += 1
                return fetch(self, unit, is_demand=is_demand)

            def note(record: TransferRecord) -> None:
                if "weights of" in record.extent_name:
                    moved[record.direction.name] += record.num_bytes

            DividedWeights.fetch = counted  # type: ignore[method-assign]  # in this process, which ends soon
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
            section: dict[str, Any] = {"keep_in_memory": False, "host_memory_budget": "700KB"}
            if memory == "device":
                section |= {"host_memory_budget": "1MB", "device_memory_budget": 4 * unit_bytes}
            config = _config(tmp_path, infinity=section, optimizer={"type": "SGD", "params": {"lr": 0.01}})
            with infinity.initialize(model=model, config=config)[0] as engine:
                storage = engine._parts.storage
                storage.observe(note)
                before: Counter[int] = Counter()
                for step in range(num_steps + 1):
                    engine.backward(engine(torch.ones(2, width, requires_grad=True)).sum())
                    engine.step()
                    engine.flush()  # all is written
                    infinity.deepspeed.comm.barrier()
                    if step == 0:
                        before = fetches.copy()
                        moved.clear()
                found: dict[str, Any] = {kind: num_bytes / num_steps for kind, num_bytes in moved.items()}
                found["num_fetches"] = (fetches - before).total() / num_steps
                schedule = engine._parts.coordinator.parameter_cache.training_schedule
                plan = engine._parts.plan
                given = plan.sizes, plan.request, plan.placement, schedule.order, schedule.backward_start
                found["predicted"] = list(predict(*given).kinds["weights"])
                found["kept"] = engine.plan.resting_bytes["nvme"]["weights"]
            found |= {"sent": world().sent_bytes, "fetches": fetches.total()}
            (tmp_path / f"measured {num} {rank}").write_text(json.dumps(found))

        directory = tmp_path / str(num)
        directory.mkdir()
        require_ranks(num, train, directory)
        others = (num - 1) / num
        of_ranks = [json.loads((tmp_path / f"measured {num} {rank}").read_text()) for rank in range(num)]
        for found in of_ranks:
            assert found["kept"] == found["WRITE"] == model_bytes / num
            # Its shard for each fetch, and once for the update. Reads of the next step's first units may be on their way.
            expected = unit_bytes / num * (found["num_fetches"] + num_layers)
            assert found["READ"] == pytest.approx(expected, rel=0.1)
            assert found["predicted"] == [pytest.approx(expected, rel=0.1), found["WRITE"]]
            # The paper's three times the model: gradients once, weights in forward and in backward, but for those between.
            assert 1.6 * num_layers <= found["num_fetches"] <= 2 * num_layers
            assert found["sent"]["gradients"] == (num_steps + 1) * model_bytes * others
            assert "weights" not in found["sent"]
            assert found["sent"]["fetches"] == found["fetches"] * unit_bytes * others
            assert found["fetches"] == of_ranks[0]["fetches"]


@pytest.mark.deep
@pytest.mark.parametrize("update", ["in_backward", "deferred"])
@pytest.mark.parametrize("lacking", [[], [1], [0, 1]])
@on_ranks(2)
def test_what_all_ranks_have_room_for_stays_in_memory(
    rank: int, lacking: list[int], update: str, tmp_path: Path
) -> None:
    """The least budget counts for all. Weights are written to, or looked at, in the midst of a step."""
    num_layers, width = 12, 128
    expected: dict[str, torch.Tensor] = {}
    for stage in (2, 3):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
        section = {
            "keep_in_memory": False,
            "update": update,
            "host_memory_budget": 700_000 if rank in lacking else "8MB",
        }
        with infinity.initialize(
            model=model,
            config=_config(
                tmp_path,
                stage,
                infinity=section,
                gradient_clipping=0.0,
                optimizer={"type": "SGD", "params": {"lr": 0.1}},
            ),
        )[0] as engine:
            storage, moved = engine._parts.storage, Counter[str]()

            def note(record: TransferRecord, moved: Counter[str] = moved) -> None:
                moved["weights of" in record.extent_name and record.direction.name] += record.num_bytes

            found = {}
            for step in range(6):
                if step == 2:  # by then all is in memory
                    engine.flush()
                    storage.observe(note)
                x = torch.randn(2, width, generator=torch.Generator().manual_seed(10 * step + rank))
                found[f"loss {step}"] = loss = engine(x).square().mean()
                if step == 4:
                    seen = model[5].weight.data
                engine.backward(loss)
                if step == 4 and update == "deferred":  # else some have been updated, and it is an error
                    with torch.no_grad():
                        model[2].weight.mul_(0.5)
                engine.step()
                if step == 4:
                    found["seen"] = seen.clone()
                    del seen
            assert engine._parts.coordinator.parameter_cache.holds_all == (
                (stage == 2 and rank not in lacking) or not lacking
            )
            if stage == 3:
                schedule = engine._parts.coordinator.parameter_cache.training_schedule
                plan = engine._parts.plan
                given = plan.sizes, plan.request, plan.placement, schedule.order, schedule.backward_start
                predicted, _ = predict(*given).kinds["weights"]
                assert (predicted > 0) == bool(lacking)
                assert lacking or moved["READ"] == 0
            found |= weights_of(engine)
        expected = expected or found
        require_same(found, expected)


@pytest.mark.deep
@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_weights_in_host_memory_are_divided(tier: str, memory: str, tmp_path: Path) -> None:
    """Each rank's shard lies there, and what the budget has room for of the others, but nothing on drives."""
    num_layers, width, num = 12, 512, 3
    model_bytes = 4 * num_layers * width * width
    section: dict[str, Any] = {"host_memory_budget": "24MB"}  # of it, gradients: as many bytes as the model
    if memory == "device":
        if tier == "none":
            pytest.skip("all weights stay on a device then, whole")
        section |= {"device_memory_budget": model_bytes // 4}

    def train(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
        config = _config(tmp_path, tier=tier, infinity=section, optimizer={"type": "SGD", "params": {"lr": 0.01}})
        with infinity.initialize(model=model, config=config)[0] as engine:
            for _ in range(2):
                engine.backward(engine(torch.ones(2, width)).sum())
                engine.step()
            plan = engine.plan
            assert plan.resting_bytes["host"]["weights"] == pytest.approx(model_bytes / num, rel=0.01)
            assert plan.resting_bytes["nvme"]["weights"] == plan.predicted_read_bytes_per_step == 0
            assert plan.placement.weights_bytes < model_bytes
            assert plan.placement.host_bytes(engine._parts.plan.request) <= 24e6
            assert engine.report.read_bytes == engine.report.write_bytes == 0
            assert 3 * world().sent_bytes["fetches"] > model_bytes

    require_ranks(num, train, tmp_path)
    if memory == "device":
        return  # what such a budget lacks is told in the words for offload_param
    tight: dict[str, Any] = {"infinity": {"host_memory_budget": "200KB"}}
    (tmp_path / "tight").mkdir()
    for error in run_ranks(2, lambda rank: _engine(tmp_path, tier=tier, **tight), tmp_path / "tight"):
        assert re.search(r"for this process's shard of the weights, .* for the weights of", error)


@pytest.mark.deep
@pytest.mark.parametrize("memory", ["device"], indirect=True)
@pytest.mark.parametrize("lacking", [[0, 1], [1]])
@on_ranks(2)
def test_what_devices_have_no_room_for_is_divided(rank: int, lacking: list[int], memory: str, tmp_path: Path) -> None:
    """Without offload_param, too: in host memory, as with "cpu", if one of the devices is too small."""
    with _engine(tmp_path, stage=2) as engine:
        expected = [_step(engine, rank, number) for number in range(3)]
        weights, units = weights_of(engine), engine._parts.parameter_map.units
    room = sum(unit.num_bytes for unit in units) - 4096 * (rank in lacking)
    for budget, is_divided in ((room, True), (2 * room, False)):
        section = {"device_memory_budget": budget, "keep_in_memory": False}
        config = _config(tmp_path, tier="none", infinity=section)
        with infinity.initialize(model=_Model(), config=config)[0] as engine:
            exchange, storage = engine._parts.exchange, engine._parts.storage
            assert all(exchange.divides(unit) == is_divided for unit in engine._parts.parameter_map.units)
            assert storage.pool.capacity_bytes <= budget
            assert [_step(engine, rank, number) for number in range(3)] == expected
            require_same(weights_of(engine), weights)


@pytest.mark.deep
@on_ranks(2)
def test_replaced_main_weights_are_stored_once(rank: int, tmp_path: Path) -> None:
    """The engine brings what other ranks have stored into the open unit, and takes that for nobody's write."""
    with _engine(tmp_path, bf16={"enabled": True}) as engine:
        weights = [engine.module.first.weight, *(engine.module.layers[i].weight for i in (0, 2))]
        for number in range(4):
            for weight in weights:
                infinity.safe_set_full_fp32_param(weight, torch.full(weight.shape, number + 0.3))
            for weight in weights:
                assert torch.equal(weight.float(), torch.full(weight.shape, number + 0.3).bfloat16().float())
                main = infinity.safe_get_full_fp32_param(weight)
                assert main is not None and main.eq(number + 0.3).all()
        stored = weights_of(engine)
    assert stored["first.weight"].eq(torch.tensor(3.3).bfloat16()).all()


@pytest.mark.deep
@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@on_ranks(2)
def test_all_ranks_read_together(rank: int, tmp_path: Path, tier: str) -> None:
    with _engine(tmp_path, tier=tier) as engine:
        _step(engine, rank, 0)
        found = weights_of(engine)
        with infinity.GatheredParameters(engine.module.last.weight):
            assert torch.equal(engine.module.last.weight, found["last.weight"])
        assert engine.module.layers[0].weight.sum() == found["layers.0.weight"].sum()
        engine.eval()
        with torch.no_grad():
            for _ in range(3):
                engine(torch.ones(1, _WIDTH))
        engine.train()
        _step(engine, rank, 1)
        before = weights_of(engine)
        engine.save_16bit_model(tmp_path / "saved")
        engine.save_fp32_model(tmp_path / "fp32")
        engine.save_checkpoint(tmp_path / "checkpoint")
        main = infinity.safe_get_full_fp32_param(engine.module.layers[2].weight)
        assert main is not None and torch.equal(main, before["layers.2.weight"])
        require_same(weights_of(engine), before)
        _step(engine, rank, 2)
        for saved in ("saved", "fp32"):
            require_same(load_file(tmp_path / saved / "model.safetensors"), before)
        engine.load_checkpoint(tmp_path / "checkpoint")
        require_same(weights_of(engine), before)
        _step(engine, rank, 2)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2 * _WIDTH, 2 * _WIDTH, bias=False) for _ in range(14))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.experts[number](x)


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2 * _WIDTH, 2 * _WIDTH, bias=False)
        self.mixture = _Experts()
        self.last = nn.Linear(2 * _WIDTH, 2 * _WIDTH, bias=False)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.last(self.mixture(self.first(x), number)).square().mean()


def _train_mixture(rank: int, directory: Path, stage: int, units: list[str], budget: str) -> dict[str, torch.Tensor]:
    """Three steps, in which ranks use other experts."""
    section = {"keep_in_memory": False, "units": units, "host_memory_budget": budget}
    config = _config(directory, stage, infinity=section, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    with infinity.initialize(model=_Mixture(), config=config)[0] as engine:
        for step in range(3):
            engine.backward(engine(torch.ones(2, 2 * _WIDTH), 3 * rank + step))
            engine.step()
        return weights_of(engine)


@pytest.mark.deep
@on_ranks(3)
def test_experts_that_some_ranks_need_are_one_unit(rank: int, tmp_path: Path) -> None:
    found = [_train_mixture(rank, tmp_path, stage, ["first", "mixture", "last"], "20MB") for stage in (2, 3)]
    require_same(found[1], found[0])


@pytest.mark.deep
def test_ranks_that_need_other_units_end_with_the_names_of_both(tmp_path: Path) -> None:
    """Also one that has all the units that it needs itself."""
    for error in run_ranks(3, lambda rank: _train_mixture(rank, tmp_path, 3, [], "700KB"), tmp_path):
        assert "RankError" in error
        assert len(set(re.findall(r"gathering the weights of ([a-z]+[.a-z0-9]*)", error))) > 1, error


@pytest.mark.deep
@on_ranks(2)
def test_a_rank_without_data_walks_along(rank: int, tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    for stage in (2, 3):
        with _engine(tmp_path, stage) as engine:
            for _ in range(2):
                x = torch.ones(4, _WIDTH) * (rank == 0)
                engine.backward(engine(x).square().mean() * (rank == 0))
                engine.step()
            length = 2 + 3 * rank  # of what is generated: all go on until the last one has its end
            with torch.no_grad():
                is_over = torch.zeros(())
                number, x = 0, torch.ones(1, _WIDTH)
                while True:
                    is_over.fill_(number >= length)
                    torch.distributed.all_reduce(is_over, torch.distributed.ReduceOp.MIN)
                    if is_over:
                        break
                    y = engine(x)
                    x = y if number < length else x
                    number += 1
            found = weights_of(engine) | {"generated": x}
        expected = expected or found
        require_same(found, expected)


@pytest.mark.deep
@pytest.mark.parametrize("is_garbage", [False, True])
def test_a_script_may_end_with_an_export(is_garbage: bool, tmp_path: Path) -> None:
    """The first rank reads the shards of the others, whose scripts are at their ends long before."""

    def export(rank: int) -> None:
        atexit._clear()  # what belongs to the process that this one was forked from
        atexit.register(destroy_at_exit)
        atexit.register(end_all_at_exit)
        engine = _engine(tmp_path)
        _step(engine, rank, 0)
        engine.flush()
        if rank == 0:
            time.sleep(0.5)
        engine.save_16bit_model(tmp_path / "saved")
        if is_garbage:
            del engine
            gc.collect()
        atexit._run_exitfuncs()

    require_ranks(2, export, tmp_path)
    assert (tmp_path / "saved" / "model.safetensors").exists()


def _write_alone(engine: Any) -> None:
    with torch.no_grad():
        engine.module.layers[0].weight.mul_(2)


def _raise(engine: Any) -> None:
    raise ValueError("of the script")


def _close(engine: Any) -> None:
    engine.close(restore_weights=False)


def _die(engine: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("act", "own", "others"),
    [
        (_write_alone, "RankError: rank 1", "All ranks must make the same calls"),
        (_raise, "ValueError: of the script", "All ranks must make the same calls"),
        (_close, "", "All ranks must"),
        (_die, "killed", "has ended without giving a reason"),
    ],
)
def test_what_one_rank_does_alone_is_an_error_on_all(
    act: Callable[[Any], None], own: str, others: str, tmp_path: Path
) -> None:
    def train(rank: int) -> None:
        with _engine(tmp_path) as engine:
            _step(engine, rank, 0)
            if rank == 1 and act is _write_alone:
                act(engine)
            elif rank == 1:  # in the midst of a forward, with fetches under way
                engine.module.layers[1].register_forward_hook(lambda *_: act(engine))
            _step(engine, rank, 1)
            _step(engine, rank, 2)

    (tmp_path / "rank1").write_text("killed")
    errors = run_ranks(3, train, tmp_path)
    assert own in errors[1]
    for error in (errors[0], errors[2]):
        assert "RankError" in error
        assert others in error


@pytest.mark.deep
def test_a_rank_that_leaves_a_forward_ends_with_the_others(tmp_path: Path) -> None:
    """It waits for them in its script, while they wait for its shard of a unit."""

    def train(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16)))
        section = {"keep_in_memory": False, "host_memory_budget": "700KB"}
        config = _config(tmp_path, infinity=section, optimizer={"type": "SGD", "params": {"lr": 0.01}})
        engine = infinity.initialize(model=model, config=config)[0]
        for step in range(2):
            if rank == 1 and step == 1:
                model[5].register_forward_hook(lambda *_: _raise(engine))
            try:
                loss = engine(torch.ones(2, 128)).sum()
            except ValueError:
                engine.save_checkpoint(tmp_path / "saved", tag="last")
                raise
            engine.backward(loss)
            engine.step()

    began = time.monotonic()
    errors = run_ranks(3, train, tmp_path)
    assert time.monotonic() - began < _FAR_LONGER_SECONDS
    for error in errors:
        assert "RankError" in error
        assert "rank 1 is at 'engine.save_checkpoint with tag 'last''" in error
    assert any(
        re.search("gathering the weights of [0-9]+: another rank does not reach this call", error) for error in errors
    )


def test_a_failing_initialize_gives_the_weights_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("in the midst")

    monkeypatch.setattr(infinity.Engine, "__init__", fail)

    def begin(rank: int) -> None:
        model = _Model()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match="in the midst"):
            infinity.initialize(model=model, config=_config(tmp_path))
        require_same(dict(model.state_dict()), expected)

    require_ranks(2, begin, tmp_path)
