"""Reads a checkpoint into model, optimizer and scheduler. Each byte is read and written once, to where it rests."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.arrays import ElementsInOrder
from infinity.checkpoint.saved import TRAINING_STATE, Checkpoint, SavedTensor
from infinity.checkpoint.training_checkpoint import Training, checksums_of, packed_in
from infinity.checkpoint.training_state_checks import check_groups
from infinity.errors import CheckpointError, InfinityError, ModelError, listed
from infinity.metrics.progress import Note, progress
from infinity.numerics.chunk_format import WEIGHT
from infinity.numerics.plain_data import UNREADABLE
from infinity.optim.groups import in_order_of
from infinity.optim.scheduler_state import scheduler_with
from infinity.threads.openmp import one_thread
from infinity.units.buffers import persistent_buffers, write_buffer
from infinity.units.extra_states import EXTRA_STATES, set_extra_states, takers
from infinity.units.layout import Slot, in_memory_order
from infinity.units.tiles import parameters_with_states, whole_parameters
from infinity.units.unit import Unit
from swapper.volumes.block_files import BlockThreads

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What is loaded from a checkpoint besides the model.

    Attributes:
        is_strict: a tensor that only the model or only the checkpoint has is an error. Another shape always is one.
        optimizer: states, hyperparameters and the loss scale.
        random_states, data_position: of each rank; used only if ``optimizer`` is.
    """

    is_strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool
    random_states: bool
    data_position: bool


def load(
    training: Training,
    folder: Path,
    wanted: Wanted,
    *,
    shows_progress: bool,
    is_first_rank: bool,
    begin: Callable[[], None],
    changing: AbstractContextManager[None],
) -> dict[str, Any]:
    """Load a checkpoint. Returns its training state: everything but large tensors.

    Args:
        is_first_rank: whether this rank logs what was left out.
        begin: called after all checks, before anything is changed. Ranks agree there that all go on.
        changing: entered when the optimizer has its groups and scalars, before weights change.

    Raises:
        CheckpointError: it is damaged, or does not fit to the optimizer. Nothing has been changed then, unless a large
            tensor is damaged: that is found as it is read.
        ModelError: it is of another model; nothing has been changed.
    """
    saved = Checkpoint(folder)
    saved.verify_small_files()
    training_state = saved.training_state()
    # Order: everything that can fail without reading large tensors comes first. The scheduler gets its old state back
    # if the block fails, and the optimizer checks all states before it changes one. What comes after `changing` has
    # begun cannot be undone: the caller marks the engine as partly loaded.
    with ExitStack() as stack:
        loading = Loading(training, saved, stack, is_strict=wanted.is_strict)
        loading.check_model(training_state.get(EXTRA_STATES))
        if wanted.scheduler:
            otherwise = "load_lr_scheduler_states=False to load_checkpoint"
            stack.enter_context(scheduler_with(training.lr_scheduler, training_state, otherwise=otherwise))
        optimizer = training.optimizer if wanted.optimizer and "param_groups" in training_state else None
        if optimizer is not None:
            in_order = loading.in_order(optimizer, training_state)
        begin()
        if optimizer is not None:
            loading.optimizer(optimizer, in_order)
        total = sum(each.num_bytes for each in saved.tensors if wanted.optimizer or each.kind == WEIGHT)
        with changing, one_thread(), progress("loading a checkpoint", total, is_shown=shows_progress) as note:
            loading.buffers()
            loading.parameters(note)
            set_extra_states(training.model, training_state.get(EXTRA_STATES) or {})
    if is_first_rank:
        loading.log_differences()
    return training_state


def other_shapes(saved: Mapping[str, SavedTensor], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A line of text for each tensor whose saved shape is not the wanted one."""
    both = ((fqn, saved[fqn].shape, shape) for fqn, shape in wanted.items() if fqn in saved)
    return [f"'{fqn}' has shape {there}, not {here}" for fqn, there, here in both if there != here]


class Loading:
    """One load: first `check_model`, then the rest. The caller has flushed pending updates."""

    def __init__(self, training: Training, saved: Checkpoint, stack: ExitStack, *, is_strict: bool) -> None:
        """
        Args:
            stack: closes files and ends threads at its end.
            is_strict: see `Wanted`.
        """
        self._training = training
        self._saved = saved
        self._is_strict = is_strict
        self._access, self._parameter_map, self._tiled = training.access, training.parameter_map, training.tiled
        self._parameters = whole_parameters(training.model)
        self._buffers = dict(persistent_buffers(training.model))
        self._missing: list[str] = []
        self._extra: list[str] = []
        self._open = stack
        self._threads = stack.enter_context(BlockThreads(saved.largest_block))
        self._sources: dict[tuple[str, str], ElementsInOrder] = {}
        """(FQN, kind) of a tiled weight -> its elements. Each tile continues where the tile before it ended."""
        self._states: dict[int, dict[str, SavedTensor | torch.Tensor]] = {}
        """id of a parameter that the engine holds -> its element-wise states in the checkpoint."""

    # ---------------------------------------------------------------------------------------------- is it of this model

    def check_model(self, extra_states: Mapping[str, Any] | None) -> None:
        """Check that model and checkpoint have the same tensors. ``extra_states``: None in checkpoints of DeepSpeed.

        Raises:
            ModelError: some differ; the message names them.
        """
        # Of a tiled weight, the whole weight's shape: the checkpoint has no tiles.
        shapes = {fqn: tuple((self._tiled.of(each) or each).shape) for fqn, each in self._parameters.items()}
        left_out = {
            fqn for fqn in self._saved.omitted.excluded if fqn in shapes and not self._parameters[fqn].requires_grad
        }
        self._check_shapes("parameters", shapes, left_out)
        self._check_shapes("buffers", {fqn: tuple(each.shape) for fqn, each in self._buffers.items()})
        if extra_states is not None:
            self._check_names("extra states", takers(self._training.model), extra_states)
        if self._is_strict:
            self._check_formats({*left_out, *packed_in(self._training)})
        if self._is_strict and left_out:
            self._check_left_out(left_out)

    def _check_shapes(self, group: str, wanted: Mapping[str, tuple[int, ...]], left_out: Collection[str] = ()) -> None:
        """``left_out`` may be missing."""
        found = self._saved.of(group)
        needed = [fqn for fqn in wanted if fqn in found or fqn not in left_out]
        self._check_names(group, needed, found, other_shapes(found, wanted))

    def _check_names(
        self, group: str, wanted: Collection[str], found: Collection[str], problems: Collection[str] = ()
    ) -> None:
        missing, extra = [each for each in wanted if each not in found], [each for each in found if each not in wanted]
        if self._is_strict:
            problems = [*problems, *(f"'{fqn}' is missing" for fqn in missing)]
            problems += [f"'{fqn}' is not in the model" for fqn in extra]
        else:
            self._missing += missing
            self._extra += extra
        if problems:
            raise ModelError(
                f"the checkpoint's {group} are not the model's: {listed(problems, '; ')}",
                cure="Build the model as it was when it was saved, or pass load_module_strict=False to skip names "
                "that only one of the two has",
            )

    def _check_formats(self, fqns: Collection[str]) -> None:
        """Check that these frozen weights were stored in the same packed formats as now."""
        # An adapter is trained over the rounded weights. Over another rounding it would compute something else, without
        # an error.
        base, formats, now = self._saved.omitted.base, self._saved.omitted.formats, packed_in(self._training)
        differing = [fqn for fqn in sorted(fqns) if formats.get(fqn) != now.get(fqn)]
        if differing:
            fqn = differing[0]
            whose = f" of '{base}'" if base else ""
            raise ModelError(
                f"the checkpoint was trained over frozen weights{whose} that were stored as "
                f"{formats.get(fqn, 'they are')} ('{fqn}'), and here they are stored as {now.get(fqn, 'they are')}",
                cure="Set infinity.frozen_dtype to the value of that run, or pass load_module_strict=False to train "
                "its adapters over the present weights",
                fqn=fqn,
            )

    def _check_left_out(self, fqns: Collection[str]) -> None:
        """Compare frozen parameters that the checkpoint leaves out with their checksums in it. Reads all of them once.

        Without a checksum, or with another dtype, a parameter cannot be compared.
        """
        others, casts = [], []
        saved = self._saved.omitted.checksums
        for fqn, (dtype, checksum) in checksums_of(self._training, saved.keys() & fqns).items():
            if dtype != saved[fqn][0]:
                casts.append(fqn)
            elif checksum != saved[fqn][1]:
                others.append(fqn)
        if others:
            shown = listed([f"'{fqn}'" for fqn in others])
            raise ModelError(
                f"the checkpoint was written without frozen parameters, and those of the model have other values now: {shown}",
                cure="Load the weights with which it was trained before infinity.initialize, or pass "
                "load_module_strict=False to keep the model's present values",
            )
        if casts:
            logger.warning(
                "%d frozen parameters that the checkpoint leaves out ('%s', ...) have another dtype than when it was written: "
                "whether they have the same values is not known",
                len(casts),
                casts[0],
            )

    def log_differences(self) -> None:
        """Log what only model or checkpoint has, in one line."""
        sides = {"not in the checkpoint, and as before": self._missing, "not in the model, and left out": self._extra}
        told = [f"{listed([*map(repr, names)])} ({how})" for how, names in sides.items() if names]
        if told:
            folder = self._saved.folder
            logger.warning("load_module_strict=False, '%s' is not all of this model: %s", folder, "; ".join(told))

    # --------------------------------------------------------------------------------------------------------- loading

    def in_order(self, optimizer: torch.optim.Optimizer, training_state: Mapping[str, Any]) -> Mapping[str, Any]:
        """``training_state`` with groups and parameters in the order of this optimizer.

        Raises:
            CheckpointError: they do not fit; nothing has been changed.
        """
        groups = [{**g, "params": self._tiled.without_tiles(g["params"])} for g in optimizer.param_groups]
        parameters = parameters_with_states(self._training.model)
        known = {id(parameter) for parameter in parameters.values()}
        with self._converting_errors():
            # Names are there if the model had all parameters of the optimizer. Then a model that lists its parameters
            # in another order is no error. Otherwise they are matched by number, as torch does it.
            if "names" in training_state and {id(p) for g in groups for p in g["params"]} <= known:
                training_state = in_order_of(groups, training_state, parameters, is_strict=self._is_strict)
            if len(groups) == len(training_state["param_groups"]):  # else load_state_dict raises
                check_groups(training_state["param_groups"], groups)
        return training_state

    def optimizer(self, optimizer: torch.optim.Optimizer, training_state: Mapping[str, Any]) -> None:
        """Load hyperparameters, scalars, and states of parameters that the engine does not hold.

        Args:
            training_state: see `in_order`.

        Raises:
            CheckpointError: it does not fit; nothing has been changed.
        """
        mine = self._tiled.without_tiles([p for group in optimizer.param_groups for p in group["params"]])
        ids = [key for group in training_state["param_groups"] for key in group["params"]]
        parameter_of = dict(zip(ids, mine, strict=False))  # load_state_dict raises if their numbers differ
        arrays: dict[str, dict[str, SavedTensor | torch.Tensor]] = {}
        for each in self._saved.tensors:
            if each.group == "parameters" and each.kind != WEIGHT:
                arrays.setdefault(each.fqn, {})[each.kind] = each
        state: dict[Any, Any] = {}
        # "states": parameters that an engine held, whose element-wise states are arrays. "others": whole entries,
        # tensors included.
        for key, fqn, scalars in training_state["states"]:
            state[key] = self._entry(parameter_of.get(key), scalars, arrays.get(fqn, {}))
        for key, entry in training_state["others"].items():
            parameter = parameter_of.get(key)
            large: dict[str, SavedTensor | torch.Tensor] = {
                name: each for name, each in entry.items() if isinstance(each, torch.Tensor) and each.dim()
            }
            small = {name: each for name, each in entry.items() if name not in large}
            state[key] = self._entry(parameter, small, large)
        # torch's load_state_dict checks groups and shapes here. The elements of held parameters come in `parameters`,
        # unit by unit, so that they are never in memory together.
        with self._converting_errors(), self._access.elements_following():
            optimizer.load_state_dict({"state": state, "param_groups": training_state["param_groups"]})

    @contextmanager
    def _converting_errors(self) -> Iterator[None]:
        """Turn errors of the ``with`` block over unfitting groups or states into a `CheckpointError`."""
        try:
            yield
        except InfinityError:
            raise
        except UNREADABLE as error:
            # `in_order_of` ends its messages with what to pass instead: that becomes the cure.
            problem, has_cure, cure = str(error).partition(": pass ")
            # A group's id that has no parameter: the text of a KeyError is only the key.
            if isinstance(error, LookupError):
                problem = f"its groups name parameter {problem}, which it does not have"
            cure = f"Pass {cure}" if has_cure else "Load another checkpoint, or pass load_optimizer_states=False"
            raise CheckpointError(self._saved.folder / TRAINING_STATE, problem.rstrip("."), cure=cure) from error

    def _entry(
        self, parameter: Any, scalars: Mapping[str, Any], large: dict[str, SavedTensor | torch.Tensor]
    ) -> dict[str, Any]:
        parts = self._tiled.all_of(parameter)
        if self._parameter_map.holds(parts[0]):
            for part in parts:
                self._states[id(part)] = large
            # Shapes are checked now, elements come later. An expanded scalar has the shape and takes 4 bytes. Tiles of
            # one weight all get the whole weight's arrays, of which each reads its rows.
            stands_for = torch.zeros((), dtype=torch.float32, device="cpu")
            return {**scalars, **{name: stands_for.expand(tuple(each.shape)) for name, each in large.items()}}
        return {**scalars, **{name: self._whole(each) for name, each in large.items()}}

    def _whole(self, value: SavedTensor | torch.Tensor) -> torch.Tensor:
        return value if isinstance(value, torch.Tensor) else value.read(self._threads)

    def buffers(self) -> None:
        """Load the model's buffers."""
        for fqn, buffer in self._buffers.items():
            found = self._saved.tensor("buffers", fqn)
            if found is not None:
                write_buffer(buffer, found.read(self._threads))

    def parameters(self, note: Note) -> None:
        """Load weights and the states that `optimizer` has prepared. ``note`` gets the bytes of each unit."""
        names = {id(part): fqn for fqn, whole in self._parameters.items() for part in self._tiled.all_of(whole)}
        for fqn, parameter in self._parameters.items():
            found = self._saved.tensor("parameters", fqn)
            if found is not None and not self._parameter_map.holds(self._tiled.all_of(parameter)[0]):
                with torch.no_grad():
                    parameter.copy_(found.read(self._threads))
        for unit in self._parameter_map.units:
            note(self._unit(unit, names))
        for source in self._sources.values():
            # Only now has a tiled weight's last tile been read: its tiles are units of their own.
            source.end()

    def _unit(self, unit: Unit, names: Mapping[int, str]) -> int:
        """Load one unit. Returns the bytes that the checkpoint has of it."""
        num_bytes = 0
        with ExitStack() as stack:
            sources: dict[tuple[int, str], ElementsInOrder] = {}
            frozen: list[tuple[nn.Parameter, SavedTensor]] = []
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                weight = self._saved.tensor("parameters", names.get(id(parameter), ""))
                if not slot.spec.is_trainable:
                    # A packed weight keeps its values. A checkpoint of packed weights has none of them, and
                    # `check_model` passes one of unpacked weights only if it is not strict.
                    if weight is not None and slot.spec.packed is None:
                        frozen.append((parameter, weight))
                        num_bytes += slot.numel * weight.dtype.itemsize
                    continue
                kinds: dict[str, SavedTensor | torch.Tensor] = dict(self._states.get(id(parameter), {}))
                if weight is not None:
                    kinds[WEIGHT] = weight
                for kind, value in kinds.items():
                    num_bytes += slot.numel * value.dtype.itemsize
                    sources[slot.index, kind] = self._source(slot, value, stack)
            # All records of the unit are replaced in one pass, front to back. Frozen weights have no records: they are
            # written below, by the way that a script's writes take.
            if sources:
                with self._access.replacing(unit) as stream:
                    stream.fill(unit, sources)
            for source in sources.values():
                # The sources of tiles go on with the next tile's unit.
                if source not in self._sources.values():
                    source.end()
        for parameter, weight in frozen:
            self._access.load_main_weight(parameter, self._copied(parameter, weight))
        return num_bytes

    def _source(self, slot: Slot, value: SavedTensor | torch.Tensor, stack: ExitStack) -> ElementsInOrder:
        # Three ways, from little memory to much:
        #   a tile: the next rows of the whole weight's array
        #   elements in C order in memory, as in the file: streamed
        #   other strides (channels_last, a transposed weight): the whole tensor, reordered; if it is large, on a drive
        if isinstance(value, SavedTensor) and value.shape != slot.spec.shape:
            return self._rows(value)
        if isinstance(value, SavedTensor) and slot.is_in_order:
            parts = value.parts(self._threads)
            stack.enter_context(closing(parts))
            return ElementsInOrder(parts)
        whole = self._copied(slot.spec, value) if isinstance(value, SavedTensor) else value
        return ElementsInOrder(iter([(0, in_memory_order(whole, slot))]))

    def _rows(self, value: SavedTensor) -> ElementsInOrder:
        """The elements of a tiled weight, from where the tile before it ended."""
        key = value.fqn, value.kind
        if key not in self._sources:
            parts = value.parts(self._threads)
            # Left open until the load ends: the next tile is in another unit.
            self._open.enter_context(closing(parts))
            self._sources[key] = ElementsInOrder(parts)
        return self._sources[key]

    def _copied(self, like: Any, value: SavedTensor) -> torch.Tensor:
        """The whole tensor, or a tile's rows, on a drive if it is large."""
        shape = tuple(like.shape)
        is_whole = value.shape == shape
        elements = ElementsInOrder(value.parts(self._threads)) if is_whole else self._rows(value)
        # The copy is filled in the order of its memory, and the file is in C order: so the copy gets C strides, not the
        # parameter's.
        stride = torch.empty(shape, device="meta", dtype=torch.float32).stride()
        with self._access.copies.new(shape, stride, value.dtype) as made:
            filled = 0
            for part in elements.take(math.prod(shape)):
                made.write(filled, part)
                filled += part.numel()
            if is_whole:
                elements.end()
            return made.finish()
