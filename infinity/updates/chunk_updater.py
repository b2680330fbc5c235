"""The update of one chunk in working memory: all of its slices by one call where a kernel takes them, else slice by slice.

Knows a chunk's tensors and the optimizer's rule; must not know where chunks come from or go to.

[Note: one call a chunk] A chunk has as many slices as parameters lie in it, often hundreds. Handing each to torch costs 20 us
and 40 Python calls. So what `FusedAdam` takes goes there as a table, one row for each slice, whose loop is compiled and holds no
interpreter lock. A row's last elements, fewer than a vector of torch's kernel, go to torch: it treats them by other code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from infinity.numerics.chunk_format import ChunkBuffer
from infinity.numerics.state_codec import Noise
from infinity.numerics.state_format import StateFormat
from infinity.numerics.state_window import StateWindow
from infinity.optim.fused_adam import STATES, FusedAdam, Slices
from infinity.optim.piece import PieceUpdater
from infinity.optim.remainder_updater import RemainderUpdater
from infinity.units.layout import Chunk, Piece
from infinity.updates.job import ParameterState, UpdateJob


class ChunkUpdater:
    """Applies the optimizer's rule to a chunk. For any number of threads, one chunk each."""

    def __init__(
        self,
        updater: PieceUpdater,
        states: Mapping[tuple[int, int], ParameterState],
        halves_updater: RemainderUpdater | None = None,
        state_format: StateFormat = StateFormat.FP32,
        fused: FusedAdam | None = None,
    ) -> None:
        """
        Args:
            updater: the optimizer's rule.
            states: (unit index, slot index) -> the parameter's scalars, as they were before the update.
            halves_updater: the rule where main weights are kept in two halves; None where they are not.
            state_format: how states are stored.
            fused: takes all slices of a chunk at once; None if no kernel does, or states are not stored as fp32.
        """
        self.mixes_elements = updater.mixes_elements
        self._updater = updater
        self._states = states
        self._halves_updater = halves_updater
        self._window = StateWindow(state_format)
        self._fused = fused if state_format is StateFormat.FP32 else None

    def widens(self, gradient_dtype: torch.dtype) -> bool:
        """Whether gradients of this dtype are copied to fp32 before they are used."""
        return self._halves_updater is None and gradient_dtype != torch.float32

    def update(self, job: UpdateJob, chunk: Chunk, workspace: ChunkBuffer) -> None:
        """Update what of the chunk has a gradient; ``job.advanced`` gets the parameters' states and scalars after it."""
        pieces = [piece for piece in chunk.pieces if piece.slot.index in job.slots]
        if not pieces:
            return
        gradient = job.gradients.of_chunk(chunk, pieces, workspace.landing(job.gradients.dtype))
        rest = pieces
        if self._fused is not None and self._fused.runs_all(job.groups.values()):
            rest = self._update_at_once(self._fused, job, pieces, workspace, gradient)
        for piece in rest:
            self._update_piece(job, piece, workspace, gradient)

    def _update_at_once(
        self,
        fused: FusedAdam,
        job: UpdateJob,
        pieces: Sequence[Piece],
        workspace: ChunkBuffer,
        gradient: torch.Tensor,
    ) -> list[Piece]:
        """Update whole vectors of each piece; returns what is left of them."""
        scale = 1.0 if job.clip_coefficient is None else float(job.clip_coefficient)
        slices = Slices(
            workspace.weight if workspace.main is None else workspace.main,
            workspace.remainder,
            gradient,
            {name: workspace.states[name] for name in STATES},
        )
        rest: list[Piece] = []
        numbers: dict[tuple[int, float], int] = {}  # group and step count -> the row of their numbers
        for piece in pieces:  # hundreds in a chunk: no call of Python in here
            index, numel = piece.slot.index, piece.stop - piece.start
            state, group = self._states[job.unit.index, index], job.groups[index]
            body = numel - numel % fused.vector_numel
            if body < numel:
                rest.append(Piece(piece.slot, piece.start + body, piece.stop, piece.offset + body))
            if body:
                if state.names is None:
                    for name in STATES:
                        workspace.states[name][piece.offset : piece.offset + body].zero_()
                step = torch.as_tensor(state.scalars.get("step", 0.0), dtype=torch.float32, device="cpu") + 1
                key = id(group), float(step)
                if key not in numbers:
                    numbers[key] = slices.add_values(fused.values(group, scale, key[1]))
                slices.places.append((piece.offset, body, numbers[key]))
                job.advanced[index] = STATES, {"step": step}
        fused.update_slices(slices)
        return rest

    def _update_piece(self, job: UpdateJob, piece: Piece, workspace: ChunkBuffer, gradients: torch.Tensor) -> None:
        state = self._states[job.unit.index, piece.slot.index]
        span = slice(piece.offset, piece.offset + piece.numel)
        gradient = gradients[span]
        group = job.groups[piece.slot.index]
        stored = workspace.stored_states(workspace.states if state.names is None else state.names, span)
        formed = piece.slot.spec.formed if self._updater.mixes_elements else _as_it_is
        present: tuple[str, ...] = ()
        scalars: dict[str, Any] = {}

        def noise(name: str, start: int) -> Noise:
            return Noise.of(piece.slot.spec.fqn, name, state.num_updates + 1, piece.start + start)

        for part, views in self._window.parts(stored, piece.numel, noise):
            place = slice(span.start + part.start, span.start + part.stop)
            present, scalars = self._update_part(job, group, workspace, place, gradient[part], views, state, formed)
        job.advanced[piece.slot.index] = present, scalars  # of all pieces the same

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
        if workspace.main is None:
            if self._halves_updater is None or workspace.remainder is None:
                raise RuntimeError("main weights are kept in two halves, and nothing is there to update those")
            return self._halves_updater.update(
                group,
                workspace.weight[span],
                workspace.remainder[span],
                gradient,
                job.clip_coefficient,
                views,
                state.scalars,
                is_first=state.is_fresh,
                formed=formed,
            )
        if gradient.dtype != workspace.gradient.dtype:
            gradient = workspace.gradient[span].copy_(gradient)
        if job.clip_coefficient is not None:
            if job.gradients.is_kept:
                gradient = gradient * job.clip_coefficient
            else:
                gradient.mul_(job.clip_coefficient)
        views = {name: formed(values) for name, values in views.items()}
        tensors, scalars = self._updater.update(
            group, formed(workspace.main[span]), formed(gradient), None if state.is_fresh else views, state.scalars
        )
        if state.is_fresh:
            for name, tensor in tensors.items():
                views[name].copy_(tensor)
        return tuple(tensors), scalars

    def update_empty(self, job: UpdateJob) -> None:
        """Parameters that have no elements, or none here, are in no chunk; their steps count all the same."""
        for slot in job.gradients.slots():
            if slot.index in job.slots and slot.index not in job.advanced:
                state = self._states[job.unit.index, slot.index]
                empty = torch.empty(0, dtype=torch.float32, device="cpu")
                views = None if state.is_fresh else dict.fromkeys(state.names or (), empty)
                tensors, scalars = self._updater.update(job.groups[slot.index], empty, empty, views, state.scalars)
                job.advanced[slot.index] = tuple(tensors), scalars


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values
