"""Reads weights that files have quantized by bitsandbytes or as FP8.

Each weight gets its unpacked values, and the packed bytes that they came from (`infinity.packed.sources`). An engine
with the same ``frozen_dtype`` stores these bytes as they are: nothing is rounded twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from infinity.device.drive_tensors import DriveTensors
from infinity.errors import CheckpointError
from infinity.packed.blocks import FP8_TILE, LEVELS, NF4_BLOCK, NF4_RECORD_BYTES
from infinity.packed.formats import Fp8, packed_format

_STATE = ".quant_state.bitsandbytes__"
_OTHERS = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    "_blocks": "MXFP4",
    ".weight_packed": "compressed-tensors",
}
"""Ends of names in formats that are not supported -> the format."""
_METHODS = {"bitsandbytes": "bitsandbytes", "fp8": "FP8"}
"""``quant_method`` in a config -> the supported format."""
_CURE = (
    "Take the model's unquantized weights (or a copy in bitsandbytes' NF4 or FP8) and pack them by infinity.frozen_dtype; or "
    "dequantize them with transformers (quantization_config with dequantize=True, or model.dequantize()) and save them"
)


@dataclass
class QuantizedFiles:
    """Tensors of files after unpacking.

    Attributes:
        tensors: all weights by name, without the tensors of scales and codes.
        packed: name of a weight that was quantized -> its format and packed bytes.
    """

    tensors: dict[str, torch.Tensor]
    packed: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)

    def packed_at(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Address of the unpacked tensor -> the same."""
        return {self.tensors[name].data_ptr(): found for name, found in self.packed.items()}


def check_method(path: Path, quantization: Any) -> None:
    """Check that a model's config names no unsupported quantization.

    Raises:
        CheckpointError: it does.
    """
    settings = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    method = str(settings.get("quant_method", "unknown")).lower().removeprefix("quantizationmethod.")
    if method not in _METHODS:
        raise CheckpointError.of_weights(path, f"is quantized by {method.upper()}, which is not read", cure=_CURE)
    size = settings.get("weight_block_size")
    if method == "fp8" and size is not None and [*size] != [FP8_TILE, FP8_TILE]:
        raise CheckpointError.of_weights(path, f"has FP8 weights with tiles of {size}, not [128, 128]", cure=_CURE)


def plain_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, directories: Sequence[Path]
) -> QuantizedFiles:
    """Unpack the quantized tensors. Other tensors stay as they are.

    Args:
        path: of the files, for messages.
        tensors: of the files, by name.
        dtype: of the unpacked weights; None: the dtype that bitsandbytes has recorded, or bf16.
        directories: unpacked weights are in files in them; in memory if there are none.

    Raises:
        CheckpointError: the quantization of a weight is not supported, or its scales do not fit.
    """
    for name in tensors:
        for ending, method in _OTHERS.items():
            if name.endswith(ending):
                _refuse_others(path, name, ending, method, tensors)
    drives = DriveTensors(directories) if directories else None

    def empty(shape: Sequence[int], kind: torch.dtype) -> torch.Tensor:
        return drives.empty(shape, kind) if drives else torch.empty(*shape, dtype=kind, device="cpu")

    found = QuantizedFiles(dict(tensors))
    for name in tensors:
        if _STATE in name:
            _read_four_bits(path, name, found, dtype, empty)
        elif name.endswith(".SCB"):
            _read_eight_bits(path, name, found, dtype, empty)
        elif name.endswith(".weight_scale_inv"):
            _read_fp8(path, name, found, dtype, empty)
    return found


_Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]


def _refuse_others(path: Path, name: str, ending: str, method: str, tensors: Mapping[str, torch.Tensor]) -> None:
    scales = name.removesuffix(ending) + ("_scales" if ending.startswith("_") else ".scales")
    if ending == "_blocks" and scales not in tensors:
        return  # a tensor of another kind that ends with "_blocks"
    raise CheckpointError.of_weights(path, f"has '{name}', quantized by {method}, which is not read", cure=_CURE)


def _unpack(
    name: str,
    format_name: str,
    shape: Sequence[int],
    stored: torch.Tensor,
    dtype: torch.dtype,
    found: QuantizedFiles,
    empty: _Empty,
) -> None:
    values = empty(shape, dtype)
    packed_format(format_name).unpack(stored, shape, values.view(-1))
    found.tensors[name] = values
    found.packed[name] = format_name, stored


def _read_four_bits(
    path: Path, state_name: str, found: QuantizedFiles, dtype: torch.dtype | None, empty: _Empty
) -> None:
    weight, _, kind = state_name.partition(_STATE)
    tensors = found.tensors
    try:
        # bitsandbytes stores a 4-bit weight "w" as these tensors:
        #   w                    codes, 2 a byte, the first in the high half
        #   w.absmax             a scale per block: fp32, or uint8 codes if the scales are quantized as well (double
        #   quantization)
        #   w.quant_map          the 16 levels
        #   w.nested_absmax, w.nested_quant_map    of double quantization: a scale per nested_blocksize scales, and 256
        #   levels
        #   w.quant_state.bitsandbytes__nf4        JSON as bytes: shape, blocksize, dtype, nested_offset, ...
        state: dict[str, Any] = json.loads(bytes(tensors.pop(state_name).tolist()))
        codes, absmax = tensors[weight].reshape(-1), tensors.pop(f"{weight}.absmax")
        levels = tensors.pop(f"{weight}.quant_map")
        shape, block = [int(size) for size in state["shape"]], int(state["blocksize"])
        if absmax.dtype == torch.uint8:
            nested, nested_levels = tensors.pop(f"{weight}.nested_absmax"), tensors.pop(f"{weight}.nested_quant_map")
            scales = nested[
                torch.arange(absmax.numel(), dtype=torch.int64, device="cpu") // int(state["nested_blocksize"])
            ]
            # Rounded twice, as in bitsandbytes: the product, and the sum.
            absmax = nested_levels[absmax.int()] * scales + torch.tensor(
                state["nested_offset"], dtype=torch.float32, device="cpu"
            )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError.of_weights(
            path,
            f"has '{weight}' in 4 bits without its quantization state: {error}",
            cure="Fetch it again, or save it again",
        ) from error
    if kind != "nf4" or not torch.equal(levels.float(), LEVELS):
        raise CheckpointError.of_weights(path, f"has '{weight}' as {kind} of bitsandbytes, not nf4", cure=_CURE)
    numel = math.prod(shape)
    if block % NF4_BLOCK or absmax.numel() != -(-numel // block) or codes.numel() != -(-numel // 2):
        raise CheckpointError.of_weights(
            path,
            f"has '{weight}' in blocks of {block} that do not make {shape}",
            cure="Fetch it again, or save it again",
        )
    # Blocks of the file may be larger (128, 256, ...): each of ours of 64 weights in it gets the same scale. Codes are
    # in the same order, so they are copied. The last record is filled up with zeros.
    num_blocks = -(-numel // NF4_BLOCK)
    stored = empty([num_blocks * NF4_RECORD_BYTES], torch.uint8)
    records = stored.view(-1, NF4_RECORD_BYTES)
    records[:, :4] = absmax.float().repeat_interleave(block // NF4_BLOCK)[:num_blocks].view(torch.uint8).view(-1, 4)
    whole = codes.numel() // (NF4_BLOCK // 2)
    records[:whole, 4:] = codes[: whole * (NF4_BLOCK // 2)].view(-1, NF4_BLOCK // 2)
    if whole < num_blocks:
        records[whole, 4:] = 0
        records[whole, 4 : 4 + codes.numel() - whole * (NF4_BLOCK // 2)] = codes[whole * (NF4_BLOCK // 2) :]
    noted = getattr(torch, str(state.get("dtype", "bfloat16")).removeprefix("torch."), torch.bfloat16)
    _check_scales(path, weight, absmax)
    _unpack(weight, "nf4", shape, stored, dtype or noted, found, empty)


def _read_eight_bits(path: Path, name: str, found: QuantizedFiles, dtype: torch.dtype | None, empty: _Empty) -> None:
    weight = f"{name.removesuffix('.SCB')}.weight"
    scales = found.tensors.pop(name)
    # Not 0: an old bitsandbytes has stored the codes in tiles for its kernels.
    order = found.tensors.pop(f"{name.removesuffix('.SCB')}.weight_format", None)
    codes = found.tensors.get(weight)
    is_by_rows = order is None or not order.any()
    if codes is None or codes.dtype != torch.int8 or codes.dim() != 2 or scales.numel() != len(codes) or not is_by_rows:
        raise CheckpointError.of_weights(
            path,
            f"has '{name}' that does not match '{weight}'",
            cure="Save it with a newer bitsandbytes, or fetch it again",
        )
    format_int8 = packed_format("int8")
    stored = empty([format_int8.num_bytes(codes.shape)], torch.uint8)
    # A record of int8 is a row: SCB is its largest magnitude, in fp32, and then codes and padding.
    records = stored.view(len(codes), -1)
    records.zero_()
    records[:, :4] = scales.float().contiguous().view(torch.uint8).view(-1, 4)
    records[:, 4 : 4 + codes.shape[1]] = codes.view(torch.uint8)
    _check_scales(path, weight, scales)
    _unpack(weight, "int8", codes.shape, stored, dtype or torch.bfloat16, found, empty)


def _read_fp8(path: Path, name: str, found: QuantizedFiles, dtype: torch.dtype | None, empty: _Empty) -> None:
    weight = name.removesuffix("_scale_inv")
    scales, codes = found.tensors.pop(name), found.tensors.get(weight)
    if codes is None or codes.dtype != torch.float8_e4m3fn or codes.dim() != 2:
        raise CheckpointError.of_weights(path, f"has '{name}' without a weight in e4m3", cure=_CURE)
    if tuple(scales.shape) != tuple(-(-size // FP8_TILE) for size in codes.shape):
        raise CheckpointError.of_weights(
            path,
            f"has scales of {tuple(scales.shape)} for '{weight}' of {tuple(codes.shape)}, not of tiles of 128 x 128",
            cure=_CURE,
        )
    _check_scales(path, weight, scales)
    form = Fp8()
    stored = empty([form.num_bytes(codes.shape)], torch.uint8)
    place = 0
    for row, start in enumerate(range(0, len(codes), FP8_TILE)):
        band = codes[start : start + FP8_TILE]
        # 0x7F and 0xFF are the NaNs of e4m3fn, which has no infinities.
        if bool(((band.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise CheckpointError.of_weights(path, f"has NaN in '{weight}'", cure="Fetch it again")
        size = form.record_bytes(band.numel(), codes.shape)
        form.write_record(stored[place : place + size], scales[row].float(), band)
        place += size
    _unpack(weight, "fp8_e4m3", codes.shape, stored, dtype or torch.bfloat16, found, empty)


def _check_scales(path: Path, weight: str, scales: torch.Tensor) -> None:
    if not bool(scales.float().isfinite().all()):
        raise CheckpointError.of_weights(
            path, f"has scales of '{weight}' that are NaN or infinite", cure="Fetch it again"
        )
