"""Reads NUMA nodes, PCIe links and the health of NVMe drives from sysfs and one ioctl; measures copies to the GPU."""

from __future__ import annotations

import ctypes
import fcntl
import platform
import statistics
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.errors import size

SYS = Path("/sys")
_BYTES_PER_TRANSFER = {2.5: 0.1, 5.0: 0.1}
"""Bytes per transfer of a lane, by GT/s: 8 of 10 bits are data. On faster links it is 128 of 130."""
HOT_CELSIUS = 70.0
"""NVMe drives begin to slow down at 70 to 85."""
# NVME_IOCTL_ADMIN_CMD of <linux/nvme_ioctl.h>: _IOWR('N', 0x41, struct nvme_admin_cmd), a struct of 72 bytes.
# NVMe: Get Log Page (admin command 2) of the log "SMART / Health Information" (2), 512 bytes.
_NVME_ADMIN_COMMAND = 0xC0484E41
_HEALTH_BYTES = 512
# Large enough that the launch of a copy does not count, small enough for a GPU that is nearly full.
COPY_BYTES = 256 << 20


@dataclass(frozen=True)
class PciDevice:
    """A device on the PCIe bus.

    Attributes:
        name: What a message calls it.
        numa_node: The processors' memory that is next to it; None where the machine has one node.
        gigatransfers: Of its link's lanes a second, as it is now: at rest, links of GPUs go slower.
        lanes: Of its link.
        most_gigatransfers, most_lanes: What the device could do.
    """

    name: str
    numa_node: int | None
    gigatransfers: float
    lanes: int
    most_gigatransfers: float
    most_lanes: int

    def words(self) -> str:
        """Return its link and node: ``"PCIe 16 GT/s x 4 (7.9 GB/s), NUMA node 0"``."""
        node = "" if self.numa_node is None else f", NUMA node {self.numa_node}"
        return f"PCIe {link_words(self.gigatransfers, self.lanes)}{node}"


@dataclass(frozen=True)
class Health:
    """The health log of an NVMe drive. None: not reported, or not to this user."""

    celsius: float | None = None
    used_percent: int | None = None
    """Share of its rated writes that is used up; may exceed 100."""
    spare_percent: int | None = None
    """Share of the spare blocks that is left."""


def link_words(gigatransfers: float, lanes: int) -> str:
    return f"{gigatransfers:g} GT/s x {lanes} ({size(link_rate(gigatransfers, lanes))}/s)"


def link_rate(gigatransfers: float, lanes: int) -> float:
    """Return the bytes per second of a link in each direction."""
    # Example: 16 GT/s x 4 lanes: 16e9 * 4 * 128/130 bits = 63e9 bits, 7.9 GB/s. 2.5 and 5 GT/s send 8 of 10 bits: 0.1
    # bytes per transfer.
    return gigatransfers * 1e9 * lanes * _BYTES_PER_TRANSFER.get(gigatransfers, 128 / 130 / 8)


def pci_device(name: str, folder: Path) -> PciDevice | None:
    """Return the PCIe device at a folder of sysfs or at its nearest parent; None without one."""
    # sysfs nests devices: .../0000:00:01.0/0000:01:00.0/nvme/nvme0/nvme0n1. The first folder upwards with a link speed
    # is the PCIe device.
    here = folder.resolve()
    place = next((each for each in (here, *here.parents) if (each / "current_link_speed").is_file()), None)
    if place is None:
        return None
    try:
        speeds = [float(text_of(place / f"{which}_link_speed").split()[0]) for which in ("current", "max")]
        lanes = [int(text_of(place / f"{which}_link_width")) for which in ("current", "max")]
        node = int(text_of(place / "numa_node") or "-1")
    except (ValueError, IndexError):  # "Unknown": a virtual device
        return None
    # -1: the machine has one node, or its firmware names none.
    return PciDevice(name, node if node >= 0 else None, speeds[0], lanes[0], speeds[1], lanes[1])


def text_of(path: Path) -> str:
    """Return the text of a file of sysfs; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def drive_device(block_device: str) -> PciDevice | None:
    """Return the PCIe device of a drive such as ``"nvme0n1"``."""
    return pci_device(block_device, SYS / "block" / block_device / "device")


def gpu_devices() -> list[PciDevice]:
    """Return the PCIe devices of the GPUs that torch sees, as far as sysfs has them."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        domain, bus, device = (getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
        if bus is None:  # a build of torch that does not tell
            continue
        # sysfs spells a PCI address in hexadecimal: domain:bus:device.function, as in 0000:3b:00.0.
        address = f"{domain or 0:04x}:{bus:02x}:{device or 0:02x}.0"
        found.append(pci_device(f"GPU {index}", SYS / "bus/pci/devices" / address))
    return [each for each in found if each is not None]


def processors_of(node: int) -> set[int]:
    """Numbers of a node's processors, each of which has a folder there."""
    folders = (SYS / f"devices/system/node/node{node}").glob("cpu[0-9]*")
    return {int(folder.name.removeprefix("cpu")) for folder in folders}


def health(block_device: str) -> Health:
    """Return temperature and wear of an NVMe drive. Wear comes from the drive itself, which only root may ask."""
    if not block_device.startswith("nvme"):
        return Health()
    controller = block_device[: block_device.index("n", 4)]  # nvme0n1 -> nvme0
    # hwmon gives thousandths of a degree, to every user. The drive's own log has wear as well, and needs root.
    sensors = sorted((SYS / "class/nvme" / controller).glob("hwmon*/temp1_input"))
    celsius = next((int(text) / 1000 for each in sensors if (text := text_of(each)).lstrip("-").isdigit()), None)
    try:
        log = _health_log(Path("/dev") / controller)
    except OSError:
        return Health(celsius)
    return parse_health(log, celsius)


def parse_health(log: bytes, celsius: float | None = None) -> Health:
    """Read the log page as NVM Express defines it: kelvin at byte 1, spare at 3, used at 5."""
    # 0: not reported.
    kelvin = struct.unpack_from("<H", log, 1)[0]
    return Health(kelvin - 273.0 if kelvin else celsius, log[5], log[3])


def _health_log(controller: Path) -> bytes:
    log = ctypes.create_string_buffer(_HEALTH_BYTES)
    # The NVMe command counts 4-byte words, and counts from 0: 127 for 512 bytes.
    number_of_dwords = _HEALTH_BYTES // 4 - 1
    # struct nvme_admin_cmd: opcode, flags, rsvd1, nsid, cdw2, cdw3, metadata; addr, metadata_len, data_len, cdw10 to
    # cdw15, timeout_ms, result. nsid 0xFFFFFFFF asks for the whole controller; cdw10 has the number of words and the
    # log's id.
    command = struct.pack(
        "<BBHIIIQQIIIIIIIIII",
        *(2, 0, 0, 0xFFFFFFFF, 0, 0, 0),
        *(ctypes.addressof(log), 0, _HEALTH_BYTES, number_of_dwords << 16 | 2, 0, 0, 0, 0, 0, 0, 0),
    )
    with open(controller, "rb", buffering=0) as device:
        fcntl.ioctl(device, _NVME_ADMIN_COMMAND, command)
    return log.raw


def is_wsl() -> bool:
    """Whether this is Linux inside Windows, whose driver pins little memory."""
    return "microsoft" in platform.release().lower()


@dataclass(frozen=True)
class Copies:
    """Bytes per second between host and GPU.

    Attributes:
        up, down: From and to memory that is registered with the driver (pinned), as staging memory is.
        pageable_up, pageable_down: From and to other memory.
        register_seconds: For registering `COPY_BYTES`.
        refused: What the driver said where it registers none; up and down then are those of other memory.
    """

    up: float
    down: float
    pageable_up: float
    pageable_down: float
    register_seconds: float
    refused: str = ""


def measure_copies() -> Copies:
    """Copy 256 MiB up and down the current GPU, five times each. Takes half a second.

    Raises:
        RuntimeError: The GPU has no room for them.
    """
    # Pageable memory first: registering pins the pages of `here` in place.
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cpu")
    up, down = _copy_rate(there, here), _copy_rate(here, there)
    runtime: Any = torch.cuda.cudart()
    began = time.perf_counter()
    # The call that the engine pins its staging memory with. torch's pin_memory would allocate other memory.
    code = int(runtime.cudaHostRegister(here.data_ptr(), COPY_BYTES, 0))
    took = time.perf_counter() - began
    if code:
        return Copies(up, down, up, down, took, f"code {code} of cudaHostRegister")
    try:
        return Copies(_copy_rate(there, here), _copy_rate(here, there), up, down, took)
    finally:
        # A copy may still be under way after an error: its memory must stay registered until then.
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(here.data_ptr())


def _copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return target.nbytes / statistics.median(taken)
