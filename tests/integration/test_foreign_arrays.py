"""zarr reads what a checkpoint's arrays hold, and a checkpoint is loaded whose arrays zarr has written."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, TransposeCodec, ZstdCodec

from infinity.errors import CheckpointError
from tests.exactness.lockstep import engine_on_nvme
from tests.internals import Checkpoint, arrays, foreign_arrays, main, manifest, seal, writing

_DTYPES = [arrays.dtype_of(name) for name in arrays.STORED_AS]
_SHAPES = [(), (0,), (0, 3), (5,), (3, 1, 7), (129, 65), (2, 3, 4, 5)]


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    data = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.int64).remainder(
        127 if dtype != torch.bool else 2
    )
    return data.to(torch.uint8).view(dtype).view(shape)


def _written(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    specs = {
        name: arrays.ArraySpec.of("buffers", name, "weight", each.shape, each.dtype) for name, each in tensors.items()
    }
    with writing(directory, "one", list(specs.values()), is_latest=True) as files:
        for name, spec in specs.items():
            files.open_array(spec).write(tensors[name].reshape(-1))
        files.write_training_state({"counters": {}, "client_state": {}})
    return directory / "one"


def _rewrite(folder: Path, **options: Any) -> None:
    """As another program does that has zarr: the same values, in other chunks and codecs."""
    group: Any = zarr.open_group(folder / "tensors.zarr", mode="r+")
    for name, node in sorted(group.members(max_depth=None)):
        if isinstance(node, zarr.Array):
            values, attributes = np.array(node[...]), dict(node.attrs)
            made = group.create_array(
                name, shape=values.shape, dtype=values.dtype, attributes=attributes, overwrite=True, **options
            )
            made[...] = values


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_zarr_reads_every_dtype_and_shape_and_they_are_read_back(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 256)
    tensors = {f"of.{'x'.join(map(str, shape))}": _values(shape, dtype) for shape in _SHAPES}
    folder = _written(tmp_path, tensors)
    group: Any = zarr.open_group(folder / "tensors.zarr", mode="r")
    for name, value in tensors.items():
        by_zarr = np.array(group[f"buffers/{name}/weight"][...])
        assert by_zarr.shape == tuple(value.shape) and by_zarr.tobytes() == _bytes(value)
    _rewrite(folder)
    for tensor in seal(folder).tensors:
        assert tensor.dtype == dtype and tensor.shape == tuple(tensors[tensor.fqn].shape)
        assert _bytes(tensor.read()) == _bytes(tensors[tensor.fqn])


@pytest.mark.parametrize("chunk_bytes", [64, 256, 1 << 20])
@pytest.mark.parametrize("num_parts", [2, 3, 5])
def test_chunks_of_zarr_that_cut_any_dimension_are_read_in_order(
    num_parts: int, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "CHUNK_BYTES", chunk_bytes)
    shapes = [(17,), (4, 10), (10, 4), (7, 19), (3, 5, 11), (6, 1, 13), (2, 3, 4, 5)]
    tensors = {f"of.{'x'.join(map(str, shape))}": torch.arange(math.prod(shape)).view(shape) for shape in shapes}
    folder = _written(tmp_path, tensors)
    group: Any = zarr.open_group(folder / "tensors.zarr", mode="r+")
    for name, value in tensors.items():
        chunks = tuple(-(-size // num_parts) for size in value.shape)
        group.create_array(f"buffers/{name}/weight", data=value.numpy(), chunks=chunks, overwrite=True)
    for tensor in seal(folder).tensors:
        assert torch.equal(tensor.read(), tensors[tensor.fqn]), (tensor.shape, chunks)


def _bytes(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 8))
    model.register_buffer("short", torch.randn(300, 20).bfloat16())
    return model


def _engine(drive: Path) -> Any:
    drive.mkdir(exist_ok=True)
    return engine_on_nvme(drive, _model(), {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})


def _step(engine: Any, seed: int) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(inputs).square().mean())
    engine.step()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with _engine(tmp_path / "drive") as engine:
        _step(engine, 0)
        engine.save_checkpoint(tmp_path / "saved", tag="one")
        _step(engine, 1)
        torch.save(engine.module.state_dict(), tmp_path / "expected.pt")
    return tmp_path / "saved" / "one"


_OPTIONS: dict[str, dict[str, Any]] = {
    "zarr's own": {},
    "zstd": {"compressors": ZstdCodec(level=3)},
    "gzip": {"compressors": GzipCodec()},
    "blosc, transposed": {"compressors": BloscCodec(), "filters": None},
    "big-endian": {"serializer": BytesCodec(endian="big"), "compressors": None},
    "default keys": {"chunk_key_encoding": {"name": "default", "separator": "/"}},
}


@pytest.mark.parametrize("how", _OPTIONS)
def test_a_checkpoint_is_loaded_that_zarr_has_written(how: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Checkpoint.open(saved)
    values = {(each.fqn, each.kind): each.read() for each in expected.tensors}
    _rewrite(saved, **_OPTIONS[how])
    with pytest.raises(CheckpointError, match=r"infinity checkpoint seal"):
        Checkpoint.open(saved).verify()
    assert main(["checkpoint", "seal", str(saved.parent)]) == 0
    monkeypatch.setattr(foreign_arrays, "LARGEST_CHUNK", 1 << 20)
    found = Checkpoint.open(saved)
    assert {(each.fqn, each.kind) for each in found.tensors} == values.keys()
    for each in found.tensors:
        assert each.dtype == values[each.fqn, each.kind].dtype and torch.equal(each.read(), values[each.fqn, each.kind])
    assert found.verify() > 0
    with _engine(saved.parents[1] / "drive") as engine:
        engine.load_checkpoint(saved.parent)
        _step(engine, 1)
        trained = engine.module.state_dict()
        engine.save_checkpoint(saved.parent, tag="two")
    for name, value in torch.load(saved.parents[1] / "expected.pt").items():
        assert torch.equal(trained[name], value), name
    assert Checkpoint.open(saved.parent, "two").verify() > 0


@pytest.mark.parametrize(
    "options", [{"chunks": (7, 13)}, {"chunks": (7, 13), "shards": (70, 65)}, {"chunks": (300, 1)}]
)
def test_small_chunks_are_read_in_the_order_of_the_elements(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.randn(300, 65)
    folder = _written(tmp_path, {"matrix": value})
    _rewrite(folder, filters=[TransposeCodec(order=(1, 0))], **options)
    seal(folder)
    monkeypatch.setattr(manifest, "LARGEST_CHUNK", 1 << 14)
    (found,) = Checkpoint.open(folder).tensors
    starts, parts = zip(*found.parts(), strict=True)
    assert len(parts) > 4 and max(part.nbytes for part in parts) <= 1 << 14
    assert [*starts] == [sum(part.numel() for part in parts[:number]) for number in range(len(parts))]
    assert torch.equal(torch.cat(parts).view(300, 65), value)


def _array(folder: Path) -> Path:
    return folder / "tensors.zarr" / "parameters" / "0.weight" / "weight"


def _with(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = _array(folder) / "zarr.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


_PLAIN = [{"name": "bytes", "configuration": {"endian": "little"}}]


def _in_chunks(*sizes: int, **changes: Any) -> Callable[[Path], None]:
    grid = {"name": "regular", "configuration": {"chunk_shape": sizes}}
    return _with(chunk_grid=grid, codecs=_PLAIN, **changes)


def _link_tensors(folder: Path) -> None:
    """As on another drive, with more room."""
    (folder / "tensors.zarr").rename(folder.parent / "moved")
    (folder / "tensors.zarr").symlink_to(folder.parent / "moved")


_REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another shape of the group": (
        lambda folder: shutil.move(_array(folder), folder / "tensors.zarr" / "x"),
        "zarr cannot",
    ),
    "another name": (_with(attributes={"fqn": "1.weight"}), "belongs to tensors.zarr/parameters/1.weight"),
    "another dtype": (_with(attributes={"dtype": "bfloat16"}), "is to be bfloat16"),
    "a codec that nobody knows": (_with(codecs=[{"name": "bytes"}, {"name": "numcodecs.bz2"}]), "zarr cannot|none of"),
    "huge chunks": (_in_chunks(1 << 20, 1 << 20), "more than 67.1 MB"),
    "many chunks": (_in_chunks(1, 1, shape=[1 << 40, 1 << 10]), "are more than"),
    "an array of ours without its file": (lambda folder: (_array(folder) / "0.0").unlink(), "'0.0' is missing"),
    "nothing": (lambda folder: shutil.rmtree(folder / "tensors.zarr"), "zarr cannot read it"),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe': it is neither a file nor a folder"),
    "a linked folder": (_link_tensors, "tensors.zarr': it is neither a file nor a folder"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_is_no_array_of_a_checkpoint_is_not_sealed(case: str, saved: Path) -> None:
    change, message = _REFUSED[case]
    change(saved)
    with pytest.raises(CheckpointError, match=message):
        seal(saved)


def test_only_files_are_read_that_the_manifest_knows(saved: Path) -> None:
    _rewrite(saved)
    seal(saved)
    os.mkfifo(_array(saved) / "c" / "9")
    with pytest.raises(CheckpointError, match=r"c/9.*does not list it.*checkpoint seal"):
        Checkpoint.open(saved)
    (_array(saved) / "c" / "9").unlink()
    path = _array(saved) / "zarr.json"
    path.write_text(path.read_text().replace("300", "301"))
    with pytest.raises(CheckpointError, match=r"0\.weight.*checksum is wrong"):
        Checkpoint.open(saved).verify()
    with (
        _engine(saved.parents[1] / "drive") as engine,
        pytest.raises(CheckpointError, match=r"0\.weight.*checksum is wrong"),
    ):
        engine.load_checkpoint(saved.parent)
