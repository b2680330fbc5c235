"""Layout of one chunk's working memory, and which part of it is stored as the chunk's record.

    one chunk's working memory, n elements (a staging buffer, or resident memory)
    | main weight or remainder | state 0: 4n | state 1: 4n | ... | gradient: 4n | model weight: n * itemsize |
    |<----------- record as stored ----------------------------->|
States may be smaller than 4n: see `StateFormat`. On a drive, a record fills blocks of `RECORD_GRANULE` bytes.
"""
# Example: n = 1000, bf16 model weight with remainder, two fp32 states (Adam).
#     remainder           0 ..  2,000    int16
#     exp_avg         2,000 ..  6,000    fp32
#     exp_avg_sq      6,000 .. 10,000    fp32; the record ends here
#     (padding)      10,000 .. 12,288    the drive stores three blocks of 4096 bytes
#     gradient       12,288 .. 16,288    fp32 scratch, never stored
#     model weight   16,288 .. 18,288    bf16; stored with the weights of its unit, not in the record

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from infinity.numerics.remainder import REMAINDER_DTYPE, join, split
from infinity.numerics.state_codec import decode, encode
from infinity.numerics.state_format import StateFormat
from swapper.config import round_up

# O_DIRECT needs addresses, offsets and sizes that are multiples of the drive's block size.
RECORD_GRANULE = 4096
"""A record on a drive fills whole blocks of so many bytes."""
WEIGHT = "weight"
"""The kind of a parameter's or buffer's own values: the fp32 main weight of a trained parameter, else what the model has."""
_FP32_BYTES = 4


class MainWeight(enum.Enum):
    """How the fp32 main weight is kept."""

    MODEL_WEIGHT = "model weight"
    """The model weight is fp32 and is the main weight: the record begins after it."""
    FP32 = "fp32"
    """In the record, beside a model weight of another dtype."""
    REMAINDER = "remainder"
    """As bf16 model weight and, in the record, a 16-bit remainder: see ``infinity.numerics.remainder``."""


_MAIN_BYTES = {MainWeight.MODEL_WEIGHT: 0, MainWeight.FP32: _FP32_BYTES, MainWeight.REMAINDER: REMAINDER_DTYPE.itemsize}


@dataclass(frozen=True)
class ChunkBuffer:
    """Views of one chunk's working memory, each 1-D and, one-byte states aside, with the chunk's number of elements."""

    main: torch.Tensor | None
    """fp32 main weight; None where it is split."""
    remainder: torch.Tensor | None
    """int16 remainder, where the main weight is split (bf16 weight and 16-bit remainder)."""
    states: Mapping[str, torch.Tensor]
    """Optimizer state by name, as it is stored."""
    gradient: torch.Tensor
    """fp32 scratch for the gradient."""
    weight: torch.Tensor
    """Model weight in the compute dtype; with fp32 compute it is ``main`` itself."""
    record: torch.Tensor
    """uint8 view of what is stored."""
    state_format: StateFormat
    """How ``states`` are stored."""

    # Views of a staging buffer are laid out once and used for many chunks, so what is derived from them is cached here.
    @cached_property
    def raw_record(self) -> npt.NDArray[np.uint8]:
        """``record`` in host memory, as reads and writes take it with the fewest steps."""
        return self.record.numpy()

    @cached_property
    def needs_weight(self) -> bool:
        """Whether the model weight is a part of the main weight, so that an update needs it from where weights rest."""
        return self.main is None or self.main is self.weight

    def with_weight(self, weight: torch.Tensor) -> ChunkBuffer:
        """A copy of these views with the model weight in other memory."""
        return replace(self, weight=weight, main=weight if self.main is self.weight else self.main)

    def read(self, kind: str, span: slice, target: torch.Tensor) -> None:
        """Copy main weights (`WEIGHT`) or a state of elements ``span`` into ``target``: fp32, 1-D without gaps.

        For main weights, ``weight`` must hold the model weights if needed.
        """
        if kind == WEIGHT and self.main is not None:
            target.copy_(self.main[span])
            return
        # Computed on the device of the views: only the result crosses to the target's device.
        device = self.weight.device
        is_here = target.device == device
        values = target if is_here else torch.empty(target.shape, dtype=torch.float32, device=device)
        if kind == WEIGHT and self.remainder is not None:
            join(self.weight[span], self.remainder[span], values)
        else:
            decode(self.state_format, kind, self.state_format.part(self.states[kind], span), values)
        if not is_here:
            target.copy_(values)

    def write(self, kind: str, span: slice, values: torch.Tensor) -> None:
        """Replace main weights (`WEIGHT`) or a state of elements ``span`` by ``values`` (1-D), rounded to what can be stored.

        Model weights that are a part of main weights are replaced as well.
        """
        if kind == WEIGHT and self.main is not None:
            self.main[span].copy_(values)
            return
        exact = values.to(self.weight.device, torch.float32).contiguous()
        if kind == WEIGHT and self.remainder is not None:
            # Both are written: the model weight here is not torch's cast of the main weight, see `remainder`.
            split(exact, self.weight[span], self.remainder[span])
        else:
            # Without noise it is rounded to nearest: a value that was read from here is stored as the same bytes again.
            encode(self.state_format, kind, exact, self.state_format.part(self.states[kind], span), None)

    def main_at(self, places: torch.Tensor) -> torch.Tensor:
        """Copies of the main weights at ``places`` (int64, 1-D): fp32. ``weight`` must hold the model weights if needed."""
        main = torch.empty(places.shape, dtype=torch.float32, device=places.device)
        if self.main is not None:
            torch.index_select(self.main, 0, places, out=main)
        elif self.remainder is not None:
            join(self.weight.index_select(0, places), self.remainder.index_select(0, places), main)
        return main

    def write_main_at(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the main weights at ``places`` by ``values`` (fp32), and the model weights that are a part of them."""
        if self.main is not None:
            self.main.index_copy_(0, places, values)
        elif self.remainder is not None:
            weight = torch.empty_like(values, dtype=self.weight.dtype)
            remainder = torch.empty_like(values, dtype=REMAINDER_DTYPE)
            split(values, weight, remainder)
            self.weight.index_copy_(0, places, weight)
            self.remainder.index_copy_(0, places, remainder)

    def cast_main(self) -> None:
        """Make ``weight`` the cast of ``main``, if they are two."""
        if self.main is not None and self.main is not self.weight:
            self.weight.copy_(self.main)

    def landing(self, dtype: torch.dtype) -> torch.Tensor:
        """Where gradients of ``dtype`` (fp32 or bf16) may be put before they are used: 1-D, one element each."""
        if dtype == self.gradient.dtype:
            return self.gradient
        # A bf16 gradient must not overlap the fp32 scratch into which it is widened, or an update would overwrite
        # elements that it has not read yet. The model weight has the same size, and is written only after the update.
        if self.remainder is None:
            return self.weight
        # With a remainder the update reads the model weight. But no update widens a gradient into this scratch then:
        # the kernel reads bf16, and `ChunkUpdater` has scratch of its own for other optimizers.
        return self.gradient.view(dtype)[: self.weight.numel()]


@dataclass(frozen=True)
class ChunkFormat:
    """What a record holds per element."""

    weight_dtype: torch.dtype
    """Compute dtype: that of the model weight."""
    main: MainWeight
    states: StateFormat = StateFormat.FP32
    """How the optimizer's states are stored."""

    @classmethod
    def of(
        cls, weight_dtype: torch.dtype, *, has_remainder: bool, states: StateFormat = StateFormat.FP32
    ) -> ChunkFormat:
        """The format for a compute dtype. With fp32, main weights leave nothing to choose."""
        if weight_dtype == torch.float32:
            return cls(weight_dtype, MainWeight.MODEL_WEIGHT, states)
        return cls(weight_dtype, MainWeight.REMAINDER if has_remainder else MainWeight.FP32, states)

    @property
    def needs_weight(self) -> bool:
        """Whether the model weight is the main weight or a part of it, so that an update needs it."""
        return self.main is not MainWeight.FP32

    def main_bytes(self, numel: int) -> int:
        """Bytes of a record before its first state."""
        return numel * _MAIN_BYTES[self.main]

    def record_bytes(self, numel: int, num_states: int) -> int:
        """Bytes of a record of ``numel`` elements, as it lies in memory."""
        return self.main_bytes(numel) + self.states.num_bytes(numel) * num_states

    def stored_bytes(self, numel: int, num_states: int, chunk_numel: int | None = None) -> int:
        """Bytes on a drive for ``numel`` elements in chunks of ``chunk_numel``, or in one."""
        # The last chunk of a unit may be shorter: it is padded to a block of its own.
        num_chunks, rest = divmod(numel, chunk_numel or max(numel, 1))
        whole = round_up(self.record_bytes(chunk_numel or numel, num_states), RECORD_GRANULE)
        return num_chunks * whole + round_up(self.record_bytes(rest, num_states), RECORD_GRANULE)

    def workspace_bytes(self, numel: int, num_states: int) -> int:
        """Bytes of the working memory for one chunk of ``numel`` elements."""
        # With fp32 compute the model weight lies before the record, otherwise after the gradient.
        return self.stored_bytes(numel, num_states) + numel * (_FP32_BYTES + self.weight_dtype.itemsize)

    def numel_in(self, num_bytes: int, num_states: int, granule: int) -> int:
        """The most elements, a multiple of ``granule``, whose working memory fits."""
        # First without the padding of the record. That is below 4096 bytes, and a granule of 2048 elements takes more:
        # one granule less makes room for it. Example: with a remainder and two fp32 states a granule takes 20,480 bytes
        # of record and 12,288 of scratch, and 1 MiB holds 32 of them.
        per_granule = self.workspace_bytes(granule, num_states) - self.stored_bytes(granule, num_states)
        count = num_bytes // (per_granule + self.record_bytes(granule, num_states))
        if count and self.workspace_bytes(count * granule, num_states) > num_bytes:
            count -= 1  # for what fills up the record
        return count * granule

    def lay_out(self, memory: torch.Tensor, numel: int, names: Sequence[str]) -> ChunkBuffer:
        """Views of ``memory`` (uint8, 4096-aligned, on any device) as the working memory of a chunk."""
        weight = None
        if self.main is MainWeight.MODEL_WEIGHT:  # the model weight lies before the record
            weight, memory = memory[: numel * _FP32_BYTES].view(torch.float32), memory[numel * _FP32_BYTES :]
        record_bytes = self.stored_bytes(numel, len(names))
        return self.over_scratch(memory[:record_bytes], numel, names, memory[record_bytes:], weight)

    def over_scratch(
        self, record: torch.Tensor, numel: int, names: Sequence[str], scratch: torch.Tensor, weight: torch.Tensor | None
    ) -> ChunkBuffer:
        """A workspace over a record that lies elsewhere (uint8), and maybe a model weight that does.

        Args:
            record: uint8.
            numel: elements of the chunk.
            names: of the states.
            scratch: uint8: memory for what is missing; may be empty if there is a weight and the gradient needs none.
            weight: 1-D in the compute dtype, or None.
        """
        gradient_bytes = numel * _FP32_BYTES
        gradient = scratch[:gradient_bytes].view(torch.float32)
        if weight is None:
            weight = scratch[gradient_bytes:][: numel * self.weight_dtype.itemsize].view(self.weight_dtype)
        return self.over(record, numel, names, gradient, weight)

    def over(
        self, record: torch.Tensor, numel: int, names: Sequence[str], gradient: torch.Tensor, weight: torch.Tensor
    ) -> ChunkBuffer:
        """A workspace whose record (uint8), scratch for the gradient and model weight lie in these tensors."""
        start, state_bytes = self.main_bytes(numel), self.states.num_bytes(numel)
        states = {
            name: record[start + i * state_bytes : start + (i + 1) * state_bytes].view(self.states.dtype)
            for i, name in enumerate(names)
        }
        remainder = record[:start].view(REMAINDER_DTYPE) if self.main is MainWeight.REMAINDER else None
        main = None
        if remainder is None:
            main = weight if self.main is MainWeight.MODEL_WEIGHT else record[:start].view(torch.float32)
        return ChunkBuffer(main, remainder, states, gradient, weight, record, self.states)
