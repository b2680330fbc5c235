"""Norms of bf16 tensors: the bits of torch's norm of the fp32 copy, whichever way they are taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infinity.numerics import norms as module
from infinity.numerics.norms import narrow_norm

_BLOCK = module._BLOCK_NUMEL


@pytest.fixture(params=["compiled", "blocks", "copy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each way to take a norm: numba's loop, numpy's sums block by block, torch on a copy."""
    import infinity.numerics.kernels  # noqa: F401  # else `_choose` leaves it alone

    if request.param == "blocks":
        monkeypatch.setattr(module, "_choose", lambda _: module._add_squares)
    elif request.param == "copy":
        monkeypatch.setattr(module, "_torchs_num_sums", lambda: 0)
    else:
        assert module._choose(module._torchs_num_sums()) is not module._add_squares
    return request.param


def _draw(shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


def _require_torchs(values: torch.Tensor) -> None:
    expected = torch.linalg.vector_norm(values.float(), 2.0)
    found = narrow_norm(values)
    assert found.shape == () and found.dtype == torch.float32
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 1001, _BLOCK - 1, _BLOCK + 8, 3 * _BLOCK + 5])
def test_any_number_of_elements(numel: int, way: str) -> None:
    _require_torchs(_draw((numel,)))


@pytest.mark.parametrize("scale", [1e-22, 1e-20, 1e-19, 1e10, 1e19, 1e30])
def test_squares_that_vanish_and_squares_that_are_infinite(scale: float, way: str) -> None:
    _require_torchs(_draw((4099,), scale))


def test_any_order_of_dimensions(way: str) -> None:
    _require_torchs(_draw((300, 70)).t())
    _require_torchs(_draw((4, 6, 5, 7)).permute(2, 0, 3, 1))
    _require_torchs(_draw((50, 70))[10:20])


def test_torch_takes_the_norm_where_it_adds_in_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda *_, **__: torch.tensor(1.5))
    assert module._torchs_num_sums.__wrapped__() == 0


def test_this_processors_order_is_known() -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip(f"nothing is promised for {torch.backends.cpu.get_cpu_capability()}")
    assert module._torchs_num_sums() > 0
