"""How the elements of one weight are stored packed: NF4, int8, fp8 and bf16, each with its definition in torch's terms.

A packed weight is a row of records. Each record has its scales and then its codes. So a weight can be unpacked front to
back, in the memory that its values will fill.

| name | a record | a weight is |
|---|---|---|
| ``nf4`` | 64 weights in C order: fp32 scale, 32 bytes, the first weight in the high half | one of 16 levels x scale |
| ``int8`` | a row: fp32 scale, a byte per weight | code x scale x fp32(1/127) |
| ``fp8_e4m3`` | 128 rows: an fp32 scale for each 128 columns, a byte per weight | e4m3 number x scale |
| ``bf16`` | a weight | itself, where the compute dtype is wider |

Products are taken in fp32 and rounded once, to the compute dtype.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from infinity.numerics.remainder import has_kernels
from infinity.packed.blocks import APART, FP8_TILE, INT8_FACTOR, LEVELS, NF4_BLOCK, NF4_RECORD_BYTES
from infinity.units.layout import round_up

logger = logging.getLogger(__name__)
# Loading and packing a base under a budget of 40 MiB peaked at 54 MiB with parts of 4 MB: the C library's heap kept
# them. With parts of 512 KB it is 44.5 MiB.
_HOST_NUMEL = 1 << 17
"""Elements that are packed at a time (at least a record): 512 KB of fp32, which stay in the processor's cache."""
_DEVICE_NUMEL = 1 << 20
"""Elements that a GPU unpacks at a time (at least a record): temporary tensors of 4 MiB in fp32 or int32."""
COMPUTE_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


class Elements(Protocol):
    """A 1-D tensor, or an object that is sliced like one and makes its parts on demand."""

    def numel(self) -> int: ...

    def __getitem__(self, span: slice, /) -> torch.Tensor: ...


class NotFiniteError(ValueError):
    """A weight to be packed has a NaN or an infinity."""


class PackedFormat(ABC):
    """A way to store weights. ``shape`` is the parameter's: all but the last dimension make rows."""

    name: ClassVar[str]

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a packed weight; a multiple of 4."""
        return self._part_bytes(math.prod(shape), shape)

    @abstractmethod
    def record_numel(self, shape: Sequence[int]) -> int:
        """Number of weights in a full record."""

    @abstractmethod
    def record_bytes(self, numel: int, shape: Sequence[int]) -> int:
        """Bytes of a record with ``numel`` weights; a multiple of 4, so that fp32 scales are aligned."""

    def saves_memory(self, shape: Sequence[int], itemsize: int, padded_numel: int) -> bool:
        """Whether a weight can be unpacked in place: no record has more bytes than the weights that it becomes.

        Args:
            shape: of the parameter.
            itemsize: bytes of a weight in the compute dtype.
            padded_numel: elements of the memory that the weight fills.
        """
        # In bf16 (itemsize 2), nf4 has 36 bytes for 64 weights of 128 bytes, so writing never overtakes reading. Its
        # last record has 36 bytes for any number of weights: a weight of 8 elements with padded_numel = 64 fits, as 36
        # <= 128. An int8 matrix with one column has 8 bytes a record and 2 a weight: it is not packed.
        record = self.record_numel(shape)
        whole, last = divmod(math.prod(shape), record)
        if whole and self.record_bytes(record, shape) > record * itemsize:
            return False
        left = padded_numel - whole * record
        return math.prod(shape) > 0 and (not last or self.record_bytes(last, shape) <= left * itemsize)

    def pack(self, values: Elements, shape: Sequence[int], stored: torch.Tensor) -> None:
        """Pack ``values`` (1-D in C order, floating-point, on any device) into ``stored`` (uint8, `num_bytes`).

        Raises:
            NotFiniteError: one of them is NaN or infinite.
        """
        record = self.record_numel(shape)
        step = record * max(_HOST_NUMEL // record, 1)
        place = 0
        for start in range(0, values.numel(), step):
            part = values[start : start + step].to("cpu", torch.float32)
            num_bytes = self._part_bytes(part.numel(), shape)
            self._pack_part(part, shape, stored[place : place + num_bytes])
            place += num_bytes

    def _part_bytes(self, numel: int, shape: Sequence[int]) -> int:
        whole, last = divmod(numel, self.record_numel(shape))
        return whole * self.record_bytes(self.record_numel(shape), shape) + (
            self.record_bytes(last, shape) if last else 0
        )

    @abstractmethod
    def _pack_part(self, values: torch.Tensor, shape: Sequence[int], stored: torch.Tensor) -> None:
        """As `pack`, for some whole records, or up to the end. ``values``: fp32, 1-D, on the CPU."""

    def unpack(self, stored: torch.Tensor, shape: Sequence[int], out: torch.Tensor) -> None:
        """Unpack into ``out``: 1-D, contiguous, on the device of ``stored``. Values are rounded to its dtype.

        On the CPU, ``stored`` may be at the end of the memory of ``out`` if `saves_memory` is true.
        """
        if has_kernels(out):
            self._unpack_on_cpu(stored, shape, out)
        elif out.is_cuda and _has_gpu_kernel(self, out.dtype, out.device):
            self._unpack_on_gpu(stored, shape, out)
        else:  # a copy, where they may share memory
            self._unpack_by_torch(stored.clone() if out.device.type == "cpu" else stored, shape, out)

    def _unpack_on_cpu(self, stored: torch.Tensor, shape: Sequence[int], out: torch.Tensor) -> None:
        from infinity.packed.kernels import UNPACK

        # Kernels take the same bytes twice: as codes (uint8), and as the scales between them (float32).
        packed = stored.numpy()
        UNPACK[self.name](packed, packed.view("float32"), _words(out), shape[-1], _gap(stored, out))

    def _unpack_on_gpu(self, stored: torch.Tensor, shape: Sequence[int], out: torch.Tensor) -> None:
        from infinity.packed.gpu_kernels import unpack

        record = self.record_numel(shape)
        unpack(self.name, stored, shape, out, record, self.record_bytes(record, shape))

    @abstractmethod
    def _unpack_by_torch(self, stored: torch.Tensor, shape: Sequence[int], out: torch.Tensor) -> None:
        """Unpack with torch's operations: on a GPU, or without a compiler. ``stored`` and ``out`` share no memory."""


class Nf4(PackedFormat):
    """Four bits: the levels of QLoRA's NormalFloat, single quantization, the blocks of bitsandbytes."""

    name = "nf4"

    def record_numel(self, shape: Sequence[int]) -> int:
        return NF4_BLOCK

    def record_bytes(self, numel: int, shape: Sequence[int]) -> int:
        return NF4_RECORD_BYTES

    def _pack_part(self, values: torch.Tensor, shape: Sequence[int], stored: torch.Tensor) -> None:
        from infinity.packed.kernels import pack_nf4

        packed = stored.numpy()
        if pack_nf4(values.numpy(), packed, packed.view("float32")) >= 0:
            raise NotFiniteError

    def _unpack_by_torch(self, stored: torch.Tensor, shape: Sequence[int], out: torch.Tensor) -> None:
        # pairs[0x2F] = (LEVELS[2], LEVELS[15]): one lookup per byte.
        pairs = torch.cartesian_prod(LEVELS, LEVELS).to(stored.device)  # [256, 2]
        for start in range(0, out.numel(), _DEVICE_NUMEL):  # an index takes 4 bytes per code of half a byte
            part = out[start : start + _DEVICE_NUMEL]
            # Records are independent, and _DEVICE_NUMEL is a multiple of 64: each part begins at a record.
            first, last = start // NF4_BLOCK, -(-(start + part.numel()) // NF4_BLOCK)
            records = stored[first * NF4_RECORD_BYTES : last * NF4_RECORD_BYTES].view(-1, NF4_RECORD_BYTES)
            scales = records[:, :4].contiguous().view(torch.float32)
            values = pairs[records[:, 4:].int()].view(len(records), -1)
            part.copy_(values.mul_(scales).view(-1)[: part.numel()])


class Int8(PackedFormat):
    """A byte per weight and a scale per row, as LLM.int8 of bitsandbytes."""

    name = "int8"

    def record_numel(self, shape: Sequence[int]) -> int:
        return max(shape[-1], 1)

    def record_bytes(self, numel: int, shape: Sequence[int]) -> int:
        return 4 + round_up(numel, 4)

    def _pack_part(self, values: torch.Tensor, shape: Sequence[int], stored: torch.Tensor) -> None:
        rows = values.view(-1, shape[-1])
        _check_finite(rows)
        largest = rows.abs().amax(dim=1, keepdim=True)
        # A row of zeros: its codes are zeros, and not 0 * inf.
        factor = torch.where(largest > 0, 127.0 / largest, 0.0)
        records = stored.view(len(rows), -1)
        # The stored scale is the row's largest magnitude, as in LLM.int8, where 127 is a part of unpacking.
        records[:, :4] = largest.view(torch.uint8)
        records[:, 4 : 4 + shape[-1]] = (rows * factor).round().to(torch.int8).view(torch.uint8)

    def _unpack_by_torch(self, stored: torch.Tensor, shape: Sequence[int], out: torch.Tensor) -> None:
        columns = shape[-1]
        records, rows = stored.view(-1, 4 + round_up(columns, 4)), out.view(-1, columns)
        scales = records[:, :4].contiguous().view(torch.float32)
        step = max(_DEVICE_NUMEL // columns, 1)
        for start in range(0, len(rows), step):
            codes = records[start : start + step, 4 : 4 + columns].contiguous().view(torch.int8)
            # The order of the products is that of the kernels: another one may differ in the last bit.
            rows[start : start + step] = codes.float() * scales[start : start + step] * INT8_FACTOR


class Fp8(PackedFormat):
    """A byte per weight, e4m3, and a scale for each 128 x 128 tile, as DeepSeek-V3 stores weights."""

    name = "fp8_e4m3"

    def record_numel(self, shape: Sequence[int]) -> int:
        return FP8_TILE * max(shape[-1], 1)

    def record_bytes(self, numel: int, shape: Sequence[int]) -> int:
        return 4 * -(-shape[-1] // FP8_TILE) + round_up(numel, 4)

    def _pack_part(self, values: torch.Tensor, shape: Sequence[int], stored: torch.Tensor) -> None:
        columns, record = shape[-1], self.record_numel(shape)
        place = 0
        for start in range(0, values.numel(), record):
            band = values[start : start + record].view(-1, columns)
            _check_finite(band)
            # A band is up to 128 rows, so the largest magnitude of a column and then of 128 columns is that of a tile.
            tiles = band.abs().amax(dim=0).split(FP8_TILE)
            scales = torch.stack([tile.max() for tile in tiles]) / 448.0
            # 448 is the largest e4m3 number. A tile of zeros gets the scale 1, as 0 / 0 is NaN.
            scales = torch.where(scales > 0, scales, 1.0)
            codes = (band / scales.repeat_interleave(FP8_TILE)[:columns]).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
            self.write_record(stored[place : place + self.record_bytes(band.numel(), shape)], scales, codes)
            place += self.record_bytes(band.numel(), shape)

    def write_record(self, record: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """Put the scales (fp32) and codes (e4m3, or their bits) of 128 rows together."""
        # A band of a weight with 300 columns: 3 scales in 12 bytes, then 128 * 300 codes row by row, then zeros up to a
        # multiple of 4.
        head = 4 * scales.numel()
        record[:head] = scales.contiguous().view(torch.uint8)
        record[head : head + codes.numel()] = codes.contiguous().view(torch.uint8).view(-1)
        record[head + codes.numel() :] = 0

    def _unpack_by_torch(self, stored: torch.Tensor, shape: Sequence[int], out: torch.Tensor) -> None:
        columns, record, place = shape[-1], self.record_numel(shape), 0
        head = 4 * -(-columns // FP8_TILE)
        for start in range(0, out.numel(), record):
            band = out[start : start + record].view(-1, columns)
            scales = stored[place : place + head].view(torch.float32)
            codes = stored[place + head : place + head + band.numel()].view(torch.float8_e4m3fn).view(-1, columns)
            band.copy_(codes.float() * scales.repeat_interleave(FP8_TILE)[:columns])
            place += self.record_bytes(band.numel(), shape)


class Bf16(PackedFormat):
    """Two bytes, where weights are computed with in fp32."""

    name = "bf16"

    def record_numel(self, shape: Sequence[int]) -> int:
        # Two weights, so that a record has a multiple of 4 bytes.
        return 2

    def record_bytes(self, numel: int, shape: Sequence[int]) -> int:
        return 4

    def _pack_part(self, values: torch.Tensor, shape: Sequence[int], stored: torch.Tensor) -> None:
        _check_finite(values)
        stored[: 2 * values.numel()].view(torch.bfloat16).copy_(values)

    def _unpack_on_cpu(self, stored: torch.Tensor, shape: Sequence[int], out: torch.Tensor) -> None:
        from infinity.packed.kernels import widen

        widen(stored.numpy()[: 2 * out.numel()].view("uint16"), out.numpy())

    def _unpack_by_torch(self, stored: torch.Tensor, shape: Sequence[int], out: torch.Tensor) -> None:
        out.copy_(stored[: 2 * out.numel()].view(torch.bfloat16))


@functools.cache
def _has_gpu_kernel(form: PackedFormat, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel runs on this GPU, and has the bits of torch's operations."""
    if isinstance(form, Bf16):
        return False  # a cast is one kernel of torch
    # A last band of two rows, and one and a half tiles.
    shape = FP8_TILE + 2, FP8_TILE * 3 // 2
    values = torch.linspace(-1.0, 1.0, math.prod(shape), dtype=torch.float32, device="cpu") ** 3
    stored = torch.empty(form.num_bytes(shape), dtype=torch.uint8, device="cpu")
    form.pack(values, shape, stored)
    stored = stored.to(device)
    found, expected = (torch.empty(len(values), dtype=dtype, device=device) for _ in range(2))
    form._unpack_by_torch(stored, shape, expected)
    try:
        form._unpack_on_gpu(stored, shape, found)
        if torch.equal(found, expected):
            return True
        problem = "it has other bits than torch's operations"
    except Exception as error:  # no Triton, no C compiler for it, or a GPU that it does not know
        problem = f"{type(error).__name__}: {error}"
    logger.warning("%s weights are unpacked by torch's operations, and not by one kernel: %s", form.name, problem)
    return False


_FORMATS: dict[str, PackedFormat] = {each.name: each for each in (Nf4(), Int8(), Fp8(), Bf16())}


def packed_format(name: str) -> PackedFormat:
    """The format of this name."""
    return _FORMATS[name]


def _words(weights: torch.Tensor) -> Any:
    """Memory of weights as kernels take it: float32, bf16 as uint16, fp16 as int16."""
    if weights.dtype == torch.float32:
        return weights.numpy()
    words = weights.view(torch.int16).numpy()
    return words.view("uint16") if weights.dtype == torch.bfloat16 else words


def _gap(stored: torch.Tensor, out: torch.Tensor) -> int:
    """Bytes from the beginning of ``out`` to that of ``stored``, if their memory overlaps; else `APART`."""
    begin, end = out.data_ptr(), out.data_ptr() + out.numel() * out.element_size()
    is_apart = stored.data_ptr() >= end or stored.data_ptr() + stored.numel() <= begin
    return APART if is_apart else stored.data_ptr() - begin


def _check_finite(values: torch.Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise NotFiniteError
