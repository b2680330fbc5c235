"""Reads weights that files have quantized by bitsandbytes or as FP8.

Each weight gets its unpacked values, and the packed bytes that they came from (`infinity.packed.sources`). An engine
with the same ``frozen_dtype`` stores these bytes as they are: nothing is rounded twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.device.drive_tensors import DriveTensors
from infinity.errors import CheckpointError
from infinity.packed.blocks import FP8_TILE, LEVELS, NF4_BLOCK, NF4_RECORD_BYTES
from infinity.packed.formats import COMPUTE_DTYPES, Fp8, packed_format

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
_AGAIN = "Fetch it again, or save it again"
_NOTED = {str(dtype).removeprefix("torch."): dtype for dtype in COMPUTE_DTYPES}
"""``dtype`` of a state of bitsandbytes -> the same."""


def check_method(path: Path, quantization: Any) -> None:
    """Check that a model's config names no unsupported quantization.

    Raises:
        CheckpointError: it does.
    """
    settings = quantization.to_dict() if hasattr(quantization, "to_dict") else quantization
    settings = settings if isinstance(settings, Mapping) else {}
    method = str(settings.get("quant_method", "unknown")).lower().removeprefix("quantizationmethod.")
    if method not in _METHODS:
        raise CheckpointError.of_weights(path, f"is quantized by {method.upper()}, which is not read", cure=_CURE)
    size = settings.get("weight_block_size")
    if method == "fp8" and size not in (None, [FP8_TILE, FP8_TILE], (FP8_TILE, FP8_TILE)):
        raise CheckpointError.of_weights(path, f"has FP8 weights with tiles of {size}, not [128, 128]", cure=_CURE)


class QuantizedFiles:
    """Tensors of files, of which the quantized ones are unpacked. Other tensors stay as they are.

    Attributes:
        tensors: all weights by name, without the tensors of scales and codes.
        packed: name of a weight that was quantized -> its format and packed bytes.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, directories: Sequence[Path]
    ) -> None:
        """
        Args:
            path: of the files, for messages.
            tensors: of the files, by name.
            dtype: of the unpacked weights; None: the dtype that bitsandbytes has recorded, or bf16.
            directories: unpacked weights are in files in them; in memory if there are none.

        Raises:
            CheckpointError: the quantization of a weight is not supported, or its scales do not fit.
        """
        self.tensors = dict(tensors)
        self.packed: dict[str, tuple[str, torch.Tensor]] = {}
        self._path = path
        self._dtype = dtype
        self._drives = DriveTensors(directories) if directories else None
        for name in tensors:
            self._refuse_others(name)
        for name in tensors:
            if _STATE in name:
                self._read_four_bits(name)
            elif name.endswith(".SCB"):
                self._read_eight_bits(name)
            elif name.endswith(".weight_scale_inv"):
                self._read_fp8(name)

    def packed_at(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Address of the unpacked tensor -> the same."""
        return {self.tensors[name].data_ptr(): found for name, found in self.packed.items()}

    def _error(self, problem: str, cure: str = _CURE) -> CheckpointError:
        return CheckpointError.of_weights(self._path, problem, cure=cure)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._drives.empty(shape, dtype) if self._drives else torch.empty(*shape, dtype=dtype, device="cpu")

    def _refuse_others(self, name: str) -> None:
        """Raise if a tensor's name is one of a format that is not supported."""
        # A tensor whose name ends with "_blocks" is only MXFP4 if it has scales.
        is_plain = name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" not in self.tensors
        for ending, method in _OTHERS.items():
            if name.endswith(ending) and not is_plain:
                raise self._error(f"has '{name}', quantized by {method}, which is not read")

    def _check_scales(self, weight: str, scales: torch.Tensor) -> None:
        if not scales.is_floating_point() or not bool(scales.float().isfinite().all()):
            raise self._error(f"has scales of '{weight}' that are not finite numbers", cure="Fetch it again")

    def _unpack(
        self, name: str, form: str, shape: Sequence[int], stored: torch.Tensor, noted: torch.dtype = torch.bfloat16
    ) -> None:
        """Replace a weight's codes by its values. ``noted``: their dtype unless the caller wants another."""
        wanted = self._dtype or noted
        # Kernels write no other dtypes. Products are fp32, so the caller's cast to fp64 is exact.
        values = self._empty(shape, wanted if wanted in COMPUTE_DTYPES else torch.float32)
        packed_format(form).unpack(stored, shape, values.view(-1))
        self.tensors[name] = values
        self.packed[name] = form, stored

    def _read_four_bits(self, state_name: str) -> None:
        """Unpack a weight of bitsandbytes in NF4. ``state_name``: of the tensor with its quantization state."""
        weight, _, kind = state_name.partition(_STATE)
        tensors = self.tensors
        try:
            # bitsandbytes stores a 4-bit weight "w" as these tensors:
            #   w                                  codes, 2 a byte, the first in the high half
            #   w.quant_map                        the 16 levels
            #   w.absmax                           a scale per block: fp32, or uint8 codes with double quantization
            #   w.nested_absmax                    double quantization: a scale per nested_blocksize scales
            #   w.nested_quant_map                 double quantization: the 256 levels of the codes in absmax
            #   w.quant_state.bitsandbytes__nf4    JSON as bytes: shape, blocksize, dtype, nested_offset, ...
            state: dict[str, Any] = json.loads(bytes(tensors.pop(state_name).tolist()))
            # A view of bytes: with bnb_4bit_quant_storage, they have another dtype.
            codes, absmax = tensors[weight].reshape(-1).view(torch.uint8), tensors.pop(f"{weight}.absmax")
            levels = tensors.pop(f"{weight}.quant_map")
            shape, block = [int(size) for size in state["shape"]], int(state["blocksize"])
            if absmax.dtype == torch.uint8:
                nested, nested_levels = (
                    tensors.pop(f"{weight}.nested_absmax"),
                    tensors.pop(f"{weight}.nested_quant_map"),
                )
                nested_block = int(state["nested_blocksize"])
                block_of = torch.arange(absmax.numel(), dtype=torch.int64, device="cpu") // nested_block
                offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device="cpu")
                # Rounded twice, as in bitsandbytes: the product, and the sum.
                absmax = nested_levels[absmax.int()] * nested[block_of] + offset
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            problem = f"has '{weight}' in 4 bits without its quantization state: {error}"
            raise self._error(problem, cure=_AGAIN) from error
        if kind != "nf4" or not torch.equal(levels.float(), LEVELS):
            raise self._error(f"has '{weight}' as {kind} of bitsandbytes, not nf4")
        numel = math.prod(shape)
        is_sound = block >= NF4_BLOCK and min(shape, default=1) > 0
        if not is_sound or block % NF4_BLOCK or absmax.numel() != -(-numel // block) or codes.numel() != -(-numel // 2):
            raise self._error(f"has '{weight}' in blocks of {block} that do not make {shape}", cure=_AGAIN)
        # Blocks of the file may be larger (128, 256, ...): each of ours of 64 weights in it gets the same scale. Codes are
        # in the same order, so they are copied. The last record is filled up with zeros.
        num_blocks = -(-numel // NF4_BLOCK)
        stored = self._empty([num_blocks * NF4_RECORD_BYTES], torch.uint8)
        records = stored.view(-1, NF4_RECORD_BYTES)
        records[:, :4] = absmax.float().repeat_interleave(block // NF4_BLOCK)[:num_blocks].view(torch.uint8).view(-1, 4)
        whole = codes.numel() // (NF4_BLOCK // 2)
        records[:whole, 4:] = codes[: whole * (NF4_BLOCK // 2)].view(-1, NF4_BLOCK // 2)
        if whole < num_blocks:
            records[whole, 4:] = 0
            records[whole, 4 : 4 + codes.numel() - whole * (NF4_BLOCK // 2)] = codes[whole * (NF4_BLOCK // 2) :]
        noted = _NOTED.get(str(state.get("dtype")).removeprefix("torch."), torch.bfloat16)
        self._check_scales(weight, absmax)
        self._unpack(weight, "nf4", shape, stored, noted)

    def _read_eight_bits(self, name: str) -> None:
        """Unpack a weight of bitsandbytes in int8. ``name``: of its scales."""
        weight = f"{name.removesuffix('.SCB')}.weight"
        scales = self.tensors.pop(name)
        # Not 0: an old bitsandbytes has stored the codes in tiles for its kernels.
        order = self.tensors.pop(f"{name.removesuffix('.SCB')}.weight_format", None)
        codes = self.tensors.get(weight)
        is_by_rows = order is None or not order.any()
        if (
            codes is None
            or codes.dtype != torch.int8
            or codes.dim() != 2
            or not codes.numel()
            or scales.numel() != len(codes)
            or not is_by_rows
        ):
            problem = f"has '{name}' that does not match '{weight}'"
            raise self._error(problem, cure="Save it with a newer bitsandbytes, or fetch it again")
        stored = self._empty([packed_format("int8").num_bytes(codes.shape)], torch.uint8)
        # A record of int8 is a row: SCB is its largest magnitude, in fp32, and then codes and padding.
        records = stored.view(len(codes), -1)
        records.zero_()
        records[:, :4] = scales.float().contiguous().view(torch.uint8).view(-1, 4)
        records[:, 4 : 4 + codes.shape[1]] = codes.view(torch.uint8)
        self._check_scales(weight, scales)
        self._unpack(weight, "int8", codes.shape, stored)

    def _read_fp8(self, name: str) -> None:
        """Unpack a weight in FP8 with a scale per tile. ``name``: of its scales."""
        weight = name.removesuffix("_scale_inv")
        scales, codes = self.tensors.pop(name), self.tensors.get(weight)
        if codes is None or codes.dtype != torch.float8_e4m3fn or codes.dim() != 2:
            raise self._error(f"has '{name}' without a weight in e4m3")
        if tuple(scales.shape) != tuple(-(-size // FP8_TILE) for size in codes.shape):
            raise self._error(
                f"has scales of {tuple(scales.shape)} for '{weight}' of {tuple(codes.shape)}, not of tiles of 128 x 128"
            )
        self._check_scales(weight, scales)
        form = Fp8()
        stored = self._empty([form.num_bytes(codes.shape)], torch.uint8)
        place = 0
        for row, start in enumerate(range(0, len(codes), FP8_TILE)):
            band = codes[start : start + FP8_TILE]
            # 0x7F and 0xFF are the NaNs of e4m3fn, which has no infinities.
            if bool(((band.view(torch.uint8) & 0x7F) == 0x7F).any()):
                raise self._error(f"has NaN in '{weight}'", cure="Fetch it again")
            size = form.record_bytes(band.numel(), codes.shape)
            form.write_record(stored[place : place + size], scales[row].float(), band)
            place += size
        self._unpack(weight, "fp8_e4m3", codes.shape, stored)
