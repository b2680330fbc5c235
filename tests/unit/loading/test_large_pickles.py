"""State dicts of ``torch.save`` that are larger than memory are looked at like any others."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from infinity.loading.weight_files import open_weights


def test_a_state_dict_larger_than_memory_needs_none(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    part_bytes = 4 << 30
    count = (psutil.virtual_memory().total + psutil.swap_memory().total) // part_bytes + 2
    # Neither the memory nor the file's blocks are ever there: nobody writes to them.
    values = {f"w{n}": torch.empty(part_bytes, dtype=torch.uint8) for n in range(count)}
    with torch.serialization.skip_data():
        torch.save(values, file)
    del values
    tensors = open_weights(tmp_path)
    assert len(tensors) == count
    assert all(value.shape == (part_bytes,) and int(value[-1]) == 0 for value in tensors.values())


def test_a_file_of_before_zip_files_is_loaded(tmp_path: Path) -> None:
    values = {"weight": torch.arange(6.0).view(2, 3)}
    torch.save(values, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(open_weights(tmp_path)["weight"], values["weight"])
