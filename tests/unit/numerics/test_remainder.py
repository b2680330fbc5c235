"""The codec of main weights: every bit pattern there is, or as many as fit into a second."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infinity.numerics.remainder import join, join_bits, split, split_bits

_REPOSITORY = Path(__file__).resolve().parents[3]
_CANONICAL_NAN = 0x7FC00000
_EDGES = (0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)


def _all_highs_with_edges() -> Tensor:
    highs = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = (highs[:, None] + torch.tensor(_EDGES)).flatten()
    return bits.to(torch.int32)


def _random_bits(numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator).to(torch.int32)


def _with_one_nan(bits: Tensor) -> Tensor:
    return torch.where(bits.view(torch.float32).isnan(), _CANONICAL_NAN, bits)


def _halves(main: Tensor) -> tuple[Tensor, Tensor]:
    weight, remainder = torch.empty(main.shape, dtype=torch.bfloat16), torch.empty(main.shape, dtype=torch.int16)
    split(main, weight, remainder)
    return weight, remainder


@pytest.mark.parametrize("bits", [_all_highs_with_edges(), _random_bits(10_000_000)], ids=["all-highs", "random"])
def test_every_number_comes_back(bits: Tensor) -> None:
    main = bits.view(torch.float32)
    weight, remainder = _halves(main)
    back = torch.empty_like(main)
    join(weight, remainder, back)
    assert torch.equal(back.view(torch.int32), _with_one_nan(bits))


@pytest.mark.parametrize("bits", [_all_highs_with_edges(), _random_bits(1_000_000)], ids=["all-highs", "random"])
def test_torch_operations_and_kernels_agree(bits: Tensor) -> None:
    main = bits.view(torch.float32)
    weight, remainder = _halves(main)
    high, low = split_bits(main)
    assert torch.equal(high, weight.view(torch.int16))
    assert torch.equal(low, remainder)
    joined = torch.empty_like(main)
    join(weight, remainder, joined)
    assert torch.equal(join_bits(high, low), joined.view(torch.int32))


def test_the_model_weight_is_the_nearest_and_halves_go_away_from_zero() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(100_000, generator=generator) * 10.0 ** torch.randint(-30, 30, (100_000,), generator=generator)
    # Exactly between two neighbours, in both directions.
    halves = ((torch.randint(1, 0x7F7F, (1000,), generator=generator) << 16) + 0x8000).to(torch.int32)
    values = torch.cat([values, halves.view(torch.float32), -halves.view(torch.float32)])
    weight, _ = _halves(values)
    nearest = values.to(torch.bfloat16)
    ours, theirs, exact = weight.double(), nearest.double(), values.double()
    differs = ours != theirs
    assert torch.equal((ours - exact)[differs], (exact - theirs)[differs]), "only what lies in the middle may differ"
    assert bool((ours.abs() > exact.abs())[differs].all())
    assert bool((ours.abs() > exact.abs())[-2000:].all())


@pytest.mark.deep
def test_a_package_that_cannot_be_written_to(tmp_path: Path) -> None:
    """Home and package are read-only, as in many containers: it starts all the same, and leaves nothing behind."""
    for name in ("infinity", "swapper"):
        (tmp_path / name).symlink_to(_REPOSITORY / name)
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(stat.S_IRUSR | stat.S_IXUSR)
    code = (
        "import numba.core.caching as caching, torch\n"
        "def refuse(self): raise OSError('read-only')\n"  # root may write everywhere
        "caching._CacheLocator.ensure_cache_path = refuse\n"
        "from infinity.numerics.remainder import join, split\n"
        "main, back = torch.randn(1000), torch.empty(1000)\n"
        "weight, rest = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000, dtype=torch.int16)\n"
        "split(main, weight, rest)\n"
        "join(weight, rest, back)\n"
        "raise SystemExit(0 if torch.equal(main, back) else 1)\n"
    )
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=560, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert not list(home.iterdir())
