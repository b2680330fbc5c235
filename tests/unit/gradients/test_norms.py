"""The norm of a model whose parts are on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from infinity.distributed.meshes import ModelPart, mesh_of
from infinity.errors import RankError
from infinity.gradients.norms import ParameterNorm, norm_of_model
from tests.ranks import require_ranks


def test_the_norm_of_stages_whose_tensors_are_divided(tmp_path: Path) -> None:
    """Two stages of two tensor ranks, of which the second stage has gradients with another scale."""
    values = torch.rand(8, generator=torch.Generator().manual_seed(0))
    divided = [values[i : i + 2].square().sum().sqrt() for i in (0, 4)]
    expected = torch.linalg.vector_norm(torch.stack([divided[0], values[2], divided[1], values[6]]))

    def norm(rank: int) -> None:
        mesh = mesh_of(mesh_param=dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")))
        assert (mesh.data.num, mesh.part, mesh.place) == (1, rank, ModelPart(rank // 2, rank % 2))
        stage, scale = rank // 2 * 4, 8.0 if rank > 1 else 1.0
        own = [
            ParameterNorm("rows", is_part=True, norm=values[stage + rank % 2] * scale),
            ParameterNorm("bias", is_part=False, norm=values[stage + 2] * scale),
        ]
        assert torch.equal(norm_of_model(mesh, own, scale, 0), expected)
        alone = norm_of_model(mesh, own if rank < 2 else [], 1.0, 1)  # a stage without gradients
        assert torch.equal(alone, torch.linalg.vector_norm(torch.stack([divided[0], values[2]])))
        with pytest.raises(RankError, match="that of 'rows' is"):
            norm_of_model(mesh, [own[0]._replace(is_part=rank > 0), own[1]], scale, 2)

    require_ranks(4, norm, tmp_path)
