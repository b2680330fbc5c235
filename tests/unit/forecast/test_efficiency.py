"""The efficiency model: its limits, and what the ZeRO-Infinity paper says with it and measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from infinity.forecast.efficiency import COMPUTE, StepTime

_README = Path(__file__).resolve().parents[3] / "infinity/cli/README.md"


def _step(intensity: float, bytes_per_second: float, flops_per_second: float = 70e12) -> StepTime:
    """One that computes so many operations for each byte of one kind, which goes over one link."""
    num_bytes = 1e12
    compute = intensity * num_bytes / flops_per_second
    return StepTime(compute, {"kind": {"link": num_bytes / bytes_per_second}})


def _of_weights(samples: float, sequence: int = 1024) -> float:
    return sequence * samples


def _of_states(samples: float, sequence: int = 1024) -> float:
    return sequence * samples / 4


def _of_activations(hidden: int, interval: int = 1) -> float:
    return 24 * hidden * interval


def test_an_infinite_bandwidth_gives_efficiency_1() -> None:
    step = _step(1000, float("inf"))
    assert step.efficiency == step.overlapped_efficiency == 1
    assert step.seconds == step.overlapped_seconds == step.compute_seconds
    assert step.bound_by == COMPUTE


@pytest.mark.parametrize("bandwidth", [1e9, 7e10, 1e13])
def test_it_is_the_papers_formula(bandwidth: float) -> None:
    """arXiv 2104.07857, section 4: intensity * bandwidth / (intensity * bandwidth + peak)."""
    for slower in (1, 2, 4):
        step = _step(1024, bandwidth / slower)
        reached = 1024 * bandwidth / slower
        assert step.efficiency == pytest.approx(reached / (reached + 70e12))
        assert step.overlapped_efficiency == pytest.approx(min(1, reached / 70e12))


def test_of_one_kind_the_slowest_link_counts_and_kinds_add_up() -> None:
    step = StepTime(10.0, {"weights": {"drives": 3.0, "PCIe": 5.0}, "states": {"drives": 4.0}})
    assert step.communication_seconds == 9 and step.seconds == 19
    assert step.busy_seconds == {COMPUTE: 10, "drives": 7, "PCIe": 5} and step.overlapped_seconds == 10
    assert StepTime(1.0, step.kinds).bound_by == "drives"
    assert StepTime(0.0, {}).efficiency == StepTime(0.0, {}).overlapped_efficiency == 1


def test_what_the_paper_derives_from_it() -> None:
    """Section 4.2, with 70 TFLOP/s per GPU and sequences of 1024."""
    assert _step(_of_weights(1), 70e9).efficiency > 0.5
    assert _step(_of_states(2), 1.5e12).efficiency > 0.9
    assert _of_weights(1) / _of_states(1) == 4  # so states need four times the bandwidth
    assert _step(_of_activations(2048), 2e9).efficiency > 0.5
    assert _step(_of_activations(8192), 1e9).efficiency > 0.5


# ------------------------------------------------------------------------------------------------------ what was measured

_GPUS_OF_A_NODE, _SEQUENCE = 16, 1024
_LINK = 70e9
"""Between GPUs of the cluster, each, as the authors' slides say (SC 2021), and of the drives of a node:"""
_DRIVES = 28e9


@dataclass(frozen=True)
class _Published:
    """A run of the paper: parameters, GPUs, samples of a GPU, GPUs that split a layer, where all rests, TFLOP/s per GPU."""

    parameters: float
    num_gpus: int
    samples: float
    split: int
    on_drives: bool
    tflops: float

    @property
    def flops(self) -> float:
        """Of a GPU in a step, with the forward done twice."""
        return 8 * self.samples * _SEQUENCE * self.parameters

    def kinds(self) -> dict[str, dict[str, float]]:
        drives = _DRIVES * self.num_gpus / _GPUS_OF_A_NODE
        weights = {"link": 8 * self.parameters / self.split / _LINK}
        if not self.on_drives:
            return {"weights": weights}
        weights["drives"] = 8 * self.parameters / drives
        return {"weights": weights, "states": {"drives": 32 * self.parameters / drives}}

    def predicted(self, peak: float) -> float:
        """TFLOP/s per GPU where nothing overlaps, for GPUs that reach so many."""
        return peak * StepTime(self.flops / peak / 1e12, self.kinds()).efficiency


_SIZES = [
    _Published(0.5e12, 512, 7, 4, on_drives=False, tflops=46),
    _Published(1e12, 512, 5, 4, on_drives=False, tflops=49),
    _Published(5e12, 512, 3, 4, on_drives=True, tflops=44),
    _Published(10e12, 512, 2, 4, on_drives=True, tflops=43),
    _Published(20e12, 512, 1.25, 8, on_drives=True, tflops=37),
]
"""TFLOP/s: the bars of the slides, to 0.5. Samples and splits: the paper's table of experiments, from memory."""
_NODES = [
    _Published(1e12, num_gpus, 5, 4, on_drives=True, tflops=tflops)
    for num_gpus, tflops in ((64, 44), (128, 49), (256, 46), (512, 49))
]
"""2.8, 6.2, 11.8 and 25.0 PFLOP/s, the points of the slides. How many samples is not known to us: those of above."""


def _peak() -> float:
    """TFLOP/s that a GPU would reach without communication, so that 1T on 512 GPUs comes out as measured."""
    known = _SIZES[1]
    waiting = sum(max(links.values()) for links in known.kinds().values())
    return 1 / (1 / known.tflops - waiting * 1e12 / known.flops)


def test_sizes_on_512_gpus_come_out_as_published() -> None:
    peak = _peak()
    assert 49 < peak < 70, "a GPU reaches 70 TFLOP/s at best, says the paper"
    assert _SIZES[1].predicted(peak) == pytest.approx(49)
    for published in _SIZES:
        assert published.predicted(peak) == pytest.approx(published.tflops, rel=0.12)
    found = [published.predicted(peak) for published in _SIZES]
    assert found[1] > found[2] > found[3] > found[4]


def test_one_trillion_scales_superlinearly() -> None:
    found = [published.predicted(_peak()) for published in _NODES]
    assert found == sorted(found) and found[-1] > 1.1 * found[0]
    for published, value in zip(_NODES, found, strict=True):
        assert value == pytest.approx(published.tflops, rel=0.25)


def test_the_page_shows_these_numbers() -> None:
    rows = re.findall(r"^\| ([0-9.]+)T, (\d+) GPUs \| ([0-9.]+) \| ([0-9.]+) \|", _README.read_text(), re.MULTILINE)
    shown = [(float(size), int(num), float(ours), float(theirs)) for size, num, ours, theirs in rows]
    peak = _peak()
    assert shown == [
        (each.parameters / 1e12, each.num_gpus, round(each.predicted(peak)), each.tflops) for each in [*_SIZES, *_NODES]
    ]
    assert f"{peak:.0f} TFLOP/s" in _README.read_text()
