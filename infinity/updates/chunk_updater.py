"""The update of one chunk in working memory: all of its slices by one call where a kernel takes them, else slice by slice.

Where no kernel takes split main weights as they are, they are joined, updated by torch and split again, block by block.

[Note: one call a chunk] A chunk has as many slices as parameters with elements in it, often hundreds. Handing each to
torch costs 20 us and 40 Python calls. So slices that `FusedAdam` takes go there as a table, one row each, in a compiled
loop that does not hold the GIL. Torch treats a row's last elements, fewer than a vector of its kernel, by other code:
they go to torch, those of all rows as one list of tensors.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from infinity.numerics.chunk_format import WEIGHT, ChunkBuffer
from infinity.numerics.state_codec import Noise, StateWindow
from infinity.numerics.state_format import StateFormat
from infinity.optim.fused_adam import STATES, FusedAdam
from infinity.optim.slice_updater import SliceUpdater
from infinity.units.layout import Chunk, ParameterSlice
from infinity.updates.job import ParameterState, UpdateJob

# 1 MiB of fp32 each for a joined weight and its gradient: few enough to stay in the processor's cache.
_BLOCK_NUMEL = 1 << 18


class _Table(NamedTuple):
    """The whole vectors of a chunk's slices, one row for each slice."""

    # Example, vectors of 16: a slice of 1000 elements at offset 512 of the chunk gives the row (512, 992, slot), and a
    # slice of the last 8 elements at offset 1504 in `rest`.
    slices: Sequence[ParameterSlice]
    places: Sequence[tuple[int, int, int]]
    """First element in the chunk, number of elements, and slot index of each row."""
    where: npt.NDArray[np.int64]
    """The same as an array, which the kernel's table is computed from."""
    rest: Sequence[ParameterSlice]
    """The last elements of the slices, fewer than a vector each."""
    rest_at: torch.Tensor
    """Where these elements are in the chunk: int64, 1-D, one slice after the other."""
    rest_sizes: list[int]
    """How many of them each slice has."""


class _Numbers(NamedTuple):
    """A job's hyperparameters and step counts, as `FusedAdam` takes them."""

    values: npt.NDArray[np.float32]
    """A row for each that differs, see `FusedAdam.values`."""
    rows: npt.NDArray[np.int64]
    """Slot index -> which row."""
    after: Mapping[int, tuple[tuple[str, ...], dict[str, Any]]]
    """Slot index -> states and scalars after the update."""
    fresh: Set[int]
    """Slot indices of parameters that have no states yet."""


# For jobs with a group that the kernel does not take: all of their slices go to torch.
_TAKES_NOT_ALL = _Numbers(np.zeros((0, 10), dtype=np.float32), np.zeros(0, dtype=np.int64), {}, frozenset())


@dataclass(eq=False, repr=False)
class ChunkUpdater:
    """Applies the optimizer's rule to a chunk. For any number of threads, one chunk each.

    Args:
        updater: the optimizer's rule.
        states: (unit index, slot index) -> the parameter's scalars, as they were before the update.
        state_format: how states are stored.
        fused: a kernel with the bits of the optimizer's rule, for those groups that it `runs`; None if there is none.
        splits_main_weights: whether main weights are split (bf16 weight and 16-bit remainder).
    """

    updater: SliceUpdater
    states: Mapping[tuple[int, int], ParameterState]
    state_format: StateFormat = StateFormat.FP32
    fused: FusedAdam | None = None
    _: KW_ONLY
    splits_main_weights: bool = False

    def __post_init__(self) -> None:
        self.mixes_elements = self.updater.mixes_elements
        # The kernel for split main weights, which go with bf16 weights, widens bf16 gradients itself.
        self.used_as_they_are = {torch.float32, torch.bfloat16} if self.splits_main_weights else {torch.float32}
        """Gradients of other dtypes are copied to fp32 before they are used."""
        self._window = StateWindow(self.state_format)
        is_fp32 = self.state_format is StateFormat.FP32
        self._uses_tables = self.fused is not None and self.fused.takes_tables and is_fp32
        self._of_thread = threading.local()
        """Each worker's ``memory``, see `_scratch`: each updates another chunk."""
        self._tables: dict[tuple[int, int], _Table] = {}
        """By unit index and chunk index."""
        self._checked_group: Mapping[str, Any] | None = None
        """The group that was last found to be one for the kernel. Any thread may replace it: a lost value costs one
        check."""

    def update(self, job: UpdateJob, chunk: Chunk, workspace: ChunkBuffer) -> None:
        """Update what of the chunk has a gradient; ``job.advanced`` gets the parameters' states and scalars after it."""
        slices: Sequence[ParameterSlice] = chunk.slices
        if not job.updates_all:
            slices = [param_slice for param_slice in slices if param_slice.slot.index in job.slots]
        if not slices:
            return
        values, fused = job.gradients.values, self.fused
        if values is not None and values.device == workspace.gradient.device:
            gradient = values[chunk.start : chunk.stop]
        else:
            dtype = job.gradients.dtype
            # Where gradients are put that are not in memory: fp32 into the fp32 scratch, bf16 beside it, to be widened
            # later.
            scratch = workspace.gradient if dtype == torch.float32 else workspace.landing(dtype)
            gradient = job.gradients.of_chunk(chunk, slices, scratch)
        if fused is not None and self._uses_tables:
            if job.numbers is None:  # two workers may come here at a time, and find the same
                job.numbers = self._numbers_of(job, fused)
            if job.numbers is not _TAKES_NOT_ALL:
                table = self._tables.get((job.unit.index, chunk.index))
                if table is None or table.slices is not slices:
                    table = self._table_of(fused, job, chunk, slices)
                numbers: _Numbers = job.numbers
                for start, numel, index in table.places:  # hundreds in a chunk: no call of Python in here
                    if index in numbers.fresh:
                        # The staging buffer has another unit's bytes: the optimizer's first step expects zeros.
                        for name in STATES:
                            workspace.states[name][start : start + numel].zero_()
                    # The same for all slices of a parameter, so it does not matter which chunk writes it last.
                    job.advanced[index] = numbers.after[index]
                # With split main weights the kernel reads model weight and remainder, and writes both.
                main = workspace.weight if workspace.main is None else workspace.main
                which, states = numbers.rows[table.where[:, 2]], workspace.states
                fused.update_slices(main, workspace.remainder, gradient, states, table.where, which, numbers.values)
                if table.rest:
                    self._update_rest(fused, job, table, workspace, gradient)
                return
        for param_slice in slices:
            self._update_slice(job, param_slice, workspace, gradient)

    def _numbers_of(self, job: UpdateJob, fused: FusedAdam) -> _Numbers:
        """What the kernel needs to know of each parameter of a job."""
        # The kernel multiplies by a number of the host: the stream has fetched a coefficient of the GPU
        # (`fetch_coefficient`).
        scale = 1.0 if job.clip_coefficient is None else float(job.clip_coefficient)
        values: list[tuple[Any, ...]] = []
        # (group, step count) -> row of their numbers, and scalars after the update, which parameters share.
        of_count: dict[tuple[int, float], tuple[int, tuple[tuple[str, ...], dict[str, Any]]]] = {}
        rows = np.zeros(max(job.slots) + 1, dtype=np.int64)
        after, fresh = {}, set[int]()
        for index in job.slots:  # hundreds
            state, group = self.states[job.unit.index, index], job.groups[index]
            # Parameters of one group follow each other: the check of a whole group runs once.
            if group is not self._checked_group:
                if not fused.runs(group):
                    return _TAKES_NOT_ALL
                self._checked_group = group
            key = id(group), float(state.scalars.get("step", 0.0))
            if key not in of_count:
                step = torch.tensor(key[1], dtype=torch.float32, device="cpu") + 1
                of_count[key] = len(values), (STATES, {"step": step})
                values.append(fused.values(group, scale, float(step)))
            rows[index], after[index] = of_count[key]
            if state.names is None:
                fresh.add(index)
        return _Numbers(np.array(values, dtype=np.float32), rows, after, fresh)

    def _table_of(self, fused: FusedAdam, job: UpdateJob, chunk: Chunk, slices: Sequence[ParameterSlice]) -> _Table:
        """The whole vectors of the slices. Kept: a layout stays."""
        bodies = [param_slice.numel - param_slice.numel % fused.vector_numel for param_slice in slices]
        places = [(p.offset, body, p.slot.index) for p, body in zip(slices, bodies, strict=True) if body]
        rest = [
            ParameterSlice(param_slice.slot, param_slice.start + body, param_slice.stop, param_slice.offset + body)
            for param_slice, body in zip(slices, bodies, strict=True)
            if body < param_slice.numel
        ]
        spans = (range(param_slice.offset, param_slice.offset + param_slice.numel) for param_slice in rest)
        rest_at = torch.tensor([*itertools.chain(*spans)], dtype=torch.int64, device="cpu")
        where = np.array(places, dtype=np.int64).reshape(-1, 3)
        table = _Table(slices, places, where, rest, rest_at, [param_slice.numel for param_slice in rest])
        # A job that does not update all parameters makes its list of slices anew, so a kept table would never match it.
        if job.updates_all:
            self._tables[job.unit.index, chunk.index] = table
        return table

    def _update_rest(
        self, fused: FusedAdam, job: UpdateJob, table: _Table, workspace: ChunkBuffer, gradient: torch.Tensor
    ) -> None:
        """Update the last elements of all slices, in copies: by one call of torch for each parameter group."""
        rest, at, numbers = table.rest, table.rest_at, job.numbers
        slope = gradient.index_select(0, at).float()
        if job.clip_coefficient is not None:
            slope.mul_(job.clip_coefficient)
        main = workspace.main_at(at)
        average, square = workspace.states[STATES[0]], workspace.states[STATES[1]]
        copies = main, slope, average.index_select(0, at), square.index_select(0, at)
        # By hand and not in a comprehension, which is a call.
        sizes = table.rest_sizes
        parts = [copies[0].split(sizes), copies[1].split(sizes), copies[2].split(sizes), copies[3].split(sizes)]
        steps: list[torch.Tensor] = []
        members: dict[int, list[int]] = {}  # places in `rest` by group
        for place, param_slice in enumerate(rest):
            index = param_slice.slot.index
            step = self.states[job.unit.index, index].scalars.get("step", 0.0)
            steps.append(torch.as_tensor(step, dtype=torch.float32, device="cpu").clone())  # torch counts in place
            members.setdefault(id(job.groups[index]), []).append(place)
            if index in numbers.fresh:
                for values in parts[2:]:
                    values[place].zero_()
            job.advanced[index] = numbers.after[index]
        for places in members.values():
            tensors: Iterable[list[torch.Tensor]] = map(list, (*parts, steps))
            if len(members) > 1:
                tensors = [[each[place] for place in places] for each in tensors]
            fused.update_whole(job.groups[rest[places[0]].slot.index], *tensors)
        workspace.write_main_at(at, main)
        average.index_copy_(0, at, copies[2])
        square.index_copy_(0, at, copies[3])

    def _update_slice(
        self, job: UpdateJob, param_slice: ParameterSlice, workspace: ChunkBuffer, gradients: torch.Tensor
    ) -> None:
        state = self.states[job.unit.index, param_slice.slot.index]
        span = slice(param_slice.offset, param_slice.offset + param_slice.numel)
        gradient = gradients[span]
        group = job.groups[param_slice.slot.index]
        names = workspace.states if state.names is None else state.names
        stored = {name: self.state_format.part(workspace.states[name], span) for name in names}
        # LAMB, Muon and the like look at the parameter's shape: for them it is one slice, and gets its shape and
        # strides.
        formed = param_slice.slot.spec.formed if self.mixes_elements else lambda values: values
        present: tuple[str, ...] = ()
        scalars: dict[str, Any] = {}

        def noise(name: str, start: int) -> Noise:
            # From name, update and element alone, so that neither chunks nor workers change a bit. See [Note: rounding]
            # in `infinity.numerics.state_codec`.
            return Noise.of(param_slice.slot.spec.fqn, name, state.num_updates + 1, param_slice.start + start)

        for part, views in self._window.parts(stored, param_slice.numel, noise):
            place = slice(span.start + part.start, span.start + part.stop)
            present, scalars = self._update_part(job, group, workspace, place, gradient[part], views, state, formed)
        job.advanced[param_slice.slot.index] = present, scalars  # of all slices the same

    def _update_part(
        self,
        job: UpdateJob,
        group: dict[str, Any],
        workspace: ChunkBuffer,
        span: slice,
        gradient: torch.Tensor,
        views: Mapping[str, torch.Tensor],
        state: ParameterState,
        formed: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        names: tuple[str, ...] = ()
        scalars: dict[str, Any] = {}
        # [0, body) goes to the kernel, [body, numel) to torch.
        numel, body = gradient.numel(), 0
        if self.fused is not None and self.fused.runs(group):
            body = numel - numel % self.fused.vector_numel
        if self.fused is not None and body:
            at, names = slice(span.start, span.start + body), STATES
            for name in STATES if state.is_fresh else ():
                views[name].zero_()
            scalars = self.fused.update(
                group,
                workspace.weight[at] if workspace.main is None else workspace.main[at],
                None if workspace.remainder is None else workspace.remainder[at],
                gradient[:body],
                job.clip_coefficient,
                {name: views[name][:body] for name in STATES},
                state.scalars,
            )
        # A GPU's memory is no cache, and rules that mix elements need the whole parameter at once.
        in_blocks = self.splits_main_weights and gradient.device.type == "cpu" and not self.mixes_elements
        block_numel = _BLOCK_NUMEL if in_blocks else max(numel, 1)
        for start in range(body, numel, block_numel):
            part = slice(start, min(start + block_numel, numel))
            at = slice(span.start + part.start, span.start + part.stop)
            main, slope = self._opened(job, workspace, at, gradient[part])
            of_part = {name: formed(values[part]) for name, values in views.items()}
            # None has the optimizer create its state, as torch's optimizers do in their first step; it is copied into
            # the record.
            given = None if state.is_fresh else of_part
            tensors, scalars = self.updater.update(group, formed(main), formed(slope), given, state.scalars)
            names = tuple(tensors)
            for name in names if state.is_fresh else ():
                of_part[name].copy_(tensors[name])
            del tensors  # before the next block creates its own: one block's states at a time
            if workspace.main is None:
                workspace.write(WEIGHT, at, main)
        return names, scalars

    def _opened(
        self, job: UpdateJob, workspace: ChunkBuffer, span: slice, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Main weight and gradient in fp32. The former is the workspace's own, or joined from model weight and remainder."""
        if workspace.main is not None:
            main, slope = workspace.main[span], gradient
            if gradient.dtype != torch.float32:
                slope = workspace.gradient[span].copy_(gradient)
        else:
            main, slope = self._scratch(gradient.numel(), gradient.device)
            workspace.read(WEIGHT, span, main)
            slope.copy_(gradient)
        # Gradients that are kept after the step must not be clipped in place.
        if job.clip_coefficient is not None:
            is_referenced = slope is gradient and job.gradients.is_kept
            slope = slope * job.clip_coefficient if is_referenced else slope.mul_(job.clip_coefficient)
        return main, slope

    def _scratch(self, numel: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for a joined weight and its gradient. It is kept: an allocation per block would cost more than the rest."""
        memory: torch.Tensor | None = getattr(self._of_thread, "memory", None)
        if memory is None or memory.shape[1] < numel:
            memory = torch.empty(2, max(numel, _BLOCK_NUMEL), dtype=torch.float32, device=device)
            self._of_thread.memory = memory
        return memory[0, :numel], memory[1, :numel]

    def update_empty(self, job: UpdateJob) -> None:
        """Parameters that have no elements, or none here, are in no chunk; their steps count all the same."""
        for slot in job.gradients.slots:
            if slot.index in job.slots and slot.index not in job.advanced:
                state = self.states[job.unit.index, slot.index]
                empty = torch.empty(0, dtype=torch.float32, device="cpu")
                views = None if state.is_fresh else dict.fromkeys(state.names or (), empty)
                tensors, scalars = self.updater.update(job.groups[slot.index], empty, empty, views, state.scalars)
                job.advanced[slot.index] = tuple(tensors), scalars
