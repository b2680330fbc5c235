"""Saves a training to a checkpoint, streamed in bounded memory, also while training goes on.

A checkpoint depends on no budget, tier or number of processes. Its format: docs/reference/checkpoint-format.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.arrays import ArraySpec, name_of
from infinity.checkpoint.record_stream import AHEAD_BYTES
from infinity.checkpoint.saved import BASE, EXCLUDED, EXCLUDED_CHECKSUMS, TIED, CheckpointFiles, writing
from infinity.checkpoint.state_access import StateAccess
from infinity.device.compute import ComputeDevice
from infinity.errors import CheckpointError, EngineClosedError, ModelError
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.metrics.progress import progress
from infinity.numerics.chunk_format import WEIGHT
from infinity.numerics.raw_bytes import checksum, raw_bytes, rows_of
from infinity.optim.facade.lazy_state import LazyEntry
from infinity.optim.groups import TiledGroups
from infinity.optim.main_weights import without_main_weight
from infinity.paging.parameter_map import ParameterMap
from infinity.threads.openmp import one_thread
from infinity.tiers.user_copies import NewCopy
from infinity.units.buffers import persistent_buffers
from infinity.units.layout import Slot
from infinity.units.tiles import parameters_with_states, tiled_in, untiled_name, whole_parameters
from infinity.units.unit import Unit
from swapper import Latch
from swapper.sync.limits import start_threads
from swapper.wrappers.checksum import crc32c

logger = logging.getLogger(__name__)

_PART_BYTES = 4 << 20  # of a whole tensor that are made contiguous and written at a time
_CHECKED_BYTES = 1 << 20  # of a frozen weight that are read for its checksum at a time


@dataclass(frozen=True)
class Training:
    """The parts of an engine that a checkpoint is made from and loaded into."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    access: StateAccess
    parameter_map: ParameterMap
    coordinator: ParameterCoordinator
    read_rest: Callable[[], dict[str, Any]]
    """Returns counters, random states and other entries of training.json."""
    tiled: TiledGroups
    """Which parameters are tiles of a weight. Checkpoints have the weight, not its tiles."""


@dataclass(frozen=True)
class _Planned:
    """A tensor that is to be saved."""

    spec: ArraySpec
    """Tiles of one weight have the same spec: their elements follow each other in one array."""
    value: Callable[[], torch.Tensor] | None
    """Returns the tensor; ``unit`` has to be open then, if given. None: its elements come from the unit's records."""
    unit: Unit | None = None
    slot: Slot | None = None


# ------------------------------------------------------------------------------------------------------ what is written


def _plan(training: Training, *, excludes_frozen: bool) -> tuple[list[_Planned], dict[str, Any]]:
    """All tensors to be saved, and the optimizer's part of training.json."""
    found: list[_Planned] = []
    names = {id(parameter): fqn for fqn, parameter in parameters_with_states(training.model).items()}
    tiles = tiled_in(training.model)
    formats = packed_in(training)
    excluded = _frozen(training) if excludes_frozen else {}
    # Packed weights are never saved: the checkpoint has the base's name and their checksums.
    excluded |= {id(p): fqn for name, p in training.model.named_parameters() if (fqn := untiled_name(name)) in formats}
    for fqn, parameter in training.model.named_parameters():
        if id(parameter) in excluded:
            continue
        if not training.parameter_map.holds(parameter):
            found.append(_whole("parameters", fqn, WEIGHT, parameter.detach()))
            continue
        unit, slot = training.parameter_map.locate(parameter)
        kinds = [WEIGHT, *training.access.stream.names_of(unit, slot)] if slot.spec.is_trainable else [WEIGHT]
        for kind in kinds:
            # A trained parameter is saved as its fp32 main weight: the model weight is its cast.
            dtype = torch.float32 if slot.spec.is_trainable else slot.spec.dtype
            tiled, _ = tiles.get(id(parameter), (None, 0))
            name, shape = fqn, slot.spec.shape
            if tiled is not None and (kind == WEIGHT or not tiled.has_own_states):
                name, shape = tiled.fqn, tiled.shape
            spec = ArraySpec.of("parameters", name, kind, shape, dtype)
            found.append(_Planned(spec, None if slot.spec.is_trainable else partial(unit.weight, slot), unit, slot))
    found += [_whole("buffers", fqn, WEIGHT, buffer.detach()) for fqn, buffer in persistent_buffers(training.model)]
    omitted: dict[str, Any] = {TIED: _tied(training.model)}
    if excluded:
        omitted[EXCLUDED] = list(dict.fromkeys(excluded.values()))
        sums = checksums_of(training, omitted[EXCLUDED])
        omitted[EXCLUDED_CHECKSUMS] = {fqn: list(each) for fqn, each in sums.items()}
        base = getattr(getattr(training.model, "config", None), "_name_or_path", None)
        omitted[BASE] = {"name": str(base or ""), "formats": formats}
    if training.optimizer is None:
        return found, omitted
    # Of a held parameter this has a `LazyEntry`, which has read nothing: its element-wise states are written later,
    # from records. Other parameters' states are ordinary entries.
    saved = training.optimizer.state_dict()
    parameters = training.tiled.without_tiles([p for group in training.optimizer.param_groups for p in group["params"]])
    ids = [key for group in saved["param_groups"] for key in group["params"]]
    states: list[Any] = []
    others: dict[Any, Any] = {}
    for key, parameter in zip(ids, parameters, strict=True):
        entry = saved["state"].get(key)
        fqn_or_none = names.get(id(parameter))
        if entry is None:
            continue
        if not isinstance(entry, LazyEntry):
            others[key] = entry
        elif fqn_or_none is None:  # removed from the model since
            others[key], _ = without_main_weight(entry.gather())
        elif training.access.has_state(first := training.tiled.all_of(parameter)[0]):
            states.append([key, fqn_or_none, training.access.scalars(first)])
        else:  # not updated yet: states that the optimizer's constructor made
            started, _ = without_main_weight(entry.gather())
            large = {name: each for name, each in started.items() if isinstance(each, torch.Tensor) and each.dim()}
            found += [_whole("parameters", fqn_or_none, name, each) for name, each in large.items()]
            states.append([key, fqn_or_none, {name: each for name, each in started.items() if name not in large}])
    named = {key: names[id(p)] for key, p in zip(ids, parameters, strict=True) if id(p) in names}
    optimizer = {**omitted, "param_groups": saved["param_groups"], "states": states, "others": others}
    return found, {**optimizer, "names": named} if len(named) == len(ids) else optimizer


def _tied(model: nn.Module) -> dict[str, str]:
    """Other FQNs of a tied parameter or buffer -> the first one."""
    first: dict[int, str] = {}
    found = {}
    for each in (model.named_parameters, model.named_buffers):
        for name, tensor in each(remove_duplicate=False):
            fqn = untiled_name(name)
            if first.setdefault(id(tensor), fqn) != fqn:
                found[fqn] = first[id(tensor)]
    return found


def _frozen(training: Training) -> dict[int, str]:
    """id of a frozen parameter -> its FQN; for a tile, the whole weight's FQN."""
    tiles, places = tiled_in(training.model), training.parameter_map.places
    frozen = ((fqn, id(p)) for fqn, p in training.model.named_parameters() if not p.requires_grad)
    # A parameter that was frozen after `initialize` may have been trained before, so its base does not have its values.
    frozen = ((fqn, key) for fqn, key in frozen if key not in places or not places[key][1].spec.is_trainable)
    return {key: tiles[key][0].fqn if key in tiles else fqn for fqn, key in frozen}


def packed_in(training: Training) -> dict[str, str]:
    """FQN -> `frozen_dtype` of the weights that are stored packed."""
    places = training.parameter_map.places
    specs = ((name, places[id(p)][1].spec) for name, p in training.model.named_parameters() if id(p) in places)
    return {untiled_name(name): spec.packed for name, spec in specs if spec.packed is not None}


def checksums_of(training: Training, fqns: Collection[str]) -> dict[str, tuple[str, int]]:
    """FQN -> dtype, and crc32c of the elements in C order, of parameters as they are now."""
    found = {}
    for fqn, parameter in whole_parameters(training.model).items():  # a unit's parameters are neighbours
        if fqn in fqns:
            parts = training.tiled.all_of(parameter)
            after = 0
            for part in parts:
                after = _checksum_of(training, part, after)
            found[fqn] = name_of(parts[0].dtype), after
    return found


def _checksum_of(training: Training, parameter: torch.Tensor, before: int) -> int:
    """crc32c of data with the checksum ``before``, followed by this frozen parameter."""
    if not training.parameter_map.holds(parameter):
        return _continued(before, parameter)
    unit, slot = training.parameter_map.locate(parameter)
    unit.detect_writes()
    # The next save does not read the base again: its checksums are kept until `store_modified` stores a change.
    # Weights in RAM may change in ways that no counter sees (through NumPy), and take no drive's time.
    is_known_later = not unit.is_persistent and slot.index not in unit.dirty
    # A tile's checksum depends on the tiles before it, which are in other units and may have changed.
    known_before, known = unit.stored_checksums.get(slot.index, (None, 0))
    if is_known_later and known_before == before:
        return known
    with training.coordinator.opened(unit):
        found = _continued(before, unit.weight(slot))
    if is_known_later:
        unit.stored_checksums[slot.index] = before, found
    return found


def _continued(before: int, values: torch.Tensor) -> int:
    for rows in rows_of(values, _CHECKED_BYTES):
        before = crc32c(raw_bytes(rows).numpy(), after=before)
    return before


def _whole(group: str, fqn: str, kind: str, value: torch.Tensor) -> _Planned:
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise ModelError(
            f"'{fqn}' is {'on the meta device' if value.is_meta else 'sparse or quantized'}, and cannot be stored in "
            "a checkpoint",
            cure="Make it a dense tensor, or register it with persistent=False",
            fqn=fqn,
        )
    return _Planned(ArraySpec.of(group, fqn, kind, value.shape, value.dtype), lambda: value)


# -------------------------------------------------------------------------------------------------------------- writing


class Saving:
    """One save of a checkpoint. It replaces a checkpoint of the same tag.

    The constructor writes what may change at any time without notice: buffers, frozen weights, parameters that the
    engine does not hold, and training.json. `run` writes the records of all units, in any thread. Whoever changes a
    unit's weights or states meanwhile calls `wait_for` before; that unit is then saved next.
    """

    def __init__(
        self,
        training: Training,
        directory: Path,
        tag: str,
        client_state: Mapping[str, Any],
        *,
        is_latest: bool,
        keep_last: int | None = None,
        is_watching: bool = False,
        excludes_frozen: bool = False,
        shows_progress: bool = False,
    ) -> None:
        """
        Args:
            is_watching: training goes on during `run`.
            excludes_frozen: leave out frozen parameters.
            shows_progress: on the terminal.

        Raises:
            StorageError: the directory cannot be written to or is full; its old checkpoints are still there.
        """
        planned, optimizer = _plan(training, excludes_frozen=excludes_frozen)
        self.folder = directory / tag
        # No reference to the engine from here: the update stream and the stored weights refer to this object, and the
        # engine would never be garbage-collected.
        # On several ranks, the stream that gathers the shards.
        self._records = training.access.gathered_stream or training.access.stream
        self._units = training.parameter_map.units
        self._tensor_writers: dict[tuple[int, int, str], _TensorWriter] = {}
        self._left: dict[int, int] = {}
        """Unit index -> number of its tensors that are not saved yet. A unit without any is removed."""
        # Guards `_left` and `_wanted`: `run` changes them in its thread, `wait_for` in threads of training.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # entered by its lock: see [Note: bells] in swapper.sync.bell
        # In the background, leave staging buffers and the drive to training: read one record ahead, and write with 2
        # threads in place of 8.
        self._ahead_bytes = 0 if is_watching else AHEAD_BYTES
        self._wanted: deque[int] = deque()
        """Units that `wait_for` is waiting for, the first one first."""
        self._tiles_before = _find_tiles_before(training)  # these are saved first, see `_in_turn`
        specs = list(dict.fromkeys(each.spec for each in planned))
        num_threads = 2 if is_watching else 8
        with contextlib.ExitStack() as stack, one_thread():
            files = stack.enter_context(
                writing(directory, tag, specs, is_latest=is_latest, keep_last=keep_last, num_threads=num_threads)
            )
            total = sum(each.num_bytes for each in specs)
            self._note = stack.enter_context(progress("saving a checkpoint", total, is_shown=shows_progress))
            frozen: dict[int, list[tuple[ArraySpec, Callable[[], torch.Tensor]]]] = {}
            for each in planned:
                if each.value is not None and each.unit is not None:
                    frozen.setdefault(each.unit.index, []).append((each.spec, each.value))
                elif each.value is not None:
                    _write_whole(files, each.spec, each.value())
                elif each.unit is not None and each.slot is not None:
                    tensor_writer = _TensorWriter(training.access, each.spec, each.slot, files, stack)
                    self._tensor_writers[each.unit.index, each.slot.index, each.spec.kind] = tensor_writer
                    if each.slot.numel:
                        self._left[each.unit.index] = self._left.get(each.unit.index, 0) + 1
            # Unit by unit, so that each is fetched once.
            for index, members in frozen.items():
                with training.coordinator.opened(self._units[index]):
                    for spec, value in members:
                        self._note(_write_whole(files, spec, value()))
            files.write_training_state({"client_state": dict(client_state), **optimizer, **training.read_rest()})
            # A resident unit's trainable weights are in memory that the script can write to at any time. Checksums
            # before and after find such writes.
            self._checksums_before = {
                i: self._checksums_of(i) for i in self._left if is_watching and self._units[i].is_persistent
            }
            # `run` closes it, maybe in another thread. Until here, an error removes what was written.
            self._stack = stack.pop_all()

    def run(self) -> None:
        """Write the records of all units, and then make the checkpoint appear.

        Raises:
            StorageError: the directory cannot be written to or is full; its old checkpoints are still there.
            CheckpointError: the script wrote to weights in memory meanwhile; the old checkpoints are still there.
        """
        try:
            records = self._records.parts(self._in_turn(), self._ahead_bytes)
            with self._stack, one_thread(), contextlib.closing(records):
                for part in records:
                    index = part.unit.index
                    tensor_writer = self._tensor_writers.get((index, part.slot.index, part.kind))
                    self._note(part.values.nbytes)
                    if tensor_writer is not None and tensor_writer.write(part.values):
                        self._one_is_saved(index)
        finally:
            with self._lock:
                # Also after an error: threads in `wait_for` must not wait for a save that has ended.
                self._left.clear()
                self._changed.notify_all()

    def wait_for(self, unit: Unit, timeout_seconds: float | None = None) -> bool:
        """Wait until the unit is saved. Returns False after ``timeout_seconds``; None: no limit."""
        # Without the lock: a unit that was removed never comes back, and every update asks here.
        if unit.index not in self._left:
            return True
        with self._lock:
            self._wanted.append(unit.index)
            return self._changed.wait_for(lambda: unit.index not in self._left, timeout_seconds)

    def _in_turn(self) -> Iterator[Unit]:
        """Yield the units in the order of saving: awaited units first, and tiles of a weight in their order."""
        waiting = dict.fromkeys(self._left)
        while waiting:
            index = next(iter(waiting))
            with self._lock:
                while self._wanted:
                    wanted = self._wanted.popleft()
                    if wanted in waiting:
                        index = wanted
                        break
            # An array is written front to back. If training waits for the third tile of a weight, the first two come
            # before it.
            for number in (*self._tiles_before.get(index, ()), index):
                if number in waiting:
                    del waiting[number]
                    yield self._units[number]

    def _one_is_saved(self, index: int) -> None:
        if (
            self._left[index] == 1
            and index in self._checksums_before
            and self._checksums_before[index] != self._checksums_of(index)
        ):
            problem = (
                f"weights of unit '{self._units[index].name}' were written to by the script while they were being saved"
            )
            cure = "Call engine.wait_for_checkpoint() before writing to weights, or save with blocking=True"
            raise CheckpointError(self.folder, problem, cure=cure)
        with self._lock:
            self._left[index] -= 1
            if not self._left[index]:
                del self._left[index]
                self._changed.notify_all()

    def _checksums_of(self, index: int) -> list[int]:
        unit = self._units[index]
        return [checksum(unit.bytes_of(slot)) for slot in unit.layout.slots if slot.spec.is_trainable]


class BackgroundSave:
    """Runs one `Saving` in a thread of its own. The interpreter waits for it at exit. Errors are logged and kept."""

    def __init__(self, saving: Saving, device: ComputeDevice) -> None:
        """``device``: where resident units have their weights."""
        self.saving = saving
        self._pid = os.getpid()
        self._device = device
        self._launched = device.mark()
        self._error: BaseException | None = None
        self._over = Latch()

    def start(self, owner: object) -> None:
        """Start the thread. It refers to ``owner``, which is not garbage-collected until the save is over.

        Raises:
            LimitError: the system allows no further thread.
        """
        start_threads(threading.Thread(target=self._run, args=(owner,), name="infinity-checkpoint"))

    def _run(self, owner: object) -> None:
        try:
            with self._device.background_thread():
                self._device.compute_waits_for(self._launched)  # kernels that still write these weights
                self.saving.run()
        except BaseException as error:
            # Nobody may ever call `wait`, so the error is logged as well.
            self._error = error
            logger.error("the checkpoint '%s' could not be saved: %s", self.saving.folder, error)
        finally:
            self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return self._over.is_set()

    def wait(self) -> None:
        """Return when the save is over.

        Raises:
            EngineClosedError: this is a forked child, which does not have the saving thread.
        """
        if os.getpid() != self._pid:
            raise EngineClosedError.in_fork("engine.wait_for_checkpoint()")
        self._over.wait()

    def raise_error(self) -> None:
        """Raise the save's error, if it has failed."""
        if self._error is not None:
            raise self._error


def _find_tiles_before(training: Training) -> dict[int, list[int]]:
    """Index of a tile's unit -> indices of the units of the tiles before it."""
    found = {}
    for tiled in training.tiled.tiled:
        indices = [training.parameter_map.locate(tile)[0].index for tile in tiled.tiles]
        found.update({index: indices[:number] for number, index in enumerate(indices)})
    return found


class _TensorWriter:
    """Receives the elements of one tensor from records, in the order of memory, and writes them in C order."""

    def __init__(
        self, access: StateAccess, spec: ArraySpec, slot: Slot, files: CheckpointFiles, stack: contextlib.ExitStack
    ) -> None:
        self._files = files
        self._spec = spec
        self._numel = self._left = slot.numel
        self._copy: NewCopy | None = None
        if not slot.is_in_order:  # the file is in C order: collect the tensor, and write it when it is complete
            self._copy = stack.enter_context(access.copies.new(slot.spec.shape, slot.spec.stride, torch.float32))

    def write(self, values: torch.Tensor) -> bool:
        """Write the next elements. Returns whether the tensor is complete."""
        if self._copy is None:
            self._files.open_array(self._spec).write(values)
        else:
            self._copy.write(self._numel - self._left, values)
        self._left -= values.numel()
        if self._copy is not None and not self._left:
            _write_whole(self._files, self._spec, self._copy.finish())
        return not self._left


def _write_whole(files: CheckpointFiles, spec: ArraySpec, value: torch.Tensor) -> int:
    """Write a tensor that is there. Returns its bytes."""
    writer = files.open_array(spec)
    for rows in rows_of(value, _PART_BYTES):
        writer.write(rows)
    return value.nbytes
