"""The path of a GPU without one: weights come through pages and an upload thread, gradients leave from the device.

What is trained on the simulated GPU must have the bits of plain torch there, and no copy or kernel may run in no order with
another one that touches the same memory.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.deepspeed.ops.lamb import FusedLamb
from infinity.errors import BudgetTooSmallError, ModelError
from swapper import AlignedRegion
from tests.exactness import mixtures
from tests.exactness.case import Case
from tests.exactness.families import FAMILIES
from tests.exactness.grid import WORKERS, Row
from tests.exactness.on_device import give_least_device_memory, require_exact_training_on
from tests.exactness.shapes import SHAPES
from tests.internals import EngineResources, cost_model, gradient_norm, gradient_store, placement, user_copies
from tests.quantized import FORMATS
from tests.simulated_gpu import backend
from tests.simulated_gpu.device import COMPUTE, SimulatedGpu

backend.register_or_skip()

_FROZEN_EXPERTS = dataclasses.replace(mixtures.case("qwen3_moe", "eager", mixtures.frozen), name="frozen_experts")
_CASES = {case.name: case for case in (*SHAPES, *FAMILIES, _FROZEN_EXPERTS)}
_ROOMY = 1 << 20
_BEST_PLACEMENT = cost_model.best_placement
"""As it is without `give_least_device_memory`."""
MODELS = (
    *("tied_weights", "frozen_middle", "skipped_blocks", "experts", "foreign_weight", "transposed"),
    *("mixed_dtypes", "lora", "llama", "gpt2", "t5", "frozen_experts"),
)

ROWS = (
    Row(),
    Row(budget="tight", page="small"),
    Row(budget="tight", page="small", prefetch=False, checkpointing="reentrant"),
    Row(dtype="bf16", budget="tight", page="small", checkpointing="non_reentrant"),
    Row(dtype="bf16", accumulation=3, clipping=True, page="small"),
    Row(accumulation=3, budget="tight", optimizer="groups"),
    Row(clipping=True, budget="tight", page="small", optimizer="instance"),
    Row(loop="plain", budget="tight", dtype="bf16", accumulation=3, clipping=True),
    Row(loop="plain", prefetch=False),
    Row(offload_param="cpu", accumulation=3, clipping=True, prefetch=False),
    Row(offload_param="cpu", offload_optimizer="none", dtype="bf16"),
    Row(offload_param="none", page="small", dtype="bf16", clipping=True),
    Row(offload_param="none", offload_optimizer="none", accumulation=3, optimizer="groups"),
    Row(offload_optimizer="none", budget="tight", clipping=True, checkpointing="non_reentrant"),
    Row(offload_optimizer="cpu", page="auto", dtype="bf16"),
    Row(budget="half", dtype="bf16", page="small"),
    Row(budget="half", accumulation=3, clipping=True, checkpointing="reentrant", prefetch=False),
    Row(budget="everything", dtype="bf16"),
    Row(budget="everything", clipping=True, page="small", update="deferred", checkpointing="non_reentrant"),
    Row(budget="everything", accumulation=3, dtype="bf16", main_weights="fp32", loop="plain"),
    Row(offload_param="none", offload_optimizer="none", dtype="bf16", page="small"),
)
ROWS = tuple(dataclasses.replace(row, workers=WORKERS[number % 4]) for number, row in enumerate(ROWS))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    """What engines are made on in this test, with as little of its memory for weights as can be."""
    gpu = SimulatedGpu()
    open_storage = EngineResources.__init__

    def opened(self: EngineResources, *args: Any, **kwargs: Any) -> None:
        open_storage(self, *args, **kwargs)
        gpu.watch(self.pool)

    module = importlib.import_module("infinity.entry")
    monkeypatch.setattr(module, "device_for", lambda torch_device: gpu)
    give_least_device_memory(monkeypatch)
    monkeypatch.setattr(EngineResources, "__init__", opened)
    yield gpu
    gpu.end()
    assert not gpu.order.races


def _built_on(device: str, case: Case, checkpointing: str) -> nn.Module:
    with torch.device(device):
        return case.build(checkpointing)


def _require_exact(name: str, row: Row, directory: Path, device: SimulatedGpu) -> None:
    # Made there: torch cannot give a parameter of the CPU memory of a device that it does not know.
    case = _CASES[name]
    made_there = dataclasses.replace(case, build=lambda checkpointing: _built_on(backend.NAME, case, checkpointing))
    require_exact_training_on(backend.NAME, made_there, row, directory)
    if row.offload_param != "none":
        assert device.num_copies > 0, "weights took another way"


@pytest.mark.deep(but=6)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_training_has_the_bits_of_plain_torch_on_the_same_device(
    row: Row, tmp_path: Path, device: SimulatedGpu
) -> None:
    _require_exact("plain", row, tmp_path, device)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("name", "row"),
    [(name, ROWS[(3, 6, 15, 18)[number % 4]]) for number, name in enumerate(MODELS)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_other_models_have_them_too(name: str, row: Row, tmp_path: Path, device: SimulatedGpu) -> None:
    _require_exact(name, row, tmp_path, device)


def _layers(num: int = 8, width: int = 64) -> nn.Sequential:
    with torch.device(backend.NAME):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(num)))


def _engine(
    device: SimulatedGpu,
    directory: Path,
    gradient_accumulation_steps: int = 1,
    offload_param: str = "nvme",
    offload_optimizer: str = "nvme",
    gradient_clipping: float = 0.0,
    optimizer: str = "AdamW",
    model: nn.Module | None = None,
    is_bf16: bool = False,
    **own: Any,
) -> Any:
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_clipping": gradient_clipping,
        "optimizer": {"type": optimizer},
        "bf16": {"enabled": is_bf16},
        "zero_optimization": {
            "stage": 3,
            "offload_param": nvme if offload_param == "nvme" else {"device": offload_param},
            "offload_optimizer": nvme if offload_optimizer == "nvme" else {"device": offload_optimizer},
        },
        "infinity": {"host_memory_budget": "64MiB", **own},
    }
    return infinity.initialize(model=_layers() if model is None else model, config=config)[0]


def _none_offloaded(device: SimulatedGpu, directory: Path, **options: Any) -> Any:
    return _engine(device, directory, offload_param="none", offload_optimizer="none", **options)


def _twin_of(engine: Any, kind: type = torch.optim.AdamW) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    twin = _layers()
    with torch.no_grad():
        for own, other in zip(twin.parameters(), engine.module.parameters(), strict=True):
            own.copy_(other)
    (group,) = engine.optimizer.param_groups
    names = ("lr", "betas", "eps", "weight_decay", "fused")
    return twin, kind(twin.parameters(), **{name: group[name] for name in names if name in group})


def _update(twin: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    twin(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _require_weights_of(twin: nn.Module, engine: Any) -> None:
    for found, expected in zip(engine.module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found.cpu(), expected.cpu())


def _step(engine: Any) -> torch.Tensor:
    """A whole step with a batch that is drawn now."""
    batch = torch.randn(2, 64, device=backend.NAME)
    engine.backward(engine(batch).square().sum())
    engine.step()
    return batch


def _count_copies(device: SimulatedGpu) -> dict[str, int]:
    """The bytes that go up and down from now on."""
    copied = {"upload": 0, "download": 0}

    def counted(way: str) -> Any:
        copy = getattr(device, way)

        def count(target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
            copied[way] += source.nbytes if target.device != source.device else 0
            return copy(target, source, after)

        return count

    device.upload, device.download = counted("upload"), counted("download")  # type: ignore[method-assign]
    return copied


def test_units_that_come_and_go_take_what_the_plan_says(tmp_path: Path, device: SimulatedGpu) -> None:
    before = device.used_bytes
    with _engine(device, tmp_path) as engine:
        for _ in range(3):
            _step(engine)
    peak = device.peak_bytes()
    assert 0 < peak - before <= device.pools[0].capacity_bytes
    assert device.used_bytes == before


def test_a_device_that_is_full_is_an_error_that_names_the_key(tmp_path: Path, device: SimulatedGpu) -> None:
    device.capacity_bytes = 20000  # of a unit that has 16640
    with pytest.raises(BudgetTooSmallError, match=r"ran out of memory.*Set it below") as caught:
        _engine(device, tmp_path, device_memory_budget=100000)
    assert caught.value.key == "infinity.device_memory_budget"
    assert not list(tmp_path.iterdir())
    device.capacity_bytes = 1 << 30
    _engine(device, tmp_path).close()


def test_lanes_launch_in_the_stream_of_the_thread_that_trains(tmp_path: Path, device: SimulatedGpu) -> None:
    batches = [torch.randn(2, 64, device=backend.NAME) for _ in range(3)]
    streams = set()
    with _engine(device, tmp_path, gradient_accumulation_steps=3, schedule="vertical") as engine:
        engine.module[0].register_forward_pre_hook(
            lambda *_: streams.add((threading.current_thread().name, device.stream))
        )
        for _ in range(2):
            engine.train_batch(iter(batches), loss_fn=lambda output, _: output.square().sum())
    assert any("micro-batch" in name for name, _ in streams)
    assert {stream for _, stream in streams} == {COMPUTE}


def test_a_save_in_the_background_comes_behind_what_was_launched_before(tmp_path: Path, device: SimulatedGpu) -> None:
    with _engine(device, tmp_path, offload_param="none") as engine:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.data.mul_(2)
        engine.save_checkpoint(tmp_path / "saved", blocking=False)
        engine.wait_for_checkpoint()


@pytest.mark.parametrize(
    ("clipping", "accumulation", "ring_bytes", "num_allowed"),
    [(0.0, 1, _ROOMY, 0), (1.0, 1, _ROOMY, 0), (1.0, 2, _ROOMY, 0), (0.0, 2, _ROOMY, 0), (1.0, 1, 17000, 7)],
    ids=["in_backward", "waiting", "summed", "summed_in_backward", "one_unit_arrives"],
)
def test_how_often_forward_and_backward_wait_for_the_device(
    clipping: float,
    accumulation: int,
    ring_bytes: int,
    num_allowed: int,
    tmp_path: Path,
    device: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not at all, unless there is room for too few of the eight units' gradients, which have 16,640 bytes each.

    Sums that are updated in backward are waited for when it has ended.
    """
    monkeypatch.setattr(placement, "_UNITS_LANDING", 1)
    monkeypatch.setattr(placement, "_LANDING_GAP_BYTES", ring_bytes - 16640)
    batch = torch.randn(2, 64, device=backend.NAME)
    with _engine(device, tmp_path, gradient_accumulation_steps=accumulation, gradient_clipping=clipping) as engine:
        for _ in range(3):
            found = []
            for _ in range(accumulation):
                device.synchronisations.clear()
                engine.backward(engine(batch).square().sum())
                where = (" in infinity-", " in MainThread") if accumulation > 1 and not clipping else (" in infinity-",)
                found += [each for each in list(device.synchronisations) if not any(place in each for place in where)]
                engine.step()
    assert len(found) == num_allowed, found


def test_clipping_takes_norms_on_the_device(
    tmp_path: Path, device: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gradients that wait, and of what they are in all: no pass over host memory."""
    taken: list[str] = []

    def norms_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        taken.extend(gradient.device.type for gradient in gradients)
        return [gradient_norm(gradient) for gradient in gradients]

    monkeypatch.setattr(gradient_store, "gradient_norms", norms_of)
    with _engine(device, tmp_path, gradient_clipping=1.0) as engine:
        _step(engine)
        assert engine.get_global_grad_norm() > 1
    assert taken == 16 * [backend.NAME]


def test_an_update_on_the_device_asks_it_for_no_number(tmp_path: Path, device: SimulatedGpu) -> None:
    with _none_offloaded(device, tmp_path) as engine:
        for _ in range(3):
            device.synchronisations.clear()
            _step(engine)
            engine.flush()
            found = [each for each in device.synchronisations if " in infinity-update" in each]
    assert len(found) == 8, found
    assert all(each.startswith("synchronize") for each in found), "one for each unit, when all of it is launched"


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_whole_parameters_are_updated_with_the_bits_of_torch(tier: str, tmp_path: Path, device: SimulatedGpu) -> None:
    """LAMB: norms of what an update finds, so a chunk that has not arrived shows in every element."""
    with _engine(device, tmp_path, offload_optimizer=tier, optimizer="Lamb") as engine:
        twin, optimizer = _twin_of(engine, FusedLamb)
        for _ in range(3):
            _update(twin, optimizer, _step(engine))
        engine.close(restore_weights=True)
        _require_weights_of(twin, engine)


@pytest.mark.parametrize(("param", "optimizer"), [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("none", "nvme")])
def test_an_engine_that_sleeps_gives_the_device_back(
    param: str, optimizer: str, tmp_path: Path, device: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_copies, "_LEAST_BYTES", 1)
    before, hosted = device.used_bytes, AlignedRegion.mapped_bytes()
    with _engine(device, tmp_path, offload_param=param, offload_optimizer=optimizer) as engine:
        twin, twins_optimizer = _twin_of(engine)
        twins_bytes = sum(each.nbytes for each in twin.parameters())
        for _ in range(3):
            _update(twin, twins_optimizer, _step(engine))
            engine.sleep()
            if optimizer != "cpu":
                assert AlignedRegion.mapped_bytes() - hosted < 32 << 10, "pinned memory is left"
            for name, value in engine.iter_weights():
                assert value.device.type == backend.NAME
                assert torch.equal(value, twin.get_parameter(name))
            del value
            assert AlignedRegion.mapped_bytes() - hosted < (32 << 10 if optimizer != "cpu" else 1 << 30)
            assert device.pools[0].used_bytes == device.pools[0].free_bytes == 0
            engine.wake()
        _require_weights_of(twin, engine)
    assert device.used_bytes - before <= 2 * twins_bytes + 1024, "what the twin and its optimizer have"


def _change(parameters: list[nn.Parameter], step: int) -> None:
    """What a script does with gradients between backward and step."""
    first, second, third, *_ = parameters
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    assert first.grad.device == first.device
    first.grad.mul_(0.5 + step)
    second.grad = None if step else torch.ones_like(second)
    third.grad = first.grad.clone()


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_gradients_of_what_is_updated_on_the_device_are_there(
    clipping: float, tmp_path: Path, device: SimulatedGpu
) -> None:
    """They are summed, clipped, looked at and changed there, and nothing of them is copied to the host."""
    with _none_offloaded(device, tmp_path, gradient_accumulation_steps=2, gradient_clipping=clipping) as engine:
        assert engine.plan.placement.gradients_on_device
        assert engine.plan.resting_bytes["device"]["gradients"] == 8 * 4 * (64 * 64 + 2048)
        twin, optimizer = _twin_of(engine)
        num_copies = device.num_copies
        for step in range(3):
            for _ in range(2):
                batch = torch.randn(2, 64, device=backend.NAME)
                engine.backward(engine(batch).square().sum())
                (twin(batch).square().sum() / 2).backward()
                if engine.is_gradient_accumulation_boundary():
                    _change(list(engine.module.parameters()), step)
                    _change(list(twin.parameters()), step)
                engine.step()
            if clipping:
                torch.nn.utils.clip_grad_norm_(twin.parameters(), clipping)
            optimizer.step()
            optimizer.zero_grad()
        engine.flush()
        assert device.num_copies == num_copies, "between host and device"
        _require_weights_of(twin, engine)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_plain_loop_keeps_its_gradients_on_the_device(to_none: bool, tmp_path: Path, device: SimulatedGpu) -> None:
    with _none_offloaded(device, tmp_path) as engine:
        twin, optimizer = _twin_of(engine)
        kept = []
        for _ in range(3):
            for _ in range(2):
                batch = torch.randn(2, 64, device=backend.NAME)
                engine.module(batch).square().sum().backward()
                twin(batch).square().sum().backward()
            kept.append((engine.module[0].weight.grad, twin[0].weight.grad.clone()))
            engine.optimizer.step()
            engine.optimizer.zero_grad(set_to_none=to_none)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        engine.flush()
        _require_weights_of(twin, engine)
        if to_none:
            assert all(torch.equal(found.cpu(), expected.cpu()) for found, expected in kept), "they are the script's"


_PLANNED: dict[str, dict[str, Any]] = {
    "updated_in_backward": {},
    "kept_until_the_step": {"gradient_clipping": 1.0},
    "added_up_on_the_host": {"gradient_accumulation_steps": 3, "schedule": "ordinary"},
    "added_up_on_the_device": {"gradient_accumulation_steps": 3, "schedule": "vertical"},
    "resident": {"offload_param": "none", "keep_in_memory": True},
    "updated_on_the_device": {"offload_optimizer": "none"},
    "all_on_the_device": {"offload_param": "none", "offload_optimizer": "none", "keep_in_memory": True},
}


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("name", _PLANNED)
def test_as_many_bytes_are_copied_up_and_down_as_planned(
    name: str, is_bf16: bool, tmp_path: Path, device: SimulatedGpu
) -> None:
    """Within a few units of twelve a micro-batch: one more or less may be there when the next one begins."""
    copied = _count_copies(device)
    options: dict[str, Any] = {"keep_in_memory": False, "model": _layers(12, 256), "is_bf16": is_bf16, **_PLANNED[name]}
    num_micro_batches = options.get("gradient_accumulation_steps", 1)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    batches = [torch.randn(2, 256, device=backend.NAME).to(dtype) for _ in range(num_micro_batches)]
    with _engine(device, tmp_path, **options) as engine:
        for _ in range(4):
            copied.update(upload=0, download=0)
            engine.train_batch(iter(batches), loss_fn=lambda output, _: output.float().square().sum())
            engine.flush()
        plan, weight_bytes = engine.plan, sum(each.numel() for each in engine.module.parameters()) * dtype.itemsize
        tolerance = (0.1 if num_micro_batches == 1 else 0.2) * weight_bytes * num_micro_batches
        assert plan.traffic.is_vertical == (options.get("schedule") == "vertical")
        assert copied["upload"] == pytest.approx(plan.predicted_upload_bytes_per_step, abs=tolerance)
        assert copied["download"] == pytest.approx(plan.predicted_download_bytes_per_step, abs=tolerance)
        assert max(copied.values()) >= weight_bytes or name == "all_on_the_device"


def _partly_frozen(num_blocks: int, rounded_to: str | None) -> nn.Module:
    """Blocks with frozen weights and trained biases. The weights are rounded as by this format."""
    torch.manual_seed(0)
    with torch.device(backend.NAME):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 256)) for _ in range(num_blocks)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
        if rounded_to is not None and not parameter.requires_grad:
            parameter.data.copy_(FORMATS[rounded_to](parameter.detach().cpu()))
    return model


def _loss_of_step(engine: Any, step: int) -> torch.Tensor:
    inputs = torch.randn(2, 256, generator=torch.Generator().manual_seed(step)).to(backend.NAME)
    loss = engine(inputs).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.detach().cpu()


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize("name", ["nf4", "int8", "fp8_e4m3"])
def test_packed_weights_are_uploaded_packed(name: str, tier: str, tmp_path: Path, device: SimulatedGpu) -> None:
    """And unpacked there: the bits are those of a model with the rounded weights, and fewer bytes cross the bus."""
    losses: list[torch.Tensor] = []
    uploaded: list[int] = []
    copied = _count_copies(device)
    for frozen_dtype in (name, None):
        copied["upload"] = 0
        options: dict[str, Any] = {"offload_param": tier, "keep_in_memory": False, "frozen_dtype": frozen_dtype}
        model = _partly_frozen(4, None if frozen_dtype else name)
        with _engine(device, tmp_path, model=model, **options) as engine:
            losses += [_loss_of_step(engine, step) for step in range(3)]
        uploaded.append(copied["upload"])
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))
    assert uploaded[0] < 0.75 * uploaded[1]


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize(("budget", "num_kept"), [(1_100_000, 4), (2_000_000, 12)])
def test_packed_weights_rest_in_gpu_memory(
    budget: int, num_kept: int, tier: str, tmp_path: Path, device: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of as many units as there is room for are not uploaded at all. Sleep and writes keep their values."""
    monkeypatch.setattr(cost_model, "best_placement", _BEST_PLACEMENT)
    copied = _count_copies(device)
    options = {"offload_param": tier, "keep_in_memory": True, "device_memory_budget": budget}
    twin = _partly_frozen(12, "nf4")
    with _engine(device, tmp_path, model=twin, **options | {"device_memory_budget": None}) as engine:
        expected = [_loss_of_step(engine, step) for step in range(4)]
    model = _partly_frozen(12, None)
    with _engine(device, tmp_path, model=model, frozen_dtype="nf4", **options) as engine:
        codes = [each.codes_on_device for each in engine.plan.sizes]
        assert sum(map(bool, codes)) == num_kept
        assert engine.plan.resting_bytes["device"]["weights"] == sum(codes)
        losses = [_loss_of_step(engine, step) for step in range(2)]
        engine.sleep()
        engine.wake()
        losses.append(_loss_of_step(engine, 2))
        with torch.no_grad():
            model[0][0].weight.mul_(1.0)
            with pytest.raises(ModelError, match="nf4"):
                model[0][0].weight.mul_(1.01)
        engine.flush()
        copied["upload"] = 0
        losses.append(_loss_of_step(engine, 3))
        engine.flush()
        assert copied["upload"] == pytest.approx(engine.plan.predicted_upload_bytes_per_step, abs=40_000)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
