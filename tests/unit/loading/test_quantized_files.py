"""Quantized weights of files: their values, their packed bytes, and errors that name what is not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infinity.errors import CheckpointError
from infinity.loading.quantized_files import QuantizedFiles, check_method
from infinity.loading.weight_files import open_weights
from infinity.packed.blocks import LEVELS
from infinity.packed.formats import packed_format
from tests.quantized import fp8_e4m3

_PATH = Path("files")


def _four_bits(
    shape: tuple[int, int], *, is_nested: bool, block: int = 64
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As bitsandbytes writes a weight; and what it is in fp32."""
    draw = torch.Generator().manual_seed(0)
    numel = shape[0] * shape[1]
    codes = torch.randint(16, (numel,), generator=draw)
    absmax = torch.rand(-(-numel // block), generator=draw)
    packed = (codes.view(-1, 2)[:, 0] * 16 + codes.view(-1, 2)[:, 1]).to(torch.uint8)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(shape)}
    found = {"w": packed[:, None], "w.quant_map": LEVELS.clone(), "w.absmax": absmax}
    if is_nested:
        table, outer = torch.rand(256, generator=draw), torch.rand(-(-absmax.numel() // 256), generator=draw)
        indices = torch.randint(256, (absmax.numel(),), generator=draw, dtype=torch.uint8)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
        found |= {"w.absmax": indices, "w.nested_absmax": outer, "w.nested_quant_map": table}
        absmax = table[indices.long()] * outer.repeat_interleave(256)[: absmax.numel()] + 0.0625
    found["w.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return found, (LEVELS[codes] * absmax.repeat_interleave(block)[:numel]).view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("is_nested", "block"), [(False, 64), (True, 64), (False, 128)])
def test_four_bits_of_bitsandbytes(is_nested: bool, block: int, dtype: torch.dtype) -> None:
    tensors, expected = _four_bits((48, 70), is_nested=is_nested, block=block)
    found = QuantizedFiles(_PATH, {**tensors, "other": torch.ones(3)}, dtype, ())
    assert found.tensors.keys() == {"w", "other"}
    assert torch.equal(found.tensors["w"], expected.to(dtype))
    name, stored = found.packed["w"]
    again = torch.empty(expected.numel())
    packed_format(name).unpack(stored, expected.shape, again)
    assert (name, torch.equal(again.view(expected.shape), expected)) == ("nf4", True)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_four_bits_in_another_storage_dtype(storage: torch.dtype) -> None:
    """As with ``bnb_4bit_quant_storage``, which FSDP needs."""
    tensors, expected = _four_bits((48, 64), is_nested=False)
    tensors["w"] = tensors["w"].view(-1).view(storage)[:, None]
    assert torch.equal(QuantizedFiles(_PATH, tensors, torch.float32, ()).tensors["w"], expected)


def test_dtypes_that_no_kernel_writes_come_from_exact_products() -> None:
    tensors, expected = _four_bits((48, 64), is_nested=False)
    assert torch.equal(QuantizedFiles(_PATH, tensors, torch.float64, ()).tensors["w"].double(), expected.double())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("blocksize", 0),
        ("blocksize", -64),
        ("shape", [-48, -64]),
        ("shape", [float("inf"), 1]),
        ("nested_blocksize", 0),
        ("nested_blocksize", 1),
        ("nested_offset", [0.5, 0.5]),
    ],
)
def test_a_hostile_state_of_four_bits_is_an_error(key: str, value: object) -> None:
    tensors, _ = _four_bits((48, 64), is_nested=True)
    state = json.loads(bytes(tensors["w.quant_state.bitsandbytes__nf4"].tolist()))
    written = json.dumps({**state, key: value}).encode()
    tensors["w.quant_state.bitsandbytes__nf4"] = torch.tensor(list(written), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"'w' in (4 bits|blocks)"):
        QuantizedFiles(_PATH, tensors, None, ())


@pytest.mark.parametrize(
    ("scales", "columns"),
    [(torch.ones(5, dtype=torch.int32), 70), (torch.full((5,), float("nan")), 70), (torch.ones(5), 0)],
)
def test_eight_bits_that_make_no_weight_are_an_error(scales: torch.Tensor, columns: int) -> None:
    codes = torch.ones(5, columns, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"m\.SCB|scales of 'm\.weight'"):
        QuantizedFiles(_PATH, {"m.weight": codes, "m.SCB": scales}, None, ())


def test_eight_bits_of_bitsandbytes() -> None:
    codes, scales = torch.randint(-127, 128, (5, 70), dtype=torch.int8), torch.rand(5)
    found = QuantizedFiles(_PATH, {"m.weight": codes, "m.SCB": scales}, torch.float32, ())
    assert torch.equal(found.tensors["m.weight"], codes.float() * scales[:, None] * 7.874015718698502e-3)
    assert found.tensors.keys() == {"m.weight"}


def test_fp8_with_tiles() -> None:
    weight = torch.randn(200, 300)
    scales = torch.rand(2, 3) + 0.5
    of_each = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    codes = (weight / of_each).to(torch.float8_e4m3fn)
    found = QuantizedFiles(_PATH, {"m.weight": codes, "m.weight_scale_inv": scales}, torch.float32, ())
    assert torch.equal(found.tensors["m.weight"], codes.float() * of_each)
    assert not torch.equal(found.tensors["m.weight"], fp8_e4m3(weight)), "the file's own scales"


def test_fp8_with_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    scales = torch.tensor([[0.5, 4.0]]).to(torch.float8_e8m0fnu)
    codes = torch.randn(64, 256).to(torch.float8_e4m3fn)
    save_file({"m.weight": codes, "m.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    found = QuantizedFiles(tmp_path, open_weights(tmp_path), torch.float32, ())
    assert torch.equal(found.tensors["m.weight"], codes.float() * scales.float().repeat_interleave(128, 1))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"m.qweight": torch.zeros(2, 2), "m.scales": torch.zeros(1)}, "GPTQ or AWQ"),
        ({"m.experts_blocks": torch.zeros(2), "m.experts_scales": torch.zeros(2)}, "MXFP4"),
        ({"m.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn), "m.weight_scale_inv": torch.ones(2, 1)}, "128 x 128"),
        ({"m.SCB": torch.ones(3), "m.weight": torch.ones(2, 2, dtype=torch.int8)}, "does not match"),
    ],
)
def test_what_is_not_read_is_named(tensors: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        QuantizedFiles(_PATH, tensors, None, ())


@pytest.mark.parametrize("missing", ["w.absmax", "w.quant_map", "w.nested_absmax"])
def test_four_bits_without_a_part(missing: str) -> None:
    tensors, _ = _four_bits((8, 64), is_nested=True)
    del tensors[missing]
    with pytest.raises(CheckpointError, match="without its quantization state"):
        QuantizedFiles(_PATH, tensors, None, ())


def test_other_levels_are_named() -> None:
    tensors, _ = _four_bits((8, 64), is_nested=False)
    tensors["w.quant_map"] = torch.linspace(-1, 1, 16)
    with pytest.raises(CheckpointError, match="not nf4"):
        QuantizedFiles(_PATH, tensors, None, ())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "gptq"}, "GPTQ"),
        ({"quant_method": "awq"}, "AWQ"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "tiles of"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "tiles of"),
        ("fp8", "UNKNOWN"),
    ],
)
def test_methods_that_are_not_read(settings: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_method(_PATH, settings)
    check_method(_PATH, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    check_method(_PATH, {"quant_method": "bitsandbytes", "load_in_4bit": True})
