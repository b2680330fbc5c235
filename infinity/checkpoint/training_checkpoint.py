"""Checkpoints: all that a training goes on from, written and read tensor by tensor, in bounded memory.

    DIRECTORY/latest                       the tag of the newest checkpoint
    DIRECTORY/TAG/rest.pt                  counters, scalars, hyperparameters, scheduler, loss scale, what the user added
    DIRECTORY/TAG/tensors.zarr             a zarr v3 group, one array per tensor and kind, each chunk with a crc32c
        parameters/FQN/weight              of the parameter's shape: the fp32 main weight of a trained one, else the weight
        parameters/FQN/exp_avg, ...        its element-wise states
        buffers/FQN

A checkpoint appears under its tag when it is whole and on the drive, and only then does ``latest`` name it. It knows
nothing of units, tiers or budgets: any setting of those loads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import nn

from infinity.errors import StorageError, UnsupportedModelError
from infinity.optim.facade.lazy_state import LazyEntry
from infinity.optim.main_weights import without_main_weight
from infinity.tiers.user_copies import UserCopies
from swapper.volumes.publish import Staging, exchange, locked, sync_tree

logger = logging.getLogger(__name__)

_FORMAT = 1
_CHUNK_BYTES = 16 << 20
_LATEST, _REST, _TENSORS = "latest", "rest.pt", "tensors.zarr"
_WEIGHT = "weight"
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_STORED_AS_THEY_ARE = frozenset(
    getattr(torch, name)
    for name in [
        "float64",
        "float32",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "uint16",
        "uint32",
        "bool",
        "complex64",
        "complex128",
    ]
)


@dataclass(frozen=True)
class Training:
    """What a checkpoint is made of, and where it goes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    copies: UserCopies
    read_weight: Callable[[nn.Parameter], torch.Tensor]
    """A copy of what the engine stores of a parameter: its main weight, or a frozen one's weight."""
    write_weight: Callable[[nn.Parameter, torch.Tensor], None]
    read_counters: Callable[[], dict[str, Any]]
    write_counters: Callable[[Mapping[str, Any]], None]


def save(training: Training, directory: Path, tag: str, client_state: Mapping[str, Any], *, is_latest: bool) -> None:
    """Write a checkpoint. One of that tag is replaced.

    Raises:
        StorageError: the directory cannot take it; what was there before is still there.
    """
    if not tag or "/" in tag or tag in (".", "..", _LATEST):
        raise ValueError(f"a checkpoint's tag must be the name of a directory, not {tag!r}")
    try:
        with Staging(directory, tag) as staging:
            folder = staging.path / "checkpoint"
            folder.mkdir()
            rest = {
                "format": _FORMAT,
                "client_state": dict(client_state),
                **_write_tensors(training, folder / _TENSORS),
            }
            rest["counters"] = training.read_counters()
            if hasattr(training.lr_scheduler, "state_dict"):
                rest["lr_scheduler"] = training.lr_scheduler.state_dict()
            torch.save(rest, folder / _REST)
            sync_tree(folder)
            with staging.file(_LATEST) as file:
                file.write(tag.encode())
            with locked(directory):
                exchange(folder, directory / tag)
                if is_latest:
                    staging.publish([], [], (_LATEST, _LATEST), lambda name: False)
    except OSError as error:
        raise StorageError(
            directory,
            f"cannot take the checkpoint: {error.strerror or error}",
            cure="Give a directory that can be written to, with more room",
        ) from error


def find(directory: Path, tag: str | None) -> Path | None:
    """The checkpoint of that tag, or the newest one; None without one."""
    if tag is None:
        latest = directory / _LATEST
        if not latest.is_file():
            return None
        tag = latest.read_text().strip()
    folder = directory / tag
    return folder if (folder / _REST).is_file() else None


def load(
    training: Training, folder: Path, *, is_strict: bool, with_optimizer: bool, with_scheduler: bool, only_module: bool
) -> dict[str, Any]:
    """Read a checkpoint into model, optimizer and scheduler. Returns what the user had added to it.

    Raises:
        UnsupportedModelError: it is of another model; nothing has been changed.
    """
    import zarr

    rest: dict[str, Any] = torch.load(folder / _REST, map_location="cpu", weights_only=False)
    group: Any = zarr.open_group(folder / _TENSORS, mode="r")
    arrays = {kind: dict(_arrays(group[kind])) for kind in ("parameters", "buffers")}
    parameters, buffers = dict(training.model.named_parameters()), _buffers(training.model)
    shapes = {"parameters": {k: tuple(v.shape) for k, v in parameters.items()}}
    shapes["buffers"] = {k: tuple(v.shape) for k, v in buffers.items()}
    for kind, wanted in shapes.items():
        _check(kind, {fqn: found[_WEIGHT] for fqn, found in arrays[kind].items()}, wanted, is_strict=is_strict)
    for fqn, buffer in buffers.items():
        if fqn in arrays["buffers"]:
            buffer.copy_(_read(arrays["buffers"][fqn][_WEIGHT], training.copies))
    for fqn, parameter in parameters.items():
        if fqn in arrays["parameters"]:
            training.write_weight(parameter, _read(arrays["parameters"][fqn][_WEIGHT], training.copies))
    if not only_module:
        optimizer = training.optimizer
        if with_optimizer and optimizer is not None and "param_groups" in rest:
            _load_optimizer(optimizer, rest, arrays["parameters"], training.copies)
        counters = dict(rest["counters"])
        if not with_optimizer:
            del counters["loss_scale"]  # DeepSpeed has it among the optimizer's states
        training.write_counters(counters)
        if with_scheduler and "lr_scheduler" in rest and hasattr(training.lr_scheduler, "load_state_dict"):
            training.lr_scheduler.load_state_dict(rest["lr_scheduler"])
    client_state: dict[str, Any] = rest["client_state"]
    return client_state


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    rest: Mapping[str, Any],
    arrays: Mapping[str, Mapping[str, Any]],
    copies: UserCopies,
) -> None:
    state: dict[Any, Any] = {}
    for key, (fqn, scalars) in rest["scalars"].items():
        state[key] = LazyEntry(_Stored(arrays.get(fqn, {}), scalars, copies), fqn)
    state.update(rest["others"])
    optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})


class _Stored:
    """A parameter's state as it is stored, see `infinity.optim.facade.lazy_state.Access`."""

    def __init__(self, arrays: Mapping[str, Any], scalars: Mapping[str, Any], copies: UserCopies) -> None:
        self._arrays = arrays
        self._scalars = scalars
        self._copies = copies

    def has_any(self) -> bool:
        return True

    def read(self) -> dict[str, Any]:
        states = {name: _read(array, self._copies) for name, array in self._arrays.items() if name != _WEIGHT}
        return {**self._scalars, **states}

    copy = read

    def replace(self, values: Mapping[str, Any]) -> None:
        raise TypeError("a checkpoint is not changed by what is loaded from it")


def _write_tensors(training: Training, path: Path) -> dict[str, Any]:
    """Write all tensors; returns what belongs into the rest."""
    import zarr

    group: Any = zarr.create_group(path, zarr_format=3)
    names: dict[int, str] = {}
    folder = group.create_group("parameters")
    for fqn, parameter in training.model.named_parameters():
        names[id(parameter)] = fqn
        _write(folder, f"{quote(fqn, safe='')}/{_WEIGHT}", training.read_weight(parameter))
    buffers = group.create_group("buffers")
    for fqn, buffer in _buffers(training.model).items():
        _write(buffers, f"{quote(fqn, safe='')}/{_WEIGHT}", buffer.detach())
    if training.optimizer is None:
        return {}
    saved = training.optimizer.state_dict()
    parameters = [p for group in training.optimizer.param_groups for p in group["params"]]
    ids = [key for group in saved["param_groups"] for key in group["params"]]
    scalars: dict[Any, tuple[str, dict[str, Any]]] = {}
    others: dict[Any, Any] = {}
    for key, parameter in zip(ids, parameters, strict=True):
        found = saved["state"].get(key)
        if found is None:
            continue
        if not isinstance(found, LazyEntry):
            others[key] = found
            continue
        if id(parameter) not in names:  # the model has it no more
            others[key] = found.gather()
            continue
        entry, _ = without_main_weight(found.gather())
        fqn = names[id(parameter)]
        large = [name for name, value in entry.items() if isinstance(value, torch.Tensor) and value.dim()]
        for name in large:
            _write(folder, f"{quote(fqn, safe='')}/{name}", entry[name])
        scalars[key] = fqn, {name: value for name, value in entry.items() if name not in large}
    return {"param_groups": saved["param_groups"], "scalars": scalars, "others": others}


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that a state dict has."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _arrays(group: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for _, folder in group.groups():
        found = dict(folder.arrays())
        if _WEIGHT in found:
            yield str(found[_WEIGHT].attrs["fqn"]), found


def _write(group: Any, name: str, value: torch.Tensor) -> None:
    from zarr.codecs import Crc32cCodec

    fqn = name.rpartition("/")[0]
    bits = value.resolve_conj().resolve_neg()
    if value.dtype not in _STORED_AS_THEY_ARE:
        bits = bits.contiguous().view(_BITS[value.dtype.itemsize])
    row_bytes = max(value[:1].numel() * value.dtype.itemsize, 1) if value.dim() else 1
    num_rows = max(_CHUNK_BYTES // row_bytes, 1)
    chunks = (min(num_rows, max(value.shape[0], 1)), *(max(n, 1) for n in value.shape[1:])) if value.dim() else ()
    array = group.create_array(
        name,
        shape=tuple(value.shape),
        dtype=str(torch.empty(0, dtype=bits.dtype, device="cpu").numpy().dtype),
        chunks=chunks,
        compressors=[Crc32cCodec()],
        attributes={"fqn": unquote(fqn), "dtype": str(value.dtype).removeprefix("torch.")},
    )
    if not value.dim():
        array[...] = bits.cpu().numpy()
        return
    if value.numel():
        for start in range(0, value.shape[0], chunks[0]):
            array[start : start + chunks[0]] = bits[start : start + chunks[0]].cpu().numpy()


def _read(array: Any, copies: UserCopies) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, array.attrs["dtype"])
    shape = tuple(array.shape)
    stored = dtype if dtype in _STORED_AS_THEY_ARE else _BITS[dtype.itemsize]
    if not shape:
        return torch.from_numpy(np.array(array[...])).view(dtype).reshape(())
    stride = torch.empty(shape, device="meta", dtype=torch.float32).stride()
    row_numel = torch.Size(shape[1:]).numel()
    with copies.new(shape, stride, dtype) as made:
        for start in range(0, shape[0] if row_numel else 0, array.chunks[0]):
            part = torch.from_numpy(array[start : start + array.chunks[0]]).view(stored)
            made.write(start * row_numel, part.reshape(-1).view(dtype))
        return made.finish()


def _check(kind: str, found: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]], *, is_strict: bool) -> None:
    problems = [
        f"'{fqn}' has shape {tuple(found[fqn].shape)}, not {shape}"
        for fqn, shape in wanted.items()
        if fqn in found and tuple(found[fqn].shape) != shape
    ]
    if is_strict:
        problems += [f"'{fqn}' is missing" for fqn in wanted if fqn not in found]
        problems += [f"'{fqn}' is not in the model" for fqn in found if fqn not in wanted]
    if problems:
        shown, num_others = "; ".join(problems[:4]), len(problems) - 4
        more = f" and {num_others} more" if num_others > 0 else ""
        raise UnsupportedModelError(
            f"the checkpoint's {kind} are not the model's: {shown}{more}",
            cure="Make the model as it was, or pass load_module_strict=False to leave out what only one of them has",
        )
