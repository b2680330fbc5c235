"""States come back from storage as they went in, but for a rounding whose mean is right and which anybody can repeat."""

from __future__ import annotations

import pytest
import torch

from infinity.numerics import dynamic_map, state_codec
from infinity.numerics.state_codec import Noise, StateWindow, decode, encode
from infinity.numerics.state_format import StateFormat
from tests.exactness.rounding import rounded

_STATES = ("exp_avg", "exp_avg_sq")
_STOCHASTIC = (StateFormat.BF16, StateFormat.INT8)
_SMALL = (*_STOCHASTIC, StateFormat.INT8_DYNAMIC)
_NUMELS = (1, 255, 256, 257, 5000)
_EACH = [pytest.param(form, state, id=f"{form.value}-{state}") for form in _SMALL for state in _STATES]


def _values(state: str, numel: int) -> torch.Tensor:
    """Of many magnitudes, with some zeros and, from the second block on, much smaller ones."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    values[::7] = 0
    values[300:] *= 1e-9
    return values**2 if state == "exp_avg_sq" else values


def _stored(form: StateFormat, numel: int) -> torch.Tensor:
    """Memory for a state, with something in it."""
    return torch.full((form.num_bytes(numel),), 77, dtype=torch.uint8).view(form.dtype)


def _round_trip(form: StateFormat, state: str, values: torch.Tensor, noise: Noise | None) -> torch.Tensor:
    stored = _stored(form, values.numel())
    encode(form, state, values, stored, noise)
    decoded = torch.full_like(values, 5)
    decode(form, state, stored, decoded)
    return decoded


def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_codec, "has_kernels", lambda tensor: False)


@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize(("form", "state"), _EACH)
def test_the_rounding_is_the_one_that_is_described(
    form: StateFormat, state: str, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        _without_kernels(monkeypatch)
    for numel in _NUMELS:
        values = _values(state, numel)
        for count in (1, 2, 1000):
            found = _round_trip(form, state, values, Noise.of("a.weight", state, count, 0))
            assert torch.equal(found, rounded(values, form.value, "a.weight", state, count))


@pytest.mark.parametrize("is_stochastic", [True, False])
@pytest.mark.parametrize(("form", "state"), _EACH)
def test_kernels_store_the_bytes_of_torch(
    form: StateFormat, state: str, is_stochastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = [torch.inf, torch.nan, -0.0, 1e-45, 3e38, 1.0]
    values = torch.cat([_values(state, 1000), torch.tensor(special), _values(state, 300)])
    noise = Noise.of("a", state, 1, (1 << 32) - 500) if is_stochastic else None
    stored = [_stored(form, values.numel()) for _ in range(2)]
    encode(form, state, values, stored[0], noise)
    _without_kernels(monkeypatch)
    encode(form, state, values, stored[1], noise)
    assert torch.equal(*(bytes_.view(torch.uint8) for bytes_ in stored))


@pytest.mark.parametrize(("form", "state"), _EACH)
def test_what_was_read_is_stored_as_it_was(form: StateFormat, state: str) -> None:
    for numel in _NUMELS:
        first = _round_trip(form, state, _values(state, numel), Noise.of("a", state, 3, 0))
        assert torch.equal(_round_trip(form, state, first, None), first)


@pytest.mark.parametrize("form", _STOCHASTIC, ids=lambda form: form.value)
def test_second_moments_follow_gradients_that_fall(form: StateFormat) -> None:
    """Half of the elements get smaller gradients; what is rounded to nearest does not notice."""
    squares = torch.ones(512)
    squares[1::2] = 0.2
    falling: dict[bool, torch.Tensor] = {}
    for is_stochastic in (True, False):
        moment = torch.ones(512)
        for count in range(1500):
            moment = 0.999 * moment + 0.001 * squares
            noise = Noise.of("a", "exp_avg_sq", count, 0) if is_stochastic else None
            moment = _round_trip(form, "exp_avg_sq", moment, noise)
        falling[is_stochastic] = moment[1::2]
    expected = 0.2 + 0.8 * 0.999**1500
    assert falling[True].mean().item() == pytest.approx(expected, rel=0.03)
    assert falling[False].mean().item() > 2 * expected


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernel", "torch"])
def test_what_is_not_finite_is_seen(bad: float, has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernels:
        _without_kernels(monkeypatch)
    values = torch.ones(1000)
    values[300] = bad
    for form in (StateFormat.INT8, StateFormat.INT8_DYNAMIC):
        found = _round_trip(form, "exp_avg", values, Noise.of("a", "exp_avg", 1, 0))
        assert bool(found[256:512].isnan().all())
        assert torch.equal(found[:256], values[:256]) and torch.equal(found[512:], values[512:])
    halves = _round_trip(StateFormat.BF16, "exp_avg", values, Noise.of("a", "exp_avg", 1, 0))
    torch.testing.assert_close(halves, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", StateFormat, ids=lambda form: form.value)
def test_a_window_stores_what_was_changed_in_it(form: StateFormat) -> None:
    """A piece of three parts on the CPU, which begins in the middle of the parameter."""
    numel, first = 600_000, 512 * 300
    stored = {state: _stored(form, numel) for state in _STATES}
    wholes = {}
    for state in _STATES:
        encode(form, state, _values(state, numel), stored[state], None)
        wholes[state] = torch.empty(numel)
        decode(form, state, stored[state], wholes[state])

    def noise(state: str, start: int) -> Noise:
        return Noise.of("a", state, 4, first + start)

    covered = 0
    for part, views in StateWindow(form).parts(stored, numel, noise):
        assert part.start == covered and part.start % 64 == 0
        covered = part.stop
        for state in _STATES:
            assert torch.equal(views[state], wholes[state][part])
            views[state].mul_(0.999)
    assert covered == numel
    for state in _STATES:
        expected = _stored(form, numel)
        encode(form, state, wholes[state].mul_(0.999), expected, noise(state, 0))
        assert torch.equal(stored[state], expected)


@pytest.mark.parametrize("is_unsigned", [False, True])
def test_the_dynamic_map_is_that_of_bitsandbytes(is_unsigned: bool) -> None:
    """Against numbers of its own map; and each start is at most one level away from what it stands for."""
    found = dynamic_map.code_values(is_unsigned)
    assert found.numel() == 256 and bool((found[1:] > found[:-1]).all())
    known = {0: 0.0, 1: 3.25e-7, 2: 7.75e-7, 255: 1.0, 254: 0.996484375} if is_unsigned else _SIGNED
    for code, value in known.items():
        assert found[code].item() == pytest.approx(value, rel=1e-6)
    starts, middles = dynamic_map.starts(is_unsigned).int(), dynamic_map.middles(is_unsigned)
    last = (torch.arange(len(starts) - 1, dtype=torch.int32) << 16 | 0xFFFF).view(torch.float32)
    assert int((torch.bucketize(last, middles) - starts[:-1]).max()) == 1


_SIGNED = {0: -0.99296875, 126: -5.5e-7, 127: 0.0, 128: 5.5e-7, 129: 3.25e-6, 254: 0.99296875, 255: 1.0}
