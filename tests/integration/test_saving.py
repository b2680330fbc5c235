"""Saved weights load into plain torch and into transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import infinity
from infinity.errors import StorageError
from tests.exactness.lockstep import SHAPES_BY_NAME, Lockstep, everything_on_nvme


def test_deepspeeds_file_name_gives_what_transformers_looks_for(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["plain"]) as both:
        both.engine.save_16bit_model(tmp_path / "out", "pytorch_model.bin")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_every_dtype_and_shape_is_read_back_by_the_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))
            self.nothing = torch.nn.Parameter(torch.empty(0, 3))
            self.weight = torch.nn.Parameter(torch.randn(5, 3).t())
            self.frozen = torch.nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("phases", torch.randn(3, dtype=torch.complex64))
            self.register_buffer("strided", torch.randn(4, 6)[:, ::2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight * self.scale).sum()

    torch.manual_seed(0)
    model = Odd()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    drive = tmp_path / "drive"
    drive.mkdir()
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(drive))
    with engine:
        engine.save_16bit_model(tmp_path / "out")
    stored: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        stored.update(load_file(path))
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        assert stored[name].dtype == value.dtype and torch.equal(stored[name], value), name


@pytest.mark.root
def test_a_full_disk_leaves_the_weights_of_before(tmp_path: Path, small_tmpfs: Callable[[int], Path]) -> None:
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["plain"]) as both:
        num_bytes = sum(p.numel() * p.element_size() for p in both.reference.model.parameters())
        folder = small_tmpfs(num_bytes + num_bytes // 2) / "weights"
        both.engine.save_16bit_model(folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        both.engine_step(0)
        with pytest.raises(StorageError, match="No space left") as caught:
            both.engine.save_16bit_model(folder)
        assert str(folder) in str(caught.value) and "free" in str(caught.value)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        both.engine_step(1)
        both.require_equal()
