"""Unpacking on a GPU: one kernel for a weight, whatever its format. torch for CUDA brings Triton along."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from infinity.packed.blocks import FP8_TILE, INT8_FACTOR, LEVELS, NF4_BLOCK

_BLOCK = 1024  # weights per program: eight for each of its 128 threads


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(
    stored: Any,
    scales: Any,
    table: Any,
    out: Any,
    numel: Any,
    factor: Any,
    BITS: tl.constexpr,
    RECORD: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # A record has a scale for each TILE of its COLUMNS, then codes: see the table at the top of `formats`. Worked example:
    # fp8, rows of 300. Weight 150 * 300 + 200 is in record 1, which starts at 1 * (12 + 128 * 300) bytes, as element 22 * 300
    # + 200, and has the scale 200 // 128 of 3.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < numel
    start, element = place // RECORD * RECORD_BYTES, place % RECORD
    scale = tl.load(scales + start // 4 + element % COLUMNS // TILE, mask=is_inside, other=0.0)
    codes = stored + start + 4 * ((COLUMNS + TILE - 1) // TILE)
    code = tl.load(codes + element * BITS // 8, mask=is_inside, other=0).to(tl.int32)
    if BITS == 4:
        code = (code >> (4 - element % 2 * 4).to(tl.int32)) & 15  # the first weight is in the high half
    # In this order, as torch and the kernels of the CPU take the products: another one may differ in the last bit.
    value = tl.load(table + code) * scale * factor
    tl.store(out + place, value.to(out.dtype.element_ty), mask=is_inside)


@functools.cache
def _table(name: str, device: torch.device) -> torch.Tensor:
    """Code -> value in fp32, before scaling."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    dtypes = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
    return (LEVELS if name == "nf4" else codes.view(dtypes[name]).float()).to(device)


def unpack(
    name: str, stored: torch.Tensor, shape: Sequence[int], out: torch.Tensor, record_numel: int, record_bytes: int
) -> None:
    """As `PackedFormat.unpack`, for nf4, int8 and fp8_e4m3. The last two arguments are of a full record."""
    is_nf4 = name == "nf4"
    columns = NF4_BLOCK if is_nf4 else shape[-1]
    with torch.cuda.device_of(out):  # Triton launches on the current one
        _unpack[(triton.cdiv(out.numel(), _BLOCK),)](
            stored,
            stored.view(torch.float32),
            _table(name, out.device),
            out,
            out.numel(),
            INT8_FACTOR if name == "int8" else 1.0,
            BITS=4 if is_nf4 else 8,
            RECORD=record_numel,
            RECORD_BYTES=record_bytes,
            COLUMNS=columns,
            TILE=FP8_TILE if name == "fp8_e4m3" else columns,
            BLOCK=_BLOCK,
        )
