"""Process groups made of the dimensions of a mesh."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infinity.distributed.meshes import mesh_of
from tests.ranks import run_ranks


def _timeout_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_groups_of_parts_wait_as_long_as_the_default_one(tmp_path: Path) -> None:
    def look(rank: int) -> None:
        expected = _timeout_of(dist.group.WORLD)
        assert expected != dist.distributed_c10d.default_pg_timeout
        mesh = mesh_of(mesh_param=dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        for ranks in (mesh.data, mesh.parts, mesh.tensor):
            assert _timeout_of(ranks.torch_group) == expected

    assert run_ranks(4, look, tmp_path) == [""] * 4


def test_a_group_of_one_is_not_that_of_all(tmp_path: Path) -> None:
    def look(rank: int) -> None:
        mesh = mesh_of(mesh_param=dist.init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pp", "dp", "tp")))
        for ranks in (mesh.data, mesh.tensor):
            assert dist.get_process_group_ranks(ranks.torch_group) == [rank]
            assert ranks.torch_group is ranks.torch_group
        assert dist.get_process_group_ranks(mesh.parts.torch_group) == [0, 1]

    assert run_ranks(2, look, tmp_path) == ["", ""]
