"""Every optimizer trains to the bits of torch's: by name, passed, over whole parameters, and with counts in its groups."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from infinity.deepspeed.ops.adam import FusedAdam
from infinity.deepspeed.ops.lamb import FusedLamb
from infinity.errors import BudgetTooSmallError, ConfigError, OptimizerNotPageableError
from tests.exactness.lockstep import BF16, IN_MEMORY, SHAPES_BY_NAME, Lockstep
from tests.exactness.optimizers import parameter_groups
from tests.internals import BY_NAME
from tests.twins import Twins

Named = Mapping[str, nn.Parameter]


def _of(cls: type[torch.optim.Optimizer], **settings: Any) -> Callable[[Named], torch.optim.Optimizer]:
    return lambda named: cls(list(named.values()), **settings)


_ADAM = {"lr": 1e-3, "weight_decay": 0.1}
_BY_NAME: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
    ("Adam", _ADAM, torch.optim.AdamW, {"fused": True}),
    ("Adam", {**_ADAM, "adam_w_mode": False}, torch.optim.Adam, {"fused": True}),
    ("adamw", {**_ADAM, "betas": [0.8, 0.99], "eps": 1e-6}, torch.optim.AdamW, {"fused": True}),
    ("AdamW", {**_ADAM, "bias_correction": False}, FusedAdam, {"bias_correction": False}),
    ("SGD", {"lr": 0.1}, torch.optim.SGD, {"fused": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, torch.optim.SGD, {"fused": True}),
    ("Adagrad", {"lr": 0.01, "lr_decay": 0.1}, torch.optim.Adagrad, {"fused": True}),
    ("RMSprop", {"lr": 1e-3, "centered": True, "momentum": 0.5}, torch.optim.RMSprop, {}),
    ("NAdam", {"lr": 1e-3}, torch.optim.NAdam, {}),
    ("OneBitAdam", {"lr": 1e-3, "freeze_step": 1}, BY_NAME["onebitadam"], {"fused": True}),
]


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("clipping", [0.0, 0.1])
@pytest.mark.parametrize(("name", "params", "cls", "more"), _BY_NAME)
def test_optimizers_by_config_name(
    name: str, params: dict[str, Any], cls: Any, more: dict[str, Any], clipping: float, tmp_path: Path
) -> None:
    settings = {key: value for key, value in params.items() if key not in ("adam_w_mode", "bias_correction")}
    changes = {"optimizer": {"type": name, "params": params}, "gradient_clipping": clipping}
    with Lockstep.start(tmp_path, changes=changes, reference_optimizer=_of(cls, **settings, **more)) as both:
        both.engine_steps(range(3))


_INSTANCES: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "AdamW amsgrad": _of(torch.optim.AdamW, lr=1e-3, amsgrad=True),
    "Adam maximize": _of(torch.optim.Adam, lr=1e-4, maximize=True),
    "AdamW foreach": _of(torch.optim.AdamW, lr=1e-3, foreach=True),
    "AdamW tensor lr": lambda named: torch.optim.AdamW(list(named.values()), lr=torch.tensor(1e-3)),
    "RAdam": _of(torch.optim.RAdam, lr=1e-3),
    "Adamax": _of(torch.optim.Adamax, lr=1e-3),
    "Adadelta": _of(torch.optim.Adadelta, lr=0.5),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("name", _INSTANCES)
def test_optimizers_passed_as_instances(name: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, optimizer=_INSTANCES[name]) as both:
        both.engine_steps(range(3))


def _trainable(model: nn.Module) -> Named:
    return {fqn: param for fqn, param in model.named_parameters() if param.requires_grad}


_SOURCES: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], Callable[[Named], torch.optim.Optimizer]]] = {
    "class": (lambda model: {"optimizer": torch.optim.AdamW}, _of(torch.optim.AdamW)),
    "callable with groups": (
        lambda model: {
            "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
            "model_parameters": parameter_groups(_trainable(model)),
        },
        # Their betas mean nothing to SGD, which keeps them in the groups.
        lambda named: torch.optim.SGD(parameter_groups(named), lr=0.05, momentum=0.9),
    ),
    "config with an iterator of parameters": (
        lambda model: {"model_parameters": iter(_trainable(model).values())},
        _of(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05, fused=True),
    ),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("shape", ["plain", "lora"])
@pytest.mark.parametrize("name", _SOURCES)
def test_optimizers_passed_in_other_ways(name: str, shape: str, tmp_path: Path) -> None:
    arguments, make = _SOURCES[name]
    changes = {} if name.startswith("config") else {"optimizer": None}
    with Lockstep.start(
        tmp_path, case=SHAPES_BY_NAME[shape], changes=changes, reference_optimizer=make, arguments=arguments
    ) as both:
        both.engine_steps(range(3))


class NovoGrad(torch.optim.Optimizer):
    """One second moment per layer (Ginsburg et al. 2019, arXiv 1905.11286): a state of one element."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.95, 0.98)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, beta1, beta2 = self.state[param], *group["betas"]
                square = param.grad.square().sum()
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = square
                else:
                    state["exp_avg_sq"] = state["exp_avg_sq"] * beta2 + square * (1 - beta2)
                state["exp_avg"].mul_(beta1).add_(param.grad / (state["exp_avg_sq"].sqrt() + 1e-8))
                param.sub_(group["lr"] * state["exp_avg"])


def _matrices_apart(named: Named) -> list[dict[str, Any]]:
    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for fqn, param in named.items():
        split[param.dim() >= 2 and "embed" not in fqn].append(param)
    return [{"params": members, "use_muon": kind} for kind, members in split.items() if members]


_OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "Lamb": _of(FusedLamb, lr=0.05, weight_decay=0.01),
    "NovoGrad": _of(NovoGrad),
    "Lamb in groups": lambda named: FusedLamb(parameter_groups(named), lr=0.05),
    "Muon": lambda named: BY_NAME["muon"](_matrices_apart(named), weight_decay=0.01),
}
_PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": {},
    "nvme, kept in memory": {"infinity": {"keep_in_memory": True}},
    "memory": IN_MEMORY,
    "bf16": BF16,
    "bf16, main weights in fp32": {**BF16, "infinity": {"main_weights": "fp32"}},
    "clipping": {"gradient_clipping": 0.05},
    "in backward": {"infinity": {"update": "in_backward"}},
    "accumulation": {"gradient_accumulation_steps": 2},
}


def _lockstep(
    directory: Path, make: Callable[[Named], torch.optim.Optimizer], shape: str, changes: Mapping[str, Any]
) -> Lockstep:
    own = {"staging_buffer_bytes": None, **changes.get("infinity", {})}
    changes = {**changes, "infinity": own}
    return Lockstep.start(directory, case=SHAPES_BY_NAME[shape], changes=changes, optimizer=make)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("placement", _PLACEMENTS)
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_whole_parameters_are_updated_as_in_torch(name: str, placement: str, tmp_path: Path) -> None:
    with _lockstep(tmp_path, _OPTIMIZERS[name], "plain", _PLACEMENTS[placement]) as both:
        both.engine_steps(range(3))


_SHAPES = (
    "attention", "batch_norms", "big_embedding", "convolutions", "experts", "frozen_middle", "lora", "odd_sizes",
    "recurrent", "root_parameters", "scalars", "tied_weights", "transposed", "unused_parameter",
)  # fmt: skip


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("shape", _SHAPES)
def test_parameters_of_all_forms(shape: str, tmp_path: Path) -> None:
    with _lockstep(tmp_path, _OPTIMIZERS["Lamb"], shape, {}) as both:
        both.engine_steps(range(2))


def test_it_is_the_configs_muon(tmp_path: Path) -> None:
    section = {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-3, "weight_decay": 0.1, "ns_method": "gram"}}
    changes = {"optimizer": section, "infinity": {"staging_buffer_bytes": None}}

    def make(named: Named) -> torch.optim.Optimizer:
        return BY_NAME["muon"](_matrices_apart(named), lr=0.01, adam_lr=1e-3, weight_decay=0.1)

    with Lockstep.start(tmp_path, changes=changes, reference_optimizer=make) as both:
        assert [group["use_muon"] for group in both.engine.optimizer.param_groups] == [True, False]
        both.engine_steps(range(3))


def test_torchs_muon(tmp_path: Path) -> None:
    """It takes matrices only, and refuses all else when it is made."""
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        pytest.skip(f"torch {torch.__version__} has none")

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    make = lambda each: muon(each.parameters(), lr=0.02)  # noqa: E731
    with Twins(tmp_path, model, make, infinity={"staging_buffer_bytes": None}) as twins:
        for number in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
            twins.step(lambda model, x=x: model(x).square().mean())
        twins.require_equal()


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        (
            {"staging_buffer_bytes": 49152},
            ConfigError,
            r"staging buffer must hold the largest unit .*at least .* or leave it out",
        ),
        ({"state_dtype": "bf16"}, ConfigError, r"Lamb updates whole parameters.*\"fp32\""),
        ({"tile_above": 1024}, OptimizerNotPageableError, r"makes several of one\. Remove infinity\.tile_above"),
        ({"host_memory_budget": "20KiB"}, BudgetTooSmallError, r"to update the largest unit as a whole"),
    ],
)
def test_what_would_part_a_parameter_is_refused(
    own: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        _lockstep(tmp_path, _OPTIMIZERS["Lamb"], "plain", {"infinity": own})


class ScheduleFree(Optimizer):
    """As AdamWScheduleFree of Meta's package schedulefree, with its names."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        counts = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": False}
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "warmup_steps": 3, **counts})

    @torch.no_grad()
    def _move(self, is_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != is_training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        beta = group["betas"][0]
                        p.lerp_(end=self.state[p]["z"], weight=1 - beta if is_training else 1 - 1 / beta)
                group["train_mode"] = is_training

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("call optimizer.train() first")
        for group in self.param_groups:
            k = int(group["k"])
            lr = group["lr"] * min((k + 1) / group["warmup_steps"], 1.0)
            group["scheduled_lr"] = lr
            group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            share = group["lr_max"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(z=p.clone(), exp_avg_sq=torch.zeros_like(p))
                state["exp_avg_sq"].mul_(group["betas"][1]).addcmul_(p.grad, p.grad, value=1 - group["betas"][1])
                grad = p.grad / state["exp_avg_sq"].div(1 - group["betas"][1] ** (k + 1)).sqrt().add_(1e-8)
                p.lerp_(end=state["z"], weight=share)
                p.add_(grad, alpha=lr * (group["betas"][0] * (1 - share) - 1))
                state["z"].sub_(grad, alpha=lr)
            group["k"] += 1  # of a tensor: in place


class CountsWhatTrains(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "rounds": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            group["rounds"] += bool(present)
            for p in present:
                p.sub_(p.grad, alpha=group["lr"] / group["rounds"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(70, 70) for _ in range(3)])
        self.head = nn.Linear(70, 3)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(inputs).relu()).square().mean()


def _in_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    unused = named.pop("unused")
    matrices = [p for p in named.values() if p.dim() == 2]
    others = [p for p in named.values() if p.dim() < 2]
    return [{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.01}, {"params": [unused], "lr": 0.03}]


_MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "schedule-free": lambda model: ScheduleFree(_in_groups(model)),
    "a tensor that counts": lambda model: ScheduleFree(
        [{**group, "k": torch.tensor(0)} for group in _in_groups(model)]
    ),
    "counts what trains": lambda model: CountsWhatTrains(_in_groups(model)),
}


def _counting_loss(number: int) -> Callable[[Any], torch.Tensor]:
    inputs = torch.randn(4, 70, generator=torch.Generator().manual_seed(number))
    return lambda model: model(inputs)


def _twins(make: Callable[[nn.Module], Optimizer], drive: Path, **settings: Any) -> Twins:
    own = {"staging_buffer_bytes": None, **settings}
    twins = Twins(drive, Net(), make, gradient_accumulation_steps=2, infinity=own)
    if isinstance(twins.expected, ScheduleFree):
        twins.change(lambda _, optimizer: optimizer.train())
    return twins


def _counting_step(twins: Twins, step: int) -> None:
    twins.step(_counting_loss(2 * step), _counting_loss(2 * step + 1))


def _require_equal(twins: Twins) -> None:
    twins.require_equal()
    assert twins.optimizer.state_dict()["param_groups"] == twins.expected.state_dict()["param_groups"]


@pytest.mark.parametrize("update", ["in_backward", "deferred", "step"])
@pytest.mark.parametrize("name", _MAKE)
def test_groups_weights_and_states_are_those_of_torch(name: str, update: str, tmp_path: Path) -> None:
    with _twins(_MAKE[name], tmp_path, update=update) as twins:
        for step in range(5):
            _counting_step(twins, step)
            assert twins.optimizer.param_groups[0].get("k", step + 1) == step + 1
        _require_equal(twins)


def test_schedule_free_evaluates_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    with _twins(_MAKE["schedule-free"], tmp_path / "drive") as twins:
        engine = twins.engine
        for step in range(3):
            _counting_step(twins, step)
        twins.change(lambda _, optimizer: optimizer.eval())
        _require_equal(twins)
        engine.backward(_counting_loss(0)(engine))
        engine.step()
        with pytest.raises(RuntimeError, match=r"call optimizer\.train"):
            engine.backward(_counting_loss(0)(engine))
        engine.reset()
        _require_equal(twins)
        with torch.no_grad():
            assert torch.equal(_counting_loss(0)(engine.eval()), _counting_loss(0)(twins.plain))
        engine.train()
        engine.save_checkpoint(tmp_path / "saved")
        saved = copy.deepcopy((twins.plain.state_dict(), twins.expected.state_dict()))
        twins.change(lambda _, optimizer: optimizer.train())
        _counting_step(twins, 3)
        _require_equal(twins)
        engine.load_checkpoint(tmp_path / "saved")
        assert twins.optimizer.param_groups[0]["k"] == 3 and not twins.optimizer.param_groups[0]["train_mode"]
        twins.plain.load_state_dict(saved[0])
        twins.expected.load_state_dict(saved[1])
        twins.change(lambda _, optimizer: optimizer.train())
        _counting_step(twins, 3)
        _require_equal(twins)
