"""`infinity.Init` around modules that nobody planned for: the bits and random numbers of building in memory."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.exactness.lockstep import everything_on_nvme
from tests.internals import LEAST_BYTES, on_drive


class _ReadsOthers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.b.weight.copy_(self.a.weight.t() * 2)
        u, _, v = torch.linalg.svd(self.a.weight)
        self.a.weight.copy_(u @ v)
        self.b.weight.data = self.b.weight.data / self.b.weight.norm()
        self.a.weight.numpy()[0] = 1


def _lazy() -> nn.Module:
    made = nn.Sequential(nn.LazyLinear(128), nn.LazyLinear(64))
    made(torch.randn(2, 256))
    return made


def _in_a_thread() -> nn.Module:
    made = nn.ModuleList()
    thread = threading.Thread(target=lambda: made.append(nn.Linear(128, 128)))
    thread.start()
    thread.join()
    return made.append(nn.Linear(128, 128))


def _old_norms() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.ModuleList([nn.utils.weight_norm(nn.Linear(128, 128)), nn.utils.spectral_norm(nn.Linear(128, 128))])


_MADE: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: nn.Transformer(64, 4, 1, 1, 128, batch_first=True),
    "lstm": lambda: nn.LSTM(128, 128, 2, bidirectional=True, proj_size=64),
    "attention": lambda: nn.MultiheadAttention(128, 4, kdim=64, vdim=96, add_bias_kv=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(128, 128)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(128, 128)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(128, 128)),
    "old_norms": _old_norms,
    "lazy": _lazy,
    "reads_others": _ReadsOthers,
    "in_a_thread": _in_a_thread,
    "dtypes": lambda: nn.ModuleList([nn.Linear(128, 128).double(), nn.Linear(128, 128).half()]),
    "channels_last": lambda: nn.Conv2d(32, 64, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}


def _bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.deep(but=10)
@pytest.mark.parametrize("name", _MADE)
def test_bits_strides_and_random_numbers_are_those_of_memory(name: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    plain = _MADE[name]()
    state = torch.get_rng_state()
    torch.manual_seed(7)
    with infinity.Init(config=everything_on_nvme(tmp_path)):
        made = _MADE[name]()
    assert torch.equal(state, torch.get_rng_state())
    expected, found = plain.state_dict(), made.state_dict()
    assert list(expected) == list(found)
    for key, value in expected.items():
        assert (value.dtype, value.stride()) == (found[key].dtype, found[key].stride()), key
        assert torch.equal(_bits(value), _bits(found[key])), key
    large = [each for each in made.parameters() if each.nbytes >= LEAST_BYTES]
    assert sum(on_drive(each) for each in large) >= len(large) - (name == "in_a_thread")  # a block is its thread's
