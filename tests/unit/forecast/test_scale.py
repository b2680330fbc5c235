"""Forecasts for many ranks: what a rank holds, sends and takes, by the formulas of the ZeRO papers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from infinity.cli.main import main
from infinity.forecast.ladder import OFFLOADS, Ladder
from infinity.forecast.machine import Machine
from infinity.forecast.scale import NETWORK, Cluster, Scale, Scaled
from infinity.io_profile.model import read_model
from infinity.planning.bandwidth_cache import Bandwidth

pytestmark = pytest.mark.deep

_SPEED = Bandwidth(4e9, 3e9, 5e9, "2026-01-01")
_GPUS = Machine(2 * 10**15, 10**16, 10**12, _SPEED, flops_per_second=1e14)
_CPUS = Machine(64 * 10**9, 10**12, None, _SPEED, flops_per_second=1e12)


def _model(text: str = "1b") -> nn.Module:
    return read_model(text)[1]


def _config(param: str, optimizer: str, **more: Any) -> dict[str, Any]:
    zero = {"stage": 3}
    for name, tier in (("offload_param", param), ("offload_optimizer", optimizer)):
        zero[name] = {"device": tier, "nvme_path": "/"} if tier == "nvme" else {"device": tier}  # type: ignore[assignment]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": zero,
        **more,
    }


def _scale(cluster: Cluster, config: Any = None, model: nn.Module | None = None) -> Scale:
    return Scale(model or _model(), config, cluster, ["/"], 4096)


def _rests(scaled: Scaled) -> int:
    assert scaled.outcome.plan is not None, scaled.outcome.problem
    return sum(scaled.outcome.plan.states_bytes.values())


@pytest.mark.parametrize("machine", [_GPUS, _CPUS], ids=["gpu", "cpu"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_rank_is_todays_plan(machine: Machine, stage: int) -> None:
    model = _model("300m")
    found = _scale(Cluster(machine, 8, link_bytes_per_second=1e9, network_bytes_per_second=1e9), None, model)
    known = list(Ladder(model, None, machine, ["/"], 4096).rungs())
    for told, scaled in zip(known, found.choices(stage, 1), strict=True):
        assert scaled.outcome.plan == told.plan and scaled.outcome.fits == told.fits
        assert scaled.time is not None and scaled.time.overlapped_seconds == pytest.approx(told.seconds)
        assert scaled.sent_bytes == 0


def test_memory_of_a_rank_is_that_of_the_zero_paper() -> None:
    """arXiv 1910.02054: 7.5e9 parameters, 64 ranks, K = 12. Its 2 bytes of gradients are left out: those of ranks do not rest.

    One process alone keeps them on the GPU, as fp32.
    """
    psi, num, k, gradients = 7.5e9, 64, 12, 4
    config = _config("none", "none", infinity={"main_weights": "fp32"})
    scale = _scale(Cluster(_GPUS, 8), config, _model("7.5b"))
    expected = {0: (2 + k) * psi, 1: 2 * psi + k * psi / num, 2: 2 * psi + k * psi / num, 3: (2 + k) * psi / num}
    for stage, num_bytes in expected.items():
        assert _rests(scale.taken(stage, num)) == pytest.approx(num_bytes, rel=0.02), stage
        assert _rests(scale.taken(stage, 1)) == pytest.approx((2 + k + gradients) * psi, rel=0.02)


def test_drives_fall_as_1_over_n_for_what_the_stage_divides() -> None:
    scale = _scale(
        Cluster(_CPUS, 1), _config("nvme", "nvme", infinity={"host_memory_budget": "3GB", "keep_in_memory": False})
    )
    plans = {(stage, num): scale.taken(stage, num).outcome.plan for stage in (0, 1, 3) for num in (1, 4)}
    for (stage, num), plan in plans.items():
        assert plan is not None
        whole = plans[stage, 1]
        assert whole is not None
        divided = {0: (), 1: ("remainders", "states"), 3: ("weights", "remainders", "states")}[stage]
        for kind, num_bytes in whole.resting_bytes["nvme"].items():
            part = num if kind in divided else 1
            if kind != "gradients":
                assert plan.resting_bytes["nvme"][kind] == pytest.approx(num_bytes / part, rel=0.02)


def test_what_is_sent_is_the_papers_volume() -> None:
    """Twice the model in stages 1 and 2, and in stage 3 a half more; our gradients are fp32, so 4 bytes."""
    scale = _scale(Cluster(_GPUS, 8), _config("none", "none"))
    numel = scale.taken(0, 1).outcome.plan.num_parameters  # type: ignore[union-attr]
    for stage, per_parameter in ((0, 8), (1, 4 + 2), (2, 4 + 2), (3, 4 + 2 * 2)):
        for num in (2, 8, 512):
            sent = scale.taken(stage, num).sent_bytes
            assert sent == pytest.approx(per_parameter * numel * (num - 1) / num, rel=1e-3)
    many = _scale(
        Cluster(_GPUS, 8), _config("none", "none", gradient_accumulation_steps=4, infinity={"schedule": "ordinary"})
    )
    assert many.taken(3, 8).sent_bytes == pytest.approx((4 + 4 * 4) * numel * 7 / 8, rel=1e-3)
    assert many.taken(1, 8).sent_bytes == scale.taken(1, 8).sent_bytes


@pytest.mark.parametrize(("group", "crosses"), [(2, False), (8, False), (16, True)])
def test_weights_divided_within_groups_are_fetched_inside_them(group: int, crosses: bool) -> None:
    config = _config("none", "none")
    config["zero_optimization"]["zero_hpz_partition_size"] = group
    cluster = Cluster(_GPUS, 8, network_bytes_per_second=1e10)
    found, plain = _scale(cluster, config).taken(3, 32), _scale(cluster, _config("none", "none")).taken(3, 32)
    numel = found.outcome.plan.num_parameters  # type: ignore[union-attr]
    fetched, means, given = 2 * 2 * (group - 1) / group, 4 * 31 / 32, 2 * (32 / group - 1) / 32
    assert found.sent_bytes == pytest.approx((fetched + means + given) * numel, rel=1e-3)
    assert found.network_bytes == pytest.approx((means + given + fetched * crosses) * numel, rel=1e-3)
    assert plain.network_bytes == plain.sent_bytes
    assert found.time is not None and plain.time is not None
    assert found.time.busy_seconds[NETWORK] == pytest.approx(found.network_bytes / 1e10)
    alone = _scale(cluster, config).taken(3, 2)  # fewer than a group
    assert alone.sent_bytes == _scale(cluster, _config("none", "none")).taken(3, 2).sent_bytes
    assert alone.network_bytes == 0


@pytest.mark.parametrize("link", ["link", "network", "pcie"])
def test_a_link_of_half_the_speed_lowers_efficiency_as_the_formula_says(link: str) -> None:
    config = _config("cpu", "cpu")
    times = []
    for speed in (None, 2e9, 1e9):
        cluster = dataclasses.replace(Cluster(_GPUS, 8), **{f"{link}_bytes_per_second": speed})
        scaled = _scale(cluster, config).taken(1, 16)
        assert scaled.time is not None
        times.append(scaled.time)
    free, fast, slow = times
    assert free.efficiency == free.overlapped_efficiency == 1
    assert slow.communication_seconds == pytest.approx(2 * fast.communication_seconds)
    share = fast.communication_seconds / fast.compute_seconds
    assert fast.efficiency == pytest.approx(1 / (1 + share)) and slow.efficiency == pytest.approx(1 / (1 + 2 * share))


def test_drives_add_up_with_the_nodes() -> None:
    """Bandwidth-centric partitioning: of twice the nodes, each rank reads and writes half, at its own speed."""
    config = _config("none", "nvme", infinity={"host_memory_budget": "20GB", "keep_in_memory": False})
    scale = _scale(Cluster(_CPUS, 1), config)
    busy = [scale.taken(3, num).time.busy_seconds["drives"] for num in (1, 2, 4, 8)]  # type: ignore[union-attr]
    for one, two in itertools.pairwise(busy):
        assert two == pytest.approx(one / 2, rel=0.03)
    shared = _scale(Cluster(_CPUS, 8), config).taken(3, 8)
    assert shared.num_nodes == 1
    crowded = Cluster(_CPUS, 8).share(8)
    assert crowded.host_free_bytes == _CPUS.host_free_bytes // 8
    assert crowded.bandwidth is not None and crowded.bandwidth.read_bytes_per_second == 4e9 / 8


def test_an_offload_can_be_asked_for() -> None:
    cluster, model = Cluster(_GPUS, 8), _model("100m")
    choices = list(_scale(cluster, None, model).choices(3, 4))
    names = [f"{each.outcome.param_tier}/{each.outcome.optimizer_tier}" for each in choices]
    assert names == list(OFFLOADS)
    for name, each in zip(names, choices, strict=True):
        asked = Scale(model, None, cluster, ["/"], 4096, name).taken(3, 4)
        assert asked.outcome.plan == each.outcome.plan and asked.time == each.time


_DESCRIBED = ["--ram", "100GB", "--disk", "4TB", "--drive-speed", "8GB", "--gpu", "40GB", "--tflops", "100"]


@pytest.mark.deep
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "scale.svg"
    arguments = ["plan", "--params", "3b", "--scale", "--stage", "1", "--stage", "3", *_DESCRIBED, "--network", "10GB"]
    assert main([*arguments, "--gpus-per-node", "4", "--plot", str(plot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["num_gpus"] for row in found["rows"]] == [1 << power for power in range(10)] * 2
    assert [row["num_nodes"] for row in found["rows"]][:4] == [1, 1, 1, 2]
    for row in found["rows"]:
        assert row["fits"] and 0 < row["efficiency"] <= row["efficiency_with_overlap"] <= 1
        assert row["tokens_per_second"] == pytest.approx(2048 * row["num_gpus"] / row["step_seconds"])
        assert row["step_seconds"] <= row["step_seconds_without_overlap"]
    assert any("Stage 3" in note for note in found["notes"])
    assert "stage 1" in plot.read_text() and "<svg" in plot.read_text()


def test_the_table_says_where_there_is_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    described = ["--ram", "1GB", "--disk", "1GB", "--drive-speed", "8GB", "--gpu", "400MB", "--tflops", "100"]
    arguments = ["plan", "--params", "2b", "--scale", "--stage", "1", *described]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert out.count("no room") == 10 and "Does not fit (stage 1, 1 GPU)" in out and "Stage 3" not in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--stage", "3"], "--stage: what it says is of several GPUs. Add --scale"),
        (["--offload", "none/cpu"], "--offload: what it says is of several GPUs"),
        (["--plot", "a.svg"], "Add --scale"),
        (["--scale", "--offload", "cpu/none"], "cpu/none"),
        (["--scale", "--plot", "a.pdf"], "ends in .png or .svg"),
        (["--scale", "--plot", "missing/a.svg"], "no directory that can be written to"),
        (["--scale", "--largest"], "two questions"),
        (["--scale", "--stage", "4"], "4"),
        (["--scale", "--gpus-per-node", "0"], "0"),
        (["--scale", "--link", "fast"], "fast"),
        (["--scale", "--ram", "10GB"], "add --tflops"),
    ],
)
def test_bad_input(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "10m", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1
