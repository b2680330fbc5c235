"""Pickles of strangers: nothing in them is run, corrupts memory, or takes more memory and time than the file is long."""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.errors import CheckpointError

_DTYPE = b"cnumpy\ndtype\n(X\2\0\0\0%b\x89\x88tR"
_RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tX\1\0\0\0btR"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def _bytes(data: bytes) -> bytes:
    """As protocol 2 has them."""
    return b"c_codecs\nencode\n(" + _text(data.decode("latin1")) + _text("latin1") + b"tR"


def _array(dtype: bytes, shape: bytes, data: bytes) -> bytes:
    """An array as NumPy pickles it, of a dtype, of a shape (both pickled) and of bytes."""
    return _RECONSTRUCT + b"(K\1" + shape + dtype + b"\x89" + _bytes(data) + b"tb"


def _nested(begin: bytes, end: bytes, depth: int) -> bytes:
    return begin * depth + end * depth


def _doubled(times: int) -> bytes:
    """A tuple of twice the tuple before, and so on."""
    return b"K\1\x85" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(times))


_OBJECT = b"cnumpy\ndtype\n(X\2\0\0\0O8\x89\x88tR(K\3X\1\0\0\0|NNNK\x08K\x08K\0tb"
_STRUCTURED = b"cnumpy\ndtype\n(X\2\0\0\0V8\x89\x88tR(K\3X\1\0\0\0|NX\1\0\0\0a\x85}NK\x08K\x01K\0tb"
_ALLOCATING = {
    "array of objects": _array(_OBJECT, b"K\1\x85", b"A" * 8),
    "array of an array of objects": b"cnumpy\nndarray\n(" + _array(_OBJECT, b"K\1\x85", b"A" * 8) + b"tR",
    "structured array": _array(_STRUCTURED, b"K\1\x85", b"A" * 8),
    "array with too few bytes": _array(_DTYPE % b"f8", b"J\xff\xff\xff\x7f\x85", b"A" * 8),
    "array of a negative shape": _array(_DTYPE % b"f8", b"J\xff\xff\xff\xffK\2\x86", b"A" * 8),
    "text that is none": _array(_DTYPE % b"U1", b"K\1\x85", b"\xff" * 4),
    "scalar of an object": b"cnumpy.core.multiarray\nscalar\n(" + _OBJECT + _bytes(b"AAAAAAAA") + b"tR",
    "scalar with too few bytes": b"cnumpy.core.multiarray\nscalar\n(" + _DTYPE % b"f8" + _bytes(b"A") + b"tR",
    "array without values": _RECONSTRUCT,
    "huge dtype": b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n("
    + _text("S9999999999")
    + b"\x89\x88tR"
    + _bytes(b"A")
    + b"tR",
    "huge bytes": b"\x8e" + struct.pack("<Q", 1 << 40) + b"A",
    "huge text": b"\x8d" + struct.pack("<Q", 1 << 62) + b"A",
    "huge bytearray": b"\x96" + struct.pack("<Q", 1 << 63) + b"A",
    "huge number": b"\x8b" + struct.pack("<i", 1 << 30) + b"A",
    "negative length": b"\x8b" + struct.pack("<i", -5),
    "huge index of the memo": b"K\1r" + struct.pack("<I", (1 << 32) - 1),
    "extension": b"\x82\1",
    "deep lists": _nested(b"(", b"l", 100_000),
    "deep tuples as a key": b"}" + b"K\1" + b"\x85" * 200_000 + b"K\1s",
    "doubled tuples": _doubled(60),
    "doubled tuples as a key": b"}" + _doubled(60) + b"K\1s",
    "doubled tuples as a storage": _doubled(60) + b"Q",
    "doubled tuples as a dtype": b"cnumpy\ndtype\n" + _doubled(60) + b"\x85R",
    "doubled tuples as a device": b"ctorch\ndevice\n" + _doubled(60) + b"\x85R",
    "doubled tuples as an encoding": b"c_codecs\nencode\n(" + _text("a") + _doubled(60) + b"tR",
    "doubled tuples as a shape": b"ctorch\nSize\n" + _doubled(60) + b"\x85R",
    "list of itself": b"]q\0h\0a",
    "dict of itself": b"}q\0K\1h\0s",
    "long list as sets": b"](" + b"K\1" * 100_000 + b"eq\0" + b"cbuiltins\nset\nh\0\x85R" * 10_000,
    "long text as bytes": _text("a" * 1_000_000) + b"q\0" + b"0c_codecs\nencode\nh\0\x85R" * 10_000,
    "sparse tensor": b"ctorch._utils\n_rebuild_sparse_tensor\n(ctorch\nsparse_coo\nNtR",
    "tensor without a storage": b"ctorch._utils\n_rebuild_tensor_v2\n(NK\0K\1\x85K\1\x85\x89NtR",
    "state of a list": b"]}b",
    "item of a list": b"]K\0K\1s",
    "call of a number": b"K\1)R",
    "mark only": b"(",
    "nothing": b"",
}
_RUNNING = {
    "os.system": b"cos\nsystem\n" + _text("touch ran") + b"\x85R",
    "builtins.eval": b"c__builtin__\neval\n" + _text("open('ran', 'w')") + b"\x85R",
    "by the instance": b"(" + _text("touch ran") + b"ios\nsystem\n",
    "by the state": b"ctypes\nModuleType\n" + _text("m") + b"\x85R}" + _text("__class__") + b"K\1sb",
    "by attributes": b"cbuiltins\ngetattr\n(cos\nsystem\n" + _text("__call__") + b"tR" + _text("touch ran") + b"\x85R",
    "new object": b"csubprocess\nPopen\n" + _text("touch ran") + b"\x85\x81",
    "torch.load": b"ctorch.serialization\nload\n" + _text("weights.pt") + b"\x85R",
}


def _file(path: Path, value: bytes) -> None:
    """What ``torch.save({"weight": value})`` would have written."""
    content = b"\x80\2}" + _text("weight") + value + b"s."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(64))


def _load(path: Path) -> None:
    infinity.load_pretrained(nn.Linear(4, 4, bias=False), path)


@pytest.mark.deep(but=16)
@pytest.mark.parametrize("name", [*_ALLOCATING, *_RUNNING])
def test_a_hostile_pickle_is_an_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "weights.pt"
    _file(file, (_ALLOCATING | _RUNNING)[name])
    with pytest.raises(CheckpointError, match=r"weights\.pt"):
        _load(file)
    assert [each.name for each in tmp_path.iterdir()] == ["weights.pt"]


@pytest.mark.parametrize(
    ("offset", "size", "stride"), [(13, (4,), (1,)), (0, (4, 4), (1 << 61, 1)), (-1, (4,), (1,)), (0, (4,), (-1,))]
)
def test_a_tensor_stays_inside_its_storage(offset: int, size: Any, stride: Any, tmp_path: Path) -> None:
    def number(value: int) -> bytes:
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    storage = b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text("0") + _text("cpu") + number(16) + b"tQ"
    sizes = b"".join(b"(" + b"".join(map(number, each)) + b"t" for each in (size, stride))
    _file(
        tmp_path / "weights.pt", b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + sizes + b"\x89NtR"
    )
    with pytest.raises(CheckpointError):
        _load(tmp_path / "weights.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_values_are_those_that_torch_reads(zipped: bool, tmp_path: Path) -> None:
    from infinity.torch_internals.pickles import read_pickle
    from swapper.volumes.mapped_memory import map_file

    base = torch.arange(24.0)
    values = {
        "views": [base.view(4, 6).t(), base[3:9], base[:0], torch.tensor(5)],
        "dtypes": [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int8)],
        "further dtypes": [torch.ones(3).to(dtype) for dtype in (torch.uint16, torch.float8_e4m3fn)],
        "parameter": nn.Parameter(torch.ones(2)),
        "arrays": [
            np.arange(6.0).reshape(2, 3).T,
            np.array(["a", "bcd"]),
            np.array([b"x"]),
            np.zeros((0, 2)),
            np.ones(2, ">i4"),
        ],
        "numbers": [np.float64(2.5), np.int8(-1), np.bool_(True), 1 << 70, -1.5, None, True, 1j],
        "containers": [collections.OrderedDict(a=1), {1, 2}, (1, (2,)), {(1, "a"): 2}, b"bytes", bytearray(b"more")],
        "torch": [torch.Size([1, 2]), torch.float16, torch.device("cuda", 1)],
    }
    file = tmp_path / "values.pt"
    torch.save(values, file, _use_new_zipfile_serialization=zipped)
    found = read_pickle(file, map_file(file), lambda name: False)
    assert list(found) == list(values)
    for name, expected in values.items():
        for one, other in zip(found[name], expected, strict=True):
            if isinstance(other, torch.Tensor):
                assert one.dtype == other.dtype
                assert one.stride() == other.stride()
                assert torch.equal(
                    one.float() if other.dtype.itemsize == 1 else one,
                    other.float() if other.dtype.itemsize == 1 else other,
                )
            elif isinstance(other, np.ndarray | np.generic):
                assert one.dtype == other.dtype
                assert np.array_equal(one, other)
            else:
                assert one == other
    assert found["views"][0].data_ptr() == found["views"][1].data_ptr() - 12
    assert pickle.loads(pickle.dumps(found["numbers"])) == values["numbers"]
    assert io.BytesIO(found["containers"][4]).read() == b"bytes"
