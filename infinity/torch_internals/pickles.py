"""Reads files of ``torch.save`` as data: nothing in them is run, and tensors are views of the mapped file.

[Note: foreign pickles] A pickle names classes and functions, and unpickling calls them, also with arguments that
corrupt memory (dtypes and arrays of NumPy, sparse and nested tensors of torch). Here a name is only a name. A few names
stand for data: strided tensors over checked ranges of the file, NumPy arrays of plain numbers over checked bytes, sets
and ordered dicts. Every other object becomes a `Record` of what the file says about it.

Python's unpickler in C trusts sizes and indices in the file, so the one in Python is used. The file's size limits what
it may expand to: objects can refer to each other so that a hundred bytes describe more than any memory holds.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import zipfile
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from infinity.torch_internals.names import DTYPES

# Limits for hostile files. They are far above what checkpoints of trainings have, and far below what harms a machine.
_MOST_DEPTH = 100  # of nested containers: `_Size.check` recurses
_SPARE_BYTES = 64 << 20
# Elements that may be passed to calls beyond twice the pickle's bytes: bounds the time to read, see `_charge`.
_SPARE_WORK = 1 << 20
# Written out with all repetitions, the content may have 8 times the file's bytes, and 64 MiB more.
_MOST_EXPANSION = 8
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # torch's, the first pickle of a file from before torch 1.6
# "FloatStorage" -> torch.float32, ...; without the quantized ones, whose tensors need more than a storage.
_dtypes: Any = torch.storage._dtype_to_storage_type_map()
_STORAGES = {str(name): dtype for dtype, name in _dtypes.items() if not name.startswith("Q")}
# Classes that occur as arguments of known calls. They are no objects in the file, so they are not reported as unknown.
_TYPES = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage", "numpy.ndarray"}
# Types of dict keys and set elements. Compared by `type`, as hashing anything else may run code or take very long.
_KEYS = {str, bytes, bool, int, float, complex, type(None), torch.dtype}
_Memory = npt.NDArray[np.uint8]


class DamagedPickleError(Exception):
    """A file is not what ``torch.save`` writes; the message is the reason."""


@dataclass(eq=False)
class Record:
    """Stands for an object of a class that is not imported, or for the class itself.

    Attributes:
        name: the class or function, with its module.
        arguments: of the call that the pickle asks for; None for the class itself.
        state: the object's attributes, by name.
    """

    name: str
    arguments: tuple[Any, ...] | None = None
    state: dict[str, Any] = field(default_factory=dict)


def read_pickle(path: Path, data: _Memory, is_known: Callable[[str], bool]) -> Any:
    """Read a file of ``torch.save``: see [Note: foreign pickles]. Tensors are views of ``data``.

    Args:
        path: the file.
        data: its bytes, mapped.
        is_known: whether the file may have objects of a class of that name.

    Raises:
        DamagedPickleError: it is not what ``torch.save`` writes.
        UnknownObjectsError: it has objects of other classes.
        OSError: the file cannot be opened.
    """
    try:
        unpickler = (_zipped if zipfile.is_zipfile(path) else _legacy)(path, data)
        found, unknown = unpickler.load(), sorted(name for name in unpickler.names if not is_known(name))
        if not unknown:
            _Size(_MOST_EXPANSION * data.size + _SPARE_BYTES).check(found)
    except OSError:
        raise
    except Exception as error:  # hostile bytes reach zipfile, numpy and torch, which raise many kinds
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DamagedPickleError(reason) from error
    if unknown:
        raise UnknownObjectsError(unknown)
    return found


class UnknownObjectsError(DamagedPickleError):
    """A file has objects of classes that the caller does not know."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"it holds objects of {', '.join(names)}, and no class of others is run for it")
        self.names = names


def _zipped(path: Path, data: _Memory) -> _Unpickler:
    # Since torch 1.6: NAME/data.pkl, NAME/data/0, NAME/data/1, ..., NAME/byteorder, NAME/version: not compressed.
    with zipfile.ZipFile(path) as archive:
        members = {each.filename: each for each in archive.infolist()}
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ValueError("it is a zip archive without the one 'data.pkl' that torch.save writes")
    folder = pickles[0].removesuffix("data.pkl")

    def record(name: str) -> _Memory:
        member = members[folder + name]
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise ValueError(f"'{name}' in it is compressed or encrypted, as torch.save never does")
        # The directory at the end of the archive has the local header's offset, and the data follow that header: 30
        # bytes, of which 26-27 and 28-29 are the lengths of the name and of an extra field. torch pads by the extra
        # field, so that data begin at multiples of 64.
        head = data[member.header_offset : member.header_offset + 30].tobytes()
        start = (
            member.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        )
        found = data[start : start + member.file_size]
        if head[:4] != b"PK\3\4" or found.size != member.file_size:
            raise ValueError(f"it ends inside of '{name}'")
        return found

    if folder + "byteorder" in members and record("byteorder").tobytes() != sys.byteorder.encode():
        raise ValueError("it was written on a machine with another order of bytes")
    # The pickle alone is checked: checksums of the tensors would cost a pass over the file.
    content = record("data.pkl").tobytes()
    if zlib.crc32(content) != members[pickles[0]].CRC:
        raise ValueError("Bad CRC-32 of 'data.pkl'")
    return _Unpickler(io.BytesIO(content), lambda key, num_bytes: record(f"data/{key}"), len(content))


def _legacy(path: Path, data: _Memory) -> _Unpickler:
    """Open a file from before torch 1.6 (``_use_new_zipfile_serialization=False``)."""
    # | magic | protocol | sizes of types | the object | list of storage keys | 8 bytes: numel | data | 8 bytes | data |
    # ... The first five are pickles. The object refers to storages by key, and only the list says in which order they
    # follow. So the object is read twice: first for the sizes of its storages, and then with their places.
    sizes: dict[str, int] = {}

    def note(key: str, num_bytes: int) -> _Memory:
        sizes[key] = num_bytes
        return np.empty(0, dtype=np.uint8)

    with path.open("rb") as file:
        if _Unpickler(file, note, data.size).load() != _LEGACY_MAGIC:
            raise ValueError("it is no file of torch.save")
        for _ in ("the version", "sizes of the machine"):
            _Unpickler(file, note, data.size).load()
        begin = file.tell()
        _Unpickler(file, note, data.size, is_trial=True).load()
        keys, start = _Unpickler(file, note, data.size).load(), file.tell()
        file.seek(begin)
        content = file.read(start - begin)
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        places[key] = start + 8, sizes[_text(key)]
        start += 8 + sizes[key]
    if start > data.size:
        raise ValueError(f"it has {data.size} bytes, and its tensors end at {start}")

    def record(key: str, num_bytes: int) -> _Memory:
        begin, size = places[key]
        return data[begin : begin + size]

    return _Unpickler(io.BytesIO(content), record, len(content))


@dataclass
class _Storage:
    data: torch.Tensor


@dataclass(eq=False)
class _NumpyType(Record):
    """A dtype of plain numbers or text, such as "f8" or "U10". Its code is checked before NumPy sees it."""

    code: str = ""
    order: str = "="

    def made(self) -> np.dtype[Any]:
        # Not "O": an array of objects holds pointers, which would come from the file. Sizes up to 1 MiB per element.
        kind, size = self.code[:1], self.code[1:]
        if kind not in "biufcSU" or not (size.isascii() and size.isdecimal()) or int(size) > 1 << 20:
            raise ValueError(f"it holds an array of NumPy's type {self.code!r}, which is not plain numbers")
        return np.dtype(("" if self.order == "|" else self.order) + self.code)

    def set_state(self, state: Any) -> None:
        # numpy.dtype.__setstate__: (version, order, subdtype, names, fields, itemsize, alignment, flags). A plain dtype
        # has None for the three in the middle.
        _version, order, *fields, item_bytes, _alignment, _flags = state[:8]
        if order not in ("<", ">", "|", "=") or any(each is not None for each in fields):
            raise ValueError("it holds an array of one of NumPy's structured types")
        self.order = order
        if self.code in ("S", "U") and type(item_bytes) is int and item_bytes >= 0:
            self.code += str(item_bytes // (4 if self.code == "U" else 1))  # "U" has 4 bytes per character


@dataclass(eq=False)
class _UnbuiltArray:
    """An array whose values come later, in a BUILD opcode. ``memo``: its indices in the unpickler's memo."""

    memo: list[Any] = field(default_factory=list)


# Other objects may refer to an array by its memo index. `_reconstruct` makes an empty one, and BUILD cannot fill it in
# place, so the memo is told to remember under which indices it is, and `load_build` replaces it there.
class _Memo(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, _UnbuiltArray):
            value.memo.append(key)
        super().__setitem__(key, value)


def _array(dtype: Any, shape: Any, data: Any, order: str = "C") -> npt.NDArray[Any]:
    shape, made = _sizes(shape), dtype.made()
    if type(data) is str:  # bytes of protocol 2 that were not marked as such
        data = data.encode("latin1")
    if type(data) not in (bytes, bytearray) or len(data) != math.prod(shape) * made.itemsize:
        raise ValueError(f"an array of shape {shape} in it has another number of bytes")
    if not made.itemsize:
        return np.zeros(shape, dtype=made)
    # Four bytes may be no code point. That is refused before Python makes a string of them.
    if made.kind == "U" and int(np.frombuffer(data, made.byteorder + "u4").max(initial=0)) > sys.maxunicode:
        raise ValueError("text in an array in it is none")
    return np.frombuffer(data, made).reshape(shape, order="F" if order == "F" else "C")


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list) or not all(type(each) is int and 0 <= each < 1 << 62 for each in values):
        raise ValueError("the shape of a tensor in it is none")
    if len(values) > 64:  # the most that torch allows
        raise ValueError(f"a tensor in it has {len(values)} dimensions")
    return tuple(values)


def _text(value: Any) -> str:
    """Return ``value`` if it is a string, else raise."""
    # Never str(value): the text of nested lists that refer to each other may have more characters than memory.
    if type(value) is not str:
        raise TypeError(f"it has a {type(value).__name__} where a text should be")
    return value


def _key(value: Any) -> Hashable:
    """Return ``value`` if it may be a dict key: its hash runs no code from the file, and takes little time."""
    if type(value) in _KEYS:
        return value  # type: ignore[no-any-return]
    parts = value if type(value) is tuple else (value,)
    if not all(isinstance(each, Record) or type(each) in _KEYS for each in parts):
        raise ValueError(f"a {type(value).__name__} in it is used as a key")
    return value  # type: ignore[no-any-return]


_Base: Any = pickle._Unpickler  # the implementation in Python, which `pickle.Unpickler` is not


class _Unpickler(_Base):  # type: ignore[misc]
    """Python's unpickler, in which names do nothing, and containers are checked before they are used."""

    # Opcode -> method. Left out: extension codes (a registry of classes), the calls of protocol 0 and 1, persistent ids
    # as text, and out-of-band buffers. torch.save writes none of them.
    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code: function
        for code, function in _Base.dispatch.items()
        if bytes([code]) not in (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ, pickle.PERSID)
        and bytes([code]) not in (pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)
    }

    def __init__(
        self, file: Any, record: Callable[[str, int], _Memory], num_bytes: int, *, is_trial: bool = False
    ) -> None:
        """
        Args:
            file: the pickle.
            record: returns the bytes of a storage by its key and expected number of bytes.
            num_bytes: of the pickle.
            is_trial: make None in place of tensors: only the storages' sizes are wanted.
        """
        super().__init__(file)
        self.memo = _Memo()
        self.names: set[str] = set()
        """Names of classes and functions that are not known here."""
        self._record = record
        self._is_trial = is_trial
        self._storages: dict[tuple[str, torch.dtype], _Storage] = {}
        self._left = 2 * num_bytes + _SPARE_WORK

    # ---------------------------------------------------------------------------------------------------------- names

    def find_class(self, module: str, name: str) -> Any:
        """Return a `Record` for a name, and import nothing."""
        # Names of Python 2, and of NumPy 2, which renamed `numpy.core`.
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if full not in _KNOWN and full not in _TYPES and full.removeprefix("torch.") not in _STORAGES:
            self.names.add(full)
        return Record(full)

    def persistent_load(self, saved_id: Any) -> _Storage:
        """Make a storage from its persistent id: ("storage", type, key, location, numel), and None for a view."""
        kind, stored_as, key, _device, numel, *view = saved_id
        if kind != "storage" or type(key) is not str or type(numel) is not int or any(view) or numel < 0:
            raise ValueError("it refers to something else than a storage")
        if not isinstance(stored_as, Record) or stored_as.arguments is not None:
            raise ValueError("a storage in it has no type")
        package, _, name = stored_as.name.rpartition(".")
        dtype = torch.uint8 if name == "UntypedStorage" else _STORAGES.get(name if package == "torch" else "")
        if dtype is None:
            raise ValueError(f"it holds elements of '{stored_as.name}'")
        if (key, dtype) not in self._storages:
            num_bytes = numel * dtype.itemsize
            data = self._record(key, num_bytes)
            if data.size < num_bytes and not self._is_trial:
                raise ValueError(f"storage '{key}' has {data.size} bytes, not {num_bytes}")
            flat = torch.from_numpy(data[:num_bytes]) if data.size else torch.empty(0, dtype=torch.uint8, device="cpu")
            if flat.data_ptr() % dtype.itemsize:  # legacy files do not align storages, and kernels need that
                flat = flat.clone()
            self._storages[key, dtype] = _Storage(flat.view(dtype))
        return self._storages[key, dtype]

    def _called(self, function: Any, arguments: Any) -> Any:
        # A known function makes data of its arguments, and every other call becomes a record of itself.
        if not isinstance(function, Record) or function.arguments is not None or type(arguments) is not tuple:
            raise ValueError(f"it calls a {type(function).__name__}")
        self._charge(sum(len(each) for each in arguments if isinstance(each, str | bytes | tuple | list | dict | set)))
        known = _KNOWN.get(function.name)
        if known is not None:
            return known(self, *arguments)
        return Record(function.name, arguments)

    def _charge(self, amount: int) -> None:
        # Each element that is copied takes one of `_left`. A memoized list costs a few bytes to refer to again, so a
        # small file could ask for any amount of copying.
        self._left -= amount
        if self._left < 0:
            raise ValueError("it describes far more than it holds")

    def _tensor(
        self,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        _requires_grad: Any = False,
        _hooks: Any = None,
        metadata: Any = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        if self._is_trial:
            return None
        if metadata or not isinstance(storage, _Storage):
            raise ValueError("a tensor in it is conjugated or has no storage")
        size, stride, (offset,) = _sizes(size), _sizes(stride), _sizes((offset,))
        flat = storage.data
        if dtype is not None:  # of _rebuild_tensor_v3: an untyped storage and a dtype that has no storage class
            flat = flat.view(torch.uint8)
            flat = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].clone().view(dtype)
        # Index of the last element: shape (3, 4), strides (4, 1), offset 2 -> 2 + 2 * 4 + 3 * 1 = 13.
        last = offset + sum((num - 1) * step for num, step in zip(size, stride, strict=True))
        if math.prod(size) and last >= flat.numel():
            raise ValueError(f"a tensor in it ends at element {last}, and its storage at {flat.numel()}")
        if not math.prod(size):
            return torch.empty(size, dtype=flat.dtype, device="cpu")
        return flat.as_strided(size, stride, offset)

    # ---------------------------------------------------------------------------------------------------------- opcodes

    def load_reduce(self) -> None:
        """REDUCE: a call."""
        arguments = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], arguments)

    def load_newobj_ex(self) -> None:
        """NEWOBJ_EX: the same with keyword arguments, which are recorded as state."""
        named = self.stack.pop()
        self.load_reduce()
        if named:
            self._set_state(self.stack[-1], named)

    def load_build(self) -> None:
        """BUILD: the state of an object."""
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, _UnbuiltArray):
            _version, shape, dtype, is_fortran, data = state
            built = _array(dtype, shape, data, "F" if is_fortran else "C")
            self.stack[-1] = built
            for index in made.memo:
                self.memo[index] = built
        else:
            self._set_state(made, state)

    def _set_state(self, made: Any, state: Any) -> None:
        if isinstance(made, _NumpyType):
            made.set_state(state)
        elif isinstance(made, Record) and made.arguments is not None:
            # An object with __slots__ has a pair as its state: (__dict__ or None, values of slots).
            slots = state[1] if type(state) is tuple and len(state) == 2 else None
            for part in (state[0], slots) if slots is not None else (state,):
                if type(part) is dict:
                    self._charge(len(part))
                    made.state.update(part)
        elif not isinstance(made, dict | torch.Tensor):  # an OrderedDict's or parameter's attributes are dropped
            raise ValueError(f"it has a state for a {type(made).__name__}")

    def _append(self, values: list[Any]) -> None:
        made = self.stack[-1]
        if type(made) is list:
            made.extend(values)
        elif not isinstance(made, Record):  # a subclass of list: its elements are not kept
            raise ValueError(f"it appends to a {type(made).__name__}")

    def load_dict(self) -> None:
        """DICT: a dict of everything after the mark on the stack."""
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def _set_items(self, items: list[Any]) -> None:
        made = self.stack[-1]
        if type(made) is dict:
            for key, value in zip(items[::2], items[1::2], strict=True):
                made[_key(key)] = value
        elif not isinstance(made, Record):
            raise ValueError(f"it sets an item of a {type(made).__name__}")

    def load_additems(self) -> None:
        """ADDITEMS: elements of a set."""
        values, made = self.pop_mark(), self.stack[-1]
        if type(made) is not set:
            raise ValueError(f"it adds to a {type(made).__name__}")
        made.update(map(_key, values))

    for _code, _function in {
        pickle.REDUCE: load_reduce,
        pickle.NEWOBJ: load_reduce,  # an object made by ``__new__``
        pickle.NEWOBJ_EX: load_newobj_ex,
        pickle.BUILD: load_build,
        pickle.APPEND: lambda self: self._append([self.stack.pop()]),
        pickle.APPENDS: lambda self: self._append(self.pop_mark()),
        pickle.SETITEM: lambda self: self._set_items([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS: lambda self: self._set_items(self.pop_mark()),
        pickle.DICT: load_dict,
        pickle.ADDITEMS: load_additems,
        pickle.FROZENSET: lambda self: self.append(frozenset(map(_key, self.pop_mark()))),
    }.items():
        dispatch[_code[0]] = _function


def _ordered(_: _Unpickler, pairs: Any = ()) -> dict[Hashable, Any]:
    if isinstance(pairs, dict):
        return dict(pairs)
    return {_key(key): value for key, value in pairs}


def _encoded(_: _Unpickler, text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("it encodes text by something else than latin1")
    return _text(text).encode("latin1")


def _device(_: _Unpickler, kind: str, index: int | None = None) -> torch.device:
    return torch.device(_text(kind) if index is None else f"{_text(kind)}:{int(index)}")


_KNOWN: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": lambda made, *arguments: made._tensor(*arguments),
    "torch._utils._rebuild_tensor_v2": lambda made, *arguments: made._tensor(*arguments),
    "torch._utils._rebuild_tensor_v3": lambda made, storage, offset, size, stride, grad, hooks, dtype, more=None: (
        made._tensor(storage, offset, size, stride, grad, hooks, more, dtype=dtype)
    ),
    "torch._utils._rebuild_parameter": lambda made, data, *more: data,
    "torch._utils._rebuild_parameter_with_state": lambda made, data, *more: data,
    # torch saves a tensor with attributes, or of a subclass, by this function around the usual one.
    "torch._tensor._rebuild_from_type_v2": lambda made, function, kind, arguments, state: made._called(
        function, arguments
    ),
    "torch.Size": lambda made, sizes=(): _sizes(sizes),
    "torch.device": _device,
    "collections.OrderedDict": _ordered,
    "collections.Counter": _ordered,
    "builtins.set": lambda made, values=(): set(map(_key, values)),
    "builtins.frozenset": lambda made, values=(): frozenset(map(_key, values)),
    "builtins.bytes": lambda made, values=b"": bytes(_encoded(made, values) if isinstance(values, str) else values[:]),
    "builtins.bytearray": lambda made, values=b"", encoding="latin1": bytearray(
        values if isinstance(values, bytes) else _encoded(made, values, encoding)
    ),
    "builtins.complex": lambda made, real=0.0, imag=0.0: complex(float(real), float(imag)),
    "_codecs.encode": _encoded,
    "numpy.dtype": lambda made, code, *flags: _NumpyType("numpy.dtype", (), code=_text(code)),
    "numpy.core.multiarray._reconstruct": lambda made, *arguments: _UnbuiltArray(),
    "numpy.core.multiarray.scalar": lambda made, dtype, data: _array(dtype, (), data)[()],
    "numpy.core.numeric._frombuffer": lambda made, data, dtype, shape, order: _array(dtype, shape, data, order),
}
"""Functions that make numbers and containers, by the name in the file. Arguments: the unpickler, and those in the
file."""


class _Size:
    """The size of an object when everything that it refers to is written out, with repetitions."""

    # Worked example: a = [1] * 10, b = [a] * 10, c = [b] * 10 is 30 references in the file. a counts 11, b 1 + 10 * 11
    # = 111, c 1 + 10 * 111 = 1111. Each object is computed once, so this takes linear time.

    def __init__(self, most: int) -> None:
        """``most``: `check` refuses what is larger."""
        self._most = most
        # id() of an object -> its size, and how deep containers are nested in it.
        self._known: dict[int, tuple[int, int]] = {}

    def check(self, value: Any, depth: int = 0) -> tuple[int, int]:
        """Return the size, and the depth of nested containers.

        Raises:
            ValueError: a limit is exceeded, or the object refers to itself.
        """
        if depth > _MOST_DEPTH:
            raise ValueError("containers in it are inside each other without end")
        if id(value) not in self._known:
            inner = [self.check(each, depth + 1) for each in self._inner(value)]
            total = self._own(value) + sum(size for size, _ in inner)
            self._known[id(value)] = total, 1 + max((height for _, height in inner), default=0)
        total, height = self._known[id(value)]
        # A known object may be found again at a greater depth, so its height is kept too.
        if total > self._most or depth + height > _MOST_DEPTH + 1:
            raise ValueError("it describes far more than it holds")
        return total, height

    @staticmethod
    def _own(value: Any) -> int:
        if isinstance(value, torch.Tensor | np.ndarray):
            return int(value.nbytes)
        if isinstance(value, str | bytes | bytearray):
            return 1 + len(value)
        if isinstance(value, _UnbuiltArray | _Storage):
            raise ValueError("it has an array without values, or a storage without a tensor")
        return 1

    @staticmethod
    def _inner(value: Any) -> list[Any]:
        if isinstance(value, Record):
            return [value.arguments or (), value.state]
        if isinstance(value, dict):
            return [*value.keys(), *value.values()]
        return list(value) if isinstance(value, list | tuple | set | frozenset) else []
