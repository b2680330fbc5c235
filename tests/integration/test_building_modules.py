"""`infinity.Init` around modules that nobody planned for: the bits and random numbers of building in memory."""

from __future__ import annotations

import copy
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


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out")
        nn.init.zeros_(self.norm.weight)


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


def _lists() -> nn.Module:
    lists = nn.ModuleList([nn.ParameterList([torch.randn(128, 128) for _ in range(2)])])
    lists.append(nn.ParameterDict({"a": nn.Parameter(torch.randn(128, 64))}))
    return lists


def _copies() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 256)
    return nn.ModuleList([copy.deepcopy(layer) for _ in range(3)])


def _in_a_thread() -> nn.Module:
    made = nn.ModuleList()
    thread = threading.Thread(target=lambda: made.append(nn.Linear(128, 128)))
    thread.start()
    thread.join()
    return made.append(nn.Linear(128, 128))


def _other_dtype() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cpu"):
            return nn.Sequential(nn.Linear(128, 256), nn.Embedding(100, 256))
    finally:
        torch.set_default_dtype(torch.float32)


def _old_norms() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.ModuleList([nn.utils.weight_norm(nn.Linear(128, 128)), nn.utils.spectral_norm(nn.Linear(128, 128))])


_MADE: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 64, 7), _Residual(64), nn.Linear(64, 100)),
    "transformer": lambda: nn.Transformer(64, 4, 1, 1, 128, batch_first=True),
    "lstm": lambda: nn.LSTM(128, 128, 2, bidirectional=True, proj_size=64),
    "attention": lambda: nn.MultiheadAttention(128, 4, kdim=64, vdim=96, add_bias_kv=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(128, 128)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(128, 128)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(128, 128)),
    "old_norms": _old_norms,
    "lazy": _lazy,
    "lists": _lists,
    "reads_others": _ReadsOthers,
    "copies": _copies,
    "in_a_thread": _in_a_thread,
    "other_dtype": _other_dtype,
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
