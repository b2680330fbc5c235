"""Process groups: as a script or a launcher says, those that are made of them, and DeepSpeed's names for what they do."""

from __future__ import annotations

import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import infinity
from infinity.deepspeed import comm
from infinity.deepspeed.runtime.utils import see_memory_usage
from infinity.deepspeed.utils import log_dist, logger
from infinity.distributed.process_groups import local_rank
from infinity.errors import ConfigError, RankError
from tests.internals import world
from tests.ranks import on_ranks, run_ranks


@on_ranks(2)
def test_a_script_says_how_its_processes_find_each_other(rank: int, tmp_path: Path) -> None:
    """As those of torch.multiprocessing.spawn do, with DeepSpeed's arguments in DeepSpeed's order."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    store, timeout = f"file://{tmp_path}/another store", timedelta(seconds=400)
    infinity.init_distributed("gloo", True, 29500, False, timeout, store, None, None, rank, 2)
    assert (comm.get_rank(), comm.get_world_size()) == (rank, 2)
    assert _timeout_of(dist.group.WORLD) == timeout
    assert world().num == 2


def test_a_backend_and_a_timeout_count_for_one_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # without a GPU nccl has nothing to do

    def join(rank: int) -> None:
        dist.destroy_process_group()
        infinity.init_distributed("nccl", timeout=timedelta(seconds=400))
        assert dist.get_backend() == "gloo"
        assert _timeout_of(dist.group.WORLD) == timedelta(seconds=400)

    assert run_ranks(1, join, tmp_path) == [""]


@on_ranks(1)
def test_processes_that_do_not_reach_each_other_name_the_interface(rank: int, tmp_path: Path) -> None:
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch"
    with pytest.raises(RankError, match=r"nosuch.* set GLOO_SOCKET_IFNAME"):
        infinity.init_distributed("gloo")


def _timeout_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("OMPI_COMM_WORLD_SIZE", "mpirun"),
        ("PMI_SIZE", "mpirun"),
        ("MV2_COMM_WORLD_SIZE", "mpirun"),
        ("SLURM_STEP_NUM_TASKS", "srun"),
    ],
)
def test_processes_of_mpirun_do_not_train_alone(name: str, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    infinity.deepspeed.comm.destroy_process_group()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, "4")
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD"}}
    for begin in (infinity.init_distributed, lambda: infinity.initialize(model=nn.Linear(2, 2), config=config)):
        with pytest.raises(ConfigError, match=rf"{launcher} has started 4 processes \({name}\).* with torchrun"):
            begin()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert infinity.deepspeed.comm.get_world_size() == 1
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv(name, "1")
    assert infinity.deepspeed.comm.get_world_size() == 1


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "MASTER_PORT", "PMI_SIZE", "LOCAL_RANK"])
def test_variables_that_are_no_numbers_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    infinity.deepspeed.comm.destroy_process_group()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    told = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"} if name == "MASTER_PORT" else {}
    for each, value in {**told, name: "4(x2)"}.items():
        monkeypatch.setenv(each, value)
    begin = local_rank if name == "LOCAL_RANK" else infinity.init_distributed
    with pytest.raises(ConfigError, match=rf"{name} = '4\(x2\)': must be a whole number"):
        begin()


@pytest.mark.parametrize(("name", "value"), [("RANK", "2"), ("MASTER_PORT", "65536")])
def test_a_rank_and_a_port_that_cannot_be_are_refused_at_once(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    infinity.deepspeed.comm.destroy_process_group()
    told = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", name: value}
    for each in told:
        monkeypatch.setenv(each, told[each])
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        infinity.init_distributed()


@on_ranks(2)
def test_a_script_may_begin_in_another_thread(rank: int, tmp_path: Path) -> None:
    """Where torchrun has started it: only the main thread may listen to signals."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TORCHELASTIC_RUN_ID"] = "a test"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(world).result().num == 2


def test_messages_are_those_of_the_ranks_that_they_are_for(tmp_path: Path) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    def say(rank: int) -> None:
        logger.handlers[:] = [Keep()]
        for ranks in ([0], [1], [0, 1], [-1], None):
            log_dist(str(ranks), ranks=ranks)
        own = [str(ranks) for ranks in ([rank], [0, 1], [-1], None)]
        assert lines == [f"[Rank {rank}] {each}" for each in own]
        see_memory_usage("memory", force=True)
        assert len(lines) == len(own) + (rank == 0)

    assert run_ranks(2, say, tmp_path) == ["", ""]


def test_exchanges_by_deepspeeds_names_of_arguments(tmp_path: Path) -> None:
    def exchange(rank: int) -> None:
        own, both = torch.full((2,), float(rank + 1)), torch.zeros(4)
        comm.all_reduce(own, prof=True, log_name="mine", debug="here")
        assert own.tolist() == [3.0, 3.0]
        comm.all_gather_into_tensor(output_tensor=both, tensor=torch.full((2,), float(rank)), prof=False)
        flags = torch.empty(2)
        comm.all_gather_into_tensor(flags, torch.tensor(float(rank)))  # a scalar, as DeepSpeed's own tests give
        assert flags.tolist() == [0.0, 1.0]
        assert both.tolist() == [0.0, 0.0, 1.0, 1.0]
        comm.reduce_scatter_tensor(output_tensor=own, tensor=both, debug="here")
        assert own.tolist() == [2.0 * rank] * 2
        comm.all_to_all_single(output=own, tensor=torch.arange(2.0) + 2 * rank)
        assert own.tolist() == [rank, rank + 2.0]

    assert run_ranks(2, exchange, tmp_path) == ["", ""]
    own = torch.zeros(2)
    comm.reduce_scatter_tensor(output_tensor=own, tensor=torch.ones(2), prof=True)  # one process
    comm.destroy_process_group()
    assert own.tolist() == [1.0, 1.0]


@on_ranks(2)
def test_one_process_sends_to_another(rank: int, tmp_path: Path) -> None:
    sent, received = torch.full((2,), float(rank)), torch.zeros(2)
    if rank:
        comm.send(sent, 0, prof=True, log_name="mine", debug="here")
    else:
        assert comm.recv(received, src=1, debug="here") == 1
        assert torch.equal(received, torch.ones(2))
    pairs = [comm.P2POp(comm.isend, sent, 1 - rank), comm.P2POp(comm.irecv, received, 1 - rank)]
    for begun in comm.batch_isend_irecv(pairs):
        begun.wait()
    assert torch.equal(received, torch.full((2,), 1.0 - rank))
