"""Two machines: namespaces of the network with addresses of their own, volumes of their own, and a directory that both see."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import infinity
from infinity.errors import RankError
from tests.ranks import require_ranks, run_ranks
from tests.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[2]
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_LIMIT_SECONDS = 500
_SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import infinity

shared, volume, hangs_in = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1))
torch.manual_seed(int(os.environ["RANK"]))
nvme = {"device": "nvme", "nvme_path": volume}
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme},
    "infinity": {"progress_bars": False},
}
data = [(torch.full((32,), i / 8.0), torch.zeros(1)) for i in range(24)]
engine, _, loader, _ = infinity.initialize(model=model, config=config, training_data=data)
engine.load_checkpoint(shared / "saved", missing_ok=True)
began = engine.global_steps
for x, y in loader:
    engine.backward(torch.nn.functional.mse_loss(engine(x), y))
    if engine.global_steps == hangs_in and infinity.deepspeed.comm.get_rank() == 1:
        (shared / "hangs").touch()
        time.sleep(600)
    engine.step()
    engine.save_checkpoint(shared / "saved", keep_last=1)
torch.save([began, engine.module.state_dict()], shared / f"end {infinity.deepspeed.comm.get_rank()}")
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that reach each other."""
    if shutil.which("ip") is None:
        pytest.skip("there is no command ip here, which makes namespaces of the network")
    names = f"infinity-{os.getpid()}-a", f"infinity-{os.getpid()}-b"
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "net0", "netns", names[0], "type", "veth", "peer", "name", "net0", "netns", names[1])
        for name, address in zip(names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "net0")
            for link in ("lo", "net0"):
                _ip("-n", name, "link", "set", link, "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespaces of the network can be made here: {getattr(error, 'stderr', error)}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _start(machine: str, shared: Path, volume: Path, hangs_in: int, *options: str) -> subprocess.Popen[str]:
    volume.mkdir(exist_ok=True)
    (shared / "train.py").write_text(_SCRIPT)
    torchrun = ["ip", "netns", "exec", machine, sys.executable, "-m", "torch.distributed.run"]
    script = [shared / "train.py", shared, volume, hangs_in]
    environment = {"PYTHONPATH": str(_ROOT), "GLOO_SOCKET_IFNAME": "net0", "OMP_NUM_THREADS": "1"}
    environment["TMPDIR"] = str(volume)  # torchrun leaves its logs there
    return subprocess.Popen(
        [*torchrun, *options, f"--master-addr={_ADDRESSES[0]}", "--master-port=29577", *map(str, script)],
        env=os.environ | environment,
        text=True,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _kill(running: subprocess.Popen[str]) -> None:
    """End torchrun and what it has started, which is in sessions of its own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in (
            *psutil.Process(running.pid).children(recursive=True),
            running,
        ):  # found before they lose their parent
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                os.kill(each.pid, signal.SIGKILL)


@pytest.mark.deep
def test_one_machine_is_lost_and_the_other_goes_on(
    machines: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, whole = tmp_path / "shared", tmp_path / "whole"
    shared.mkdir()
    whole.mkdir()
    both = [
        _start(
            machine, shared, tmp_path / f"volume{rank}", 3, "--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}"
        )
        for rank, machine in enumerate(machines)
    ]
    try:
        wait_until((shared / "hangs").exists)
        _kill(both[1])
        _, said = both[0].communicate(timeout=_LIMIT_SECONDS)
        assert both[0].returncode != 0
        assert "RankError" in said, said
    finally:
        for running in both:
            _kill(running)
            running.communicate()
    alone = _start(machines[0], shared, tmp_path / "volume0", -1, "--nnodes=1", "--nproc-per-node=2")
    try:
        _, said = alone.communicate(timeout=_LIMIT_SECONDS)
        assert alone.returncode == 0, said
    finally:
        _kill(alone)
        alone.communicate()

    monkeypatch.setattr(sys, "argv", ["train.py", str(whole), str(whole), "-1"])
    require_ranks(2, lambda rank: exec(_SCRIPT, {"__name__": "__main__"}), tmp_path)
    for rank in range(2):
        began, weights = torch.load(shared / f"end {rank}")
        assert began == 3
        for name, value in torch.load(whole / f"end {rank}")[1].items():
            assert torch.equal(weights[name], value), name


# ------------------------------------------------------------------------------------- nobody waits longer than the timeout

_TIMEOUT = timedelta(seconds=30)
_FAR_LONGER_SECONDS = 300
"""Than the timeout and what telling of the error may take; without an end, TCP alone waits for 900 seconds."""


def _enter(machine: str) -> None:
    """This process is in that namespace from now on."""
    with open(f"/run/netns/{machine}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def _joined_at(machines: tuple[str, str]) -> Callable[[int], None]:
    """Rank 0, which holds the store, is on the first machine; ranks 1 and 2 are on the second one."""

    def join(rank: int) -> None:
        _enter(machines[min(rank, 1)])
        os.environ["GLOO_SOCKET_IFNAME"] = "net0"
        infinity.init_distributed(timeout=_TIMEOUT, init_method=f"tcp://{_ADDRESSES[0]}:29578", rank=rank, world_size=3)

    return join


def _steps_until_error(ready: Path, rank: int, event: Callable[[], None], lost: int | None = None) -> RankError:
    """Train, and after the first steps let rank 2 bring about the event. Returns what this rank gets then.

    It returns when all have theirs but rank ``lost``, which is killed then.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }
    engine = infinity.initialize(model=torch.nn.Linear(8, 8), config=config)[0]

    def step() -> None:
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()

    step()
    (ready / f"{rank} {os.getpid()}").touch()
    wait_until(lambda: len([*ready.iterdir()]) >= 3)
    if rank == 2:
        event()
        (ready / "over").touch()
    wait_until((ready / "over").exists)
    signal.alarm(_FAR_LONGER_SECONDS)  # ends the process, which `run_ranks` tells of
    with pytest.raises(RankError) as error:
        step()
    sys.excepthook(type(error.value), error.value, None)  # as Python does, which asks the store again
    signal.alarm(0)
    (ready / f"done {rank}").touch()
    wait_until(lambda: all((ready / f"done {other}").exists() for other in range(3) if other != lost))
    if lost is not None and rank == 2:
        os.kill(_process_of(ready, lost), signal.SIGKILL)
    return error.value


def _process_of(ready: Path, rank: int) -> int:
    return next(int(name.name.split()[1]) for name in ready.iterdir() if name.name.startswith(f"{rank} "))


@pytest.mark.deep
def test_a_cut_link_leaves_nobody_waiting(machines: tuple[str, str], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()

    def train(rank: int) -> None:
        error = _steps_until_error(ready, rank, lambda: _ip("-n", machines[1], "link", "set", "net0", "down"))
        if rank:
            assert "The process group's store does not answer: the network is cut" in str(error)

    assert run_ranks(3, train, tmp_path, _joined_at(machines)) == ["", "", ""]


@pytest.mark.deep
def test_a_stopped_rank_is_named_by_its_machine(machines: tuple[str, str], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()

    def train(rank: int) -> None:
        error = _steps_until_error(ready, rank, lambda: os.kill(_process_of(ready, 1), signal.SIGSTOP), lost=1)
        if rank == 2:
            assert re.search(r"the process of rank 1 \(\d+\) is stopped, by a signal", str(error))

    assert run_ranks(3, train, tmp_path, _joined_at(machines)) == ["", "it was killed", ""]


@pytest.mark.deep
def test_a_stopped_rank_that_holds_the_store_leaves_nobody_waiting(machines: tuple[str, str], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()

    def train(rank: int) -> None:
        error = _steps_until_error(ready, rank, lambda: os.kill(_process_of(ready, 0), signal.SIGSTOP), lost=0)
        assert "The process group's store does not answer" in str(error)

    assert run_ranks(3, train, tmp_path, _joined_at(machines)) == ["it was killed", "", ""]


@pytest.mark.deep
def test_a_link_that_is_cut_in_the_rendezvous_leaves_nobody_waiting(machines: tuple[str, str], tmp_path: Path) -> None:
    def join(rank: int) -> None:
        _enter(machines[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = "net0"
        if rank == 0:
            store = torch.distributed.TCPStore(_ADDRESSES[0], 29579, 2, is_master=True, wait_for_workers=False)
            wait_until(lambda: store.check(["here"]))
            _ip("-n", machines[1], "link", "set", "net0", "down")
            wait_until((tmp_path / "over").exists)
            return
        store = torch.distributed.TCPStore(_ADDRESSES[0], 29579, 2, is_master=False)
        store.set("here", "")
        signal.alarm(_FAR_LONGER_SECONDS)
        try:
            with pytest.raises(RankError, match="the processes do not reach each other"):
                infinity.init_distributed(
                    timeout=timedelta(seconds=5), init_method=f"tcp://{_ADDRESSES[0]}:29579", rank=rank, world_size=2
                )
        finally:
            (tmp_path / "over").touch()

    assert run_ranks(2, lambda rank: None, tmp_path, join) == ["", ""]
