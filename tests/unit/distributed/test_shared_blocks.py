"""What processes of one machine exchange lies in memory that they share; of others, and where it cannot be, it is sent."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infinity.distributed import collectives, lines, shared_blocks
from infinity.distributed.world import world
from tests.ranks import require_ranks, run_ranks

_NUM = 3
_SIZES = (1, 7, 5000, 40_000)


def _none(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def _two_machines(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines._address
    monkeypatch.setattr(lines, "_address", lambda *name: found(*name) + bytes([rank // 2]))


def _another_network_each(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines._address
    monkeypatch.setattr(lines, "_address", lambda *name: found(*name) + bytes([rank]))


def _no_memory_files(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        monkeypatch.delattr(os, "memfd_create")


def _no_room(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1:
        monkeypatch.setattr(os, "ftruncate", refuse)


def _another_system(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank == 0:
        monkeypatch.delattr(socket, "AF_UNIX")


def _a_stranger(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody whom nobody has told a number of connects to rank 0 before the others, and one who says nothing."""
    listen = lines.Lines.listen

    def listen_and_connect(self: lines.Lines) -> tuple[int, ...]:
        *name, secret = place = listen(self)
        _strangers.append(lines._connected(lines._address(*name), lines._HELLO.pack(secret ^ 1, 1)))
        _strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        _strangers[-1].connect(lines._address(*name))
        return place

    if rank == 0:
        monkeypatch.setattr(lines.Lines, "listen", listen_and_connect)


_strangers: list[socket.socket] = []


def _wrong_number(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 does not know the numbers of the others."""
    found = lines.Lines.connect
    if rank == 2:
        monkeypatch.setattr(
            lines.Lines,
            "connect",
            lambda self, index, places: found(self, index, [(*place[:2], place[2] ^ 1) for place in places]),
        )


def _no_more_files(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(listener: socket.socket, secret: int) -> tuple[socket.socket, int]:
        raise OSError(24, "Too many open files")

    if rank == 1:
        monkeypatch.setattr(lines, "_accepted", refuse)


def _one_sided(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 cannot have what it gets."""
    found = shared_blocks._opened
    if rank == 2:
        monkeypatch.setattr(shared_blocks, "_opened", lambda message, files, num: found(message, files, num + 1))


_SITUATIONS: dict[Callable[[int, pytest.MonkeyPatch], None], list[set[int]]] = {
    _none: [{1, 2}, {0, 2}, {0, 1}],
    _two_machines: [{1}, {0}, set()],
    _another_network_each: [set(), set(), set()],
    _no_memory_files: [{2}, set(), {0}],
    _no_room: [{2}, set(), {0}],
    _another_system: [set(), {2}, {1}],
    _a_stranger: [{1, 2}, {0, 2}, {0, 1}],
    _wrong_number: [{1}, {0}, set()],
    _no_more_files: [{1, 2}, {0}, {0}],
    _one_sided: [{1}, {0}, set()],
}
"""Whose memory each rank reads then."""


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("situation", _SITUATIONS, ids=lambda each: each.__name__[1:])
def test_what_comes_is_the_same_whoever_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: Callable[[int, pytest.MonkeyPatch], None]
) -> None:
    monkeypatch.setattr(collectives, "_BLOCK_NUMEL", 6144)

    def exchange(rank: int) -> None:
        with monkeypatch.context() as patch:
            situation(rank, patch)
            ranks = world()
            blocks = ranks._shared_blocks()
            told = ranks.meet("numbers", [rank, -(1 << 63), (1 << 63) - 1, *range(10_000 * rank, 10_000 * rank + 9000)])
        for other, numbers in enumerate(told):
            assert numbers[:3] == [other, -(1 << 63), (1 << 63) - 1]
            assert numbers[3:] == [*range(10_000 * other, 10_000 * other + 9000)]
        assert set(blocks._others) == _SITUATIONS[situation][rank]
        for turn, numel in enumerate(_SIZES * 2):
            cuts = [0, numel // 5, numel // 2, numel]
            parts = list(itertools.pairwise(cuts))
            start, stop = parts[rank]
            for dtype, wire in (
                (torch.float32, torch.float32),
                (torch.float32, torch.bfloat16),
                (torch.bfloat16, torch.float32),
                (torch.bfloat16, torch.bfloat16),
                (torch.float16, torch.float16),
                (torch.float64, torch.float32),
            ):
                values = [
                    torch.randn(numel, generator=torch.Generator().manual_seed(10 * turn + r)).to(dtype)
                    for r in range(_NUM)
                ]
                before = [each.clone() for each in values]
                own = values[rank].clone()
                ranks.reduce("means", own, parts, wire)
                rows = [(each.float() * (1.0 / _NUM)).to(wire).float() for each in values]
                mean = ((rows[0] + rows[1]) + rows[2]).to(wire).to(dtype)
                assert torch.equal(own[start:stop], mean[start:stop])
                ranks.gather_in_memory("all", own, parts, kind="weights")
                assert torch.equal(own, mean)
                assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))
                sent = ranks.sent_bytes["norms"]
                for to in range(_NUM):
                    mine = torch.full((numel,), float(rank), dtype=dtype)
                    ranks.collect("parts of one", mine, parts, to)
                    for other, (first, last) in enumerate(parts):
                        assert bool((mine[first:last] == (other if rank == to else rank)).all())
                assert ranks.sent_bytes["norms"] - sent == (_NUM - 1) * (stop - start) * dtype.itemsize
        rows = ranks.swap("rows", torch.arange(_NUM * 5).view(_NUM, 5) + 100 * rank, kind="momenta")
        assert rows.tolist() == [[100 * other + 5 * rank + i for i in range(5)] for other in range(_NUM)]

    require_ranks(_NUM, exchange, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_alone_exchanges_with_nobody(dtype: torch.dtype) -> None:
    values = torch.arange(5.0).to(dtype)
    ranks = collectives.Ranks()
    ranks.reduce("a test", values, [(0, 5)])
    ranks.gather_in_memory("a test", values, [(0, 5)], kind="weights")
    ranks.collect("a test", values, [(0, 5)], 0)
    assert torch.equal(values, torch.arange(5.0).to(dtype))
    assert not sum(ranks.sent_bytes.values())


@pytest.mark.parametrize("slow", range(2))
def test_nothing_is_written_that_another_one_still_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    monkeypatch.setattr(collectives, "_BLOCK_NUMEL", 2 * 2048)
    numel = 40 * 2048
    parts = [(0, numel), (numel, 2 * numel)]

    def exchange(rank: int) -> None:
        found = torch.zeros(2 * numel, dtype=torch.int64)

        def read(start: int, target: torch.Tensor) -> None:
            target.copy_(torch.arange(start, start + target.numel()))

        def write(start: int, came: torch.Tensor) -> None:
            if rank == slow:
                time.sleep(0.002)
            found[start : start + came.numel()] = came

        ranks = world()
        ranks.gather_parts("all", parts, read, write, dtype=torch.int64)
        read(rank * numel, found[rank * numel : (rank + 1) * numel])
        assert torch.equal(found, torch.arange(2 * numel))
        assert len(ranks._shared_blocks()._others) == 1

    require_ranks(2, exchange, tmp_path)


def test_who_comes_with_something_else_is_told_so(tmp_path: Path) -> None:
    def exchange(rank: int) -> None:
        values = torch.zeros(10)
        world().gather_in_memory("as one", values, [(0, 5), (5, 10)], kind="weights")
        world().gather_in_memory(f"as {rank}", values, [(0, 5), (5, 10)], kind="weights")

    errors = run_ranks(2, exchange, tmp_path)
    assert all("RankError" in error and "came with something else" in error for error in errors), errors


@pytest.mark.parametrize("is_first", [True, False])
def test_who_meets_while_another_one_exchanges_is_told_so(tmp_path: Path, is_first: bool) -> None:
    def exchange(rank: int) -> None:
        values = torch.zeros(10)
        world().meet("a beginning")
        if not is_first:
            world().gather_in_memory("as one", values, [(0, 5), (5, 10)], kind="weights")
        if rank:
            world().gather_in_memory("the same words", values, [(0, 5), (5, 10)], kind="weights")
        else:
            world().meet("the same words", [1, 10, 0])

    errors = run_ranks(2, exchange, tmp_path)
    assert all("RankError" in error and "came with something else" in error for error in errors), errors


def test_more_than_a_block_is_refused() -> None:
    blocks = shared_blocks.SharedBlocks(10_000, lines.Lines())
    with pytest.raises(ValueError, match="a block has"):
        blocks.begin(1 << 14, torch.uint8)


def test_files_are_closed_once_all_have_opened_them(tmp_path: Path) -> None:
    def exchange(rank: int) -> None:
        world().average("a test", torch.ones(5))
        assert len(world()._shared_blocks()._others) == 1
        links = [Path("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
        names = [os.readlink(link) for link in links if link.is_symlink()]  # the listing's own is gone
        assert names
        assert not [name for name in names if "infinity-blocks" in name]

    require_ranks(2, exchange, tmp_path)


_CONTAINED = """
import sys, torch
rank = int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
from infinity.distributed.world import world
values = torch.full((10,), float(rank))
world().average("a test", values)
assert set(values.tolist()) == {0.5}
assert set(world()._shared_blocks()._others) == {1 - rank}
torch.distributed.barrier()
"""


@pytest.mark.deep
def test_containers_with_one_network_share(tmp_path: Path) -> None:
    """They do not see each other's processes."""
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--uts"]
    if shutil.which("unshare") is None or subprocess.run([*container, "true"], check=False).returncode:
        pytest.skip("no namespace of processes can be made here: that needs unshare, and root")
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*inside, sys.executable, "-c", _CONTAINED, str(tmp_path / "store"), str(rank)], env=environment
        )
        for rank, inside in enumerate(([], container))
    ]
    try:
        assert [process.wait(timeout=300) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
            process.wait()
