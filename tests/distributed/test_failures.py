"""What one process does and the others do not: all of them end, and say so."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError, RankError
from tests.internals import causes, destroy_at_exit, end_all_at_exit, world
from tests.ranks import on_ranks, run_ranks
from tests.waiting import wait_until

_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 0},
}


def _engine(width: int = 8, **changes: Any) -> Any:
    model = nn.Sequential(nn.Linear(width, 8), nn.Linear(8, 8))
    return infinity.initialize(model=model, config=_CONFIG | changes)[0]


def _step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()


def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        engine = _engine()
        _step(engine)
        if rank == 1:
            raise ValueError("rank 1 has no more data")
        _step(engine)

    first, second = run_ranks(2, train, tmp_path)
    assert "rank 1 has no more data" in second
    assert "RankError: rank 0, averaging gradients in step 1: another rank has ended" in first
    assert "in time: rank 1 failed with ValueError: rank 1 has no more data. " in first


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        engine = _engine()
        _step(engine)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _step(engine)

    (tmp_path / "rank1").write_text("killed")
    first, second, third = run_ranks(3, train, tmp_path)
    assert second == "killed"
    for error in (first, third):
        assert re.search(r"the process of rank 1 \(\d+\) has ended without giving a reason .*: an error, a kill", error)


@pytest.mark.deep
def test_a_killed_rank_that_held_the_store_is_named(tmp_path: Path) -> None:
    def join(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if rank == 0:
            store = torch.distributed.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
            (tmp_path / "part").write_text(str(store.port))
            (tmp_path / "part").rename(tmp_path / "port")
        else:
            wait_until((tmp_path / "port").exists)
            port = int((tmp_path / "port").read_text())
            store = torch.distributed.TCPStore("127.0.0.1", port, 3, is_master=False)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=3)

    def train(rank: int) -> None:
        engine = _engine()
        _step(engine)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        _step(engine)

    (tmp_path / "rank0").write_text("killed")
    first, *others = run_ranks(3, train, tmp_path, join)
    assert first == "killed"
    for error in others:
        assert re.search(r"the process of rank 0 \(\d+\) has ended without giving a reason .*: an error, a kill", error)


def test_a_rank_that_is_killed_while_groups_are_made_is_named(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        from infinity.distributed import world

        world.world()
        if rank == 1:
            world.group_of = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        world.subsets([(0, 1)])

    (tmp_path / "rank1").write_text("killed")
    first, second, third = run_ranks(3, train, tmp_path)
    assert second == "killed"
    assert re.search(r"the process of rank 1 \(\d+\) has ended", first)
    assert third


def test_who_does_not_come_to_the_rendezvous_is_waited_for_as_long_as_said(tmp_path: Path) -> None:
    def join(rank: int) -> None:
        place = f"file://{tmp_path}/store"
        with pytest.raises(RankError, match=r"making a process group: the processes do not reach each other.*timeout="):
            infinity.init_distributed(timeout=timedelta(seconds=1), init_method=place, rank=0, world_size=2)

    assert run_ranks(1, lambda rank: None, tmp_path, join) == [""]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_that_is_stopped_ends_the_others_soon(stage: int, tmp_path: Path) -> None:
    def train(rank: int) -> None:
        causes._SILENT_SECONDS = 3.0
        (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
        engine = _engine(zero_optimization={"stage": stage})
        _step(engine)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            _step(engine)
        finally:
            os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)

    (tmp_path / "rank1").write_text("killed")
    first, second = run_ranks(2, train, tmp_path)
    assert second == "killed"
    # Not by the process group's timeout, whose error has other words.
    assert re.search(
        r"RankError: rank 0, averaging .* does not reach this call: the process of rank 1 .* stopped", first
    )


@on_ranks(2)
def test_an_interrupt_waits_for_the_end_of_an_exchange(rank: int, tmp_path: Path) -> None:
    """Else the other rank goes on with one that this rank has left, and both may save what they have."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = _engine()
    _step(engine)
    loss = engine(torch.ones(1, 8)).sum()
    sent = tmp_path / "sent"
    if rank == 0:
        wait_until(sent.exists)
        engine.backward(loss)
    else:

        def interrupt() -> None:
            wait_until(lambda: world().causes.place == "averaging gradients in step 1")
            os.kill(os.getpid(), signal.SIGINT)
            sent.touch()

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss)
        thread.join()
    engine.reset()
    engine.save_checkpoint(tmp_path / "saved")


def test_an_exchange_that_a_rank_has_left_is_its_last(tmp_path: Path) -> None:
    """What came next would be taken for the rest of it."""

    def leave(rank: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ranks = world()
        if rank == 1:
            thread = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                ranks.all_gather_ints("the first")
            thread.join()
            ranks.all_gather_ints("the second")
        wait_until((tmp_path / "rank1").exists)
        with pytest.raises(RankError):
            ranks.all_gather_ints("the first")
            ranks.all_gather_ints("the second")

    first, second = run_ranks(2, leave, tmp_path)
    assert not first, first
    assert "rank 1, the second: this rank has left the exchange 'the first' in the middle" in second


@pytest.mark.deep
def test_what_followed_is_no_cause(tmp_path: Path) -> None:
    """Rank 2 hears of rank 1's end long after rank 0 has ended of it."""

    def train(rank: int) -> None:
        engine = _engine()
        _step(engine)
        if rank == 1:
            raise OSError(28, "No space left on device")
        if rank == 2:
            wait_until(lambda: (tmp_path / "rank0").exists())
        _step(engine)

    found = run_ranks(3, train, tmp_path)
    assert all("rank 1 failed with OSError: [Errno 28] No space left on device" in error for error in found[::2])


def test_a_rank_that_is_elsewhere_is_found_by_all(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        engine = _engine()
        if rank == 1:
            engine.backward(engine(torch.ones(1, 8)).sum())
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()

    first, second = run_ranks(2, train, tmp_path)
    assert (
        "RankError: rank 0, the parameter groups in step 0: rank 1 came with 'averaging gradients in step 0', its exchange number"
        in first
    )
    assert (
        "RankError: rank 1, averaging gradients in step 0: rank 0 came with 'the parameter groups in step 0', its exchange number"
        in second
    )


@on_ranks(2)
def test_a_gradient_that_one_rank_changed_updates_nothing(rank: int, tmp_path: Path) -> None:
    engine = _engine()
    before = engine.module.state_dict()
    engine.backward(engine(torch.ones(1, 8)).sum())
    if rank == 1:
        engine.module[1].weight.grad.mul_(2)
    with pytest.raises(RankError, match="in the same way on all ranks"):
        engine.step()
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, before[name])


@on_ranks(2)
def test_a_last_backward_without_an_average_on_one_rank_is_an_error_on_all(rank: int, tmp_path: Path) -> None:
    engine = _engine(zero_optimization={"stage": 2})
    _step(engine)
    with engine.no_sync() if rank else contextlib.nullcontext():
        engine.backward(engine(torch.ones(1, 8)).sum())
    with pytest.raises(RankError, match=r"has averaged none on rank 1, as inside engine\.no_sync\(\)\. Enter"):
        engine.step()


@on_ranks(2)
def test_parameters_that_came_later_are_refused(rank: int, tmp_path: Path) -> None:
    engine = _engine()
    engine.module.later = nn.Linear(8, 8)
    engine.optimizer.add_param_group({"params": list(engine.module.later.parameters())})
    with pytest.raises(RankError, match=r"before infinity\.initialize"):
        _step(engine)


_SAME = r"on rank 0, .* on rank 1. Give all processes the same config"
_REFUSED: dict[str, tuple[type[Exception], str, Callable[[int], Any]]] = {
    "another model": (
        *(
            RankError,
            r"'0\.weight' is number 0, \(8, 8\) .* trained on rank 0, number 0, \(8, 9\) .* trained on rank 1",
        ),
        lambda rank: _engine(width=8 + rank),
    ),
    "a config for one process": (
        *(ConfigError, "loaded for 1 processes, and 2 train together"),
        lambda rank: infinity.initialize(model=nn.Linear(8, 8), config=infinity.load_config(_CONFIG, world_size=1)),
    ),
    "other clipping": (
        *(ConfigError, f"'gradient_clipping' .*{_SAME}"),
        lambda rank: _engine(gradient_clipping=0.5 + rank),
    ),
    "other accumulation": (
        *(ConfigError, f"'gradient_accumulation_steps' .*{_SAME}"),
        lambda rank: _engine(gradient_accumulation_steps=1 + rank),
    ),
    "another dtype": (*(ConfigError, f"'bf16, fp16' .*{_SAME}"), lambda rank: _engine(bf16={"enabled": rank == 1})),
    "another stage": (
        *(ConfigError, rf"'zero_optimization\.stage' .*{_SAME}"),
        lambda rank: _engine(zero_optimization={"stage": 3 * rank}),
    ),
}


@pytest.mark.deep(but=3)
@pytest.mark.parametrize(("error", "words", "begin"), _REFUSED.values(), ids=_REFUSED)
@on_ranks(2)
def test_ranks_that_begin_with_something_else_are_refused(
    rank: int, error: type[Exception], words: str, begin: Callable[[int], Any], tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        begin(rank)


@on_ranks(2)
def test_batch_sizes_that_differ_later_are_refused(rank: int, tmp_path: Path) -> None:
    """Else a rank's micro-batch would be averaged with the sum of several."""
    engine = infinity.deepspeed.initialize(model=nn.Linear(8, 8), config=_CONFIG)[0]
    with pytest.raises(RankError, match=rf"rank {1 - rank} came with 'engine.set_train_batch_size\({4 - 2 * rank}\)'"):
        engine.set_train_batch_size(2 + 2 * rank)


@on_ranks(2)
def test_what_is_each_process_own_may_differ(rank: int, tmp_path: Path) -> None:
    with _engine(infinity={"host_memory_budget": "1GB"} if rank else {}, steps_per_print=rank + 1) as engine:
        _step(engine)


@pytest.mark.deep
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("lr", "'lr' of group 0 is 0.1 on rank 0, 0.2 on rank 1"),
        ("members", r"the group of each parameter \(a checksum\) is"),
        ("class", "the optimizer is SGD on rank 0, Adagrad on rank 1"),
    ],
)
@on_ranks(2)
def test_hyperparameters_of_one_rank_update_nothing(
    rank: int, what: str, message: str, stage: int, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    first, *others = model.parameters()
    if what == "members" and rank:
        *others, first = model.parameters()
    maker = torch.optim.Adagrad if what == "class" and rank else torch.optim.SGD
    optimizer = maker([{"params": [first]}, {"params": others, "weight_decay": 0.1}], lr=0.1)
    config = _CONFIG | {"zero_optimization": {"stage": stage}}
    engine = infinity.initialize(model=model, optimizer=optimizer, config=config)[0]
    before = engine.module.state_dict()
    if what == "lr" and rank:
        engine.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(RankError, match=message):
        _step(engine)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("infinity.update", {"gradient_clipping": 0.0, "infinity": {"update": "in_backward"}}),
        ("gradient_allreduce_op", {"gradient_allreduce_op": "sum"}),
        ("infinity.gradient_dtype", {"bf16": {"enabled": True}, "infinity": {"gradient_dtype": "bf16"}}),
        ("zero_optimization.zero_quantized_gradients", {"zero_optimization": {"zero_quantized_gradients": True}}),
    ],
)
def test_settings_for_one_process_are_refused(key: str, changes: dict[str, Any]) -> None:
    infinity.load_config(_CONFIG | changes, world_size=1)
    with pytest.raises(ConfigError, match="2 processes") as error:
        infinity.load_config(_CONFIG | changes, world_size=2)
    assert error.value.key == key


def test_a_batch_is_divided_among_processes() -> None:
    with pytest.raises(ConfigError):
        infinity.load_config(_CONFIG | {"train_batch_size": 3}, world_size=2)
    assert infinity.load_config(_CONFIG | {"train_batch_size": 6}, world_size=2).gradient_accumulation_steps == 3


@pytest.mark.deep
@on_ranks(2)
def test_an_engine_may_be_closed_after_the_process_group(rank: int, tmp_path: Path) -> None:
    with _engine(zero_optimization={"stage": 3}) as engine:
        _step(engine)
        torch.distributed.destroy_process_group()


def _gloo_threads() -> int:
    """Of those that release tensors."""
    num = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            num += "gloo_runloop" in (task / "comm").read_text()
    return num


@pytest.mark.deep
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("is_destroyed", [False, True])
@on_ranks(2)
def test_no_thread_of_gloo_outlives_the_interpreter(rank: int, tmp_path: Path, is_destroyed: bool, stage: int) -> None:
    """Else it may release a tensor while the interpreter ends, which aborts the process."""
    atexit._clear()  # what belongs to the process that this one was forked from
    atexit.register(destroy_at_exit)
    atexit.register(end_all_at_exit)
    engine = _engine(zero_optimization={"stage": stage})
    _step(engine)
    assert _gloo_threads() > 0
    if is_destroyed:
        torch.distributed.destroy_process_group()
    atexit._run_exitfuncs()
    assert _gloo_threads() == 0
    assert engine.global_steps == 1
