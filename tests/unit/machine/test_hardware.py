"""Links, NUMA nodes and heat, from a tree of files as the kernel lays it out; the drive's own log as NVM Express defines it."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infinity.device.host_memory import find_free_memory, free_bytes
from infinity.machine import hardware
from infinity.machine.findings import Verdict, copy_finding, health_finding, link_finding, node_finding
from infinity.machine.hardware import Copies, Health, PciDevice, health, parse_health
from infinity.machine.here import this_machine

_GPU = PciDevice("GPU 0", 0, 2.5, 16, 32.0, 16)
_DRIVE = PciDevice("nvme0n1", 0, 16.0, 4, 16.0, 4)


@pytest.fixture
def sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty sysfs."""
    monkeypatch.setattr(hardware, "SYS", tmp_path)
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def _add_drive(sys: Path, *, speed: str = "16.0 GT/s PCIe") -> None:
    controller = sys / "devices/pci0000:00/0000:01:00.0"
    _write(controller / "current_link_speed", speed)
    _write(controller / "max_link_speed", "16.0 GT/s PCIe")
    _write(controller / "current_link_width", "4")
    _write(controller / "max_link_width", "4")
    _write(controller / "numa_node", "1")
    (controller / "nvme/nvme0/nvme0n1").mkdir(parents=True)
    (sys / "block/nvme0n1").mkdir(parents=True)
    (sys / "block/nvme0n1/device").symlink_to(controller / "nvme/nvme0")
    _write(sys / "class/nvme/nvme0/hwmon3/temp1_input", "71850")


def test_a_drive_is_found_on_its_bus(sys: Path) -> None:
    _add_drive(sys)
    found = hardware.drive_device("nvme0n1")
    assert found == PciDevice("nvme0n1", 1, 16.0, 4, 16.0, 4)
    assert found.words() == "PCIe 16 GT/s x 4 (7.9 GB/s), NUMA node 1"
    assert hardware.drive_device("vda") is None


def test_a_device_whose_link_is_not_told_has_none(sys: Path) -> None:
    _add_drive(sys, speed="Unknown")
    assert hardware.drive_device("nvme0n1") is None


def test_a_slow_link_is_told_with_what_the_device_could_do_but_a_gpu_at_rest_is_not() -> None:
    narrow = link_finding(PciDevice("nvme0n1", None, 8.0, 2, 16.0, 4), is_idle=False)
    assert narrow.verdict is Verdict.POOR and "16 GT/s x 4" in narrow.text and "slot" in narrow.cure
    assert link_finding(_DRIVE, is_idle=False).verdict is Verdict.GOOD
    assert link_finding(_GPU, is_idle=True).verdict is Verdict.GOOD
    assert link_finding(PciDevice("GPU 0", 0, 2.5, 8, 32.0, 16), is_idle=True).verdict is Verdict.POOR


def test_nodes_are_compared_where_there_are_several(sys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_finding([_GPU, _DRIVE]) is None
    for node, processors in ((0, (0, 1, 2, 3, 8)), (1, (4, 5, 6, 7))):
        for processor in processors:
            (sys / f"devices/system/node/node{node}/cpu{processor}").mkdir(parents=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4})
    both = node_finding([_GPU, _DRIVE])
    assert (
        both is not None
        and both.verdict is Verdict.POOR
        and both.cure.startswith("numactl --cpunodebind=0 --membind=0")
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 8})
    near = node_finding([_GPU, _DRIVE])
    assert near is not None and near.verdict is Verdict.GOOD
    far = PciDevice("nvme1n1", 1, 16.0, 4, 16.0, 4)
    told = node_finding([_GPU, _DRIVE, far])
    assert told is not None and told.verdict is Verdict.POOR and "GPU 0 sits on 0, nvme1n1 on 1" in told.text
    unknown = node_finding([PciDevice("vda", None, 8.0, 1, 8.0, 1)])
    assert unknown is not None and unknown.verdict is Verdict.NOTE


def test_heat_is_read_without_rights_and_wear_only_where_the_drive_tells(sys: Path) -> None:
    _add_drive(sys)
    assert health("nvme0n1") == Health(71.85)
    hot = health_finding("nvme0n1")
    assert hot is not None and hot.verdict is Verdict.POOR and "slow down" in hot.cure
    assert health_finding("sda") is None


def test_the_log_of_a_drive_is_read_as_nvm_express_defines_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log = bytearray(512)
    struct.pack_into("<BHBBB", log, 0, 0, 273 + 44, 97, 10, 83)
    assert parse_health(bytes(log)) == Health(44.0, 83, 97)
    monkeypatch.setattr(
        hardware, "_health_log", lambda controller: bytes(log) if controller == Path("/dev/nvme0") else b""
    )
    worn = health_finding("nvme0n1")
    assert worn is not None and worn.verdict is Verdict.POOR and "83 % of the writes" in worn.text


def test_memory_that_cannot_be_pinned_is_told_with_what_it_costs() -> None:
    refused = copy_finding(Copies(8e9, 6e9, 8e9, 6e9, 0.1, "code 2 of cudaHostRegister"))
    assert (
        refused.verdict is Verdict.POOR
        and "block the thread that launches" in refused.text
        and "ulimit" in refused.cure
    )
    assert "50.0 GB/s up" in copy_finding(Copies(50e9, 40e9, 8e9, 6e9, 0.1)).text


def test_a_gpu_that_computes_in_host_memory_shares_one_pool_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(is_integrated=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 40)
    )  # the driver's figure, of which nothing is taken
    machine = this_machine([])
    assert machine.host_free_bytes == machine.device_free_bytes == pytest.approx(free_bytes() / 2, rel=0.05)
    whole, half = (
        find_free_memory(holds_activations=False, all_bytes=100 << 30, is_unified=unified) for unified in (False, True)
    )
    assert half.budget_bytes == pytest.approx(whole.budget_bytes / 2, rel=0.01)
    properties.is_integrated = 0
    assert this_machine([]).device_free_bytes == 1 << 20
