"""The random generators of the process: python's, NumPy's, torch's, and those of the GPUs in use."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_NUMPY_WORDS = 624
"""Of the state of its Mersenne Twister."""


def random_states() -> dict[str, Any]:
    """Copies of their states."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
        states["cuda_index"] = torch.cuda.current_device()
    return states


def check_random_states(states: Mapping[str, Any]) -> None:
    """See that they are such: generators take some others, and then read memory that is not theirs.

    Raises:
        ValueError, TypeError, LookupError: they are not.
    """
    random.Random().setstate(states["python"])
    _kind, words, position, *_ = states["numpy"]
    if words.shape != (_NUMPY_WORDS,) or type(position) is not int or not 0 <= position <= _NUMPY_WORDS:
        raise ValueError("the state of NumPy's generator is none")
    np.random.RandomState().set_state(states["numpy"])
    torch.Generator(device="cpu").set_state(states["torch"])
    if not all(isinstance(each, torch.Tensor) for each in states.get("cuda", ())):
        raise TypeError("the state of a GPU's generator is no tensor")


def set_random_states(states: Mapping[str, Any]) -> None:
    """Let them go on from these; of the GPUs, as many as there are, and the present one as the one of then."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        for index, state in enumerate(states.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
        if states.get("cuda_index", len(states.get("cuda", ()))) < len(states.get("cuda", ())):
            torch.cuda.set_rng_state(states["cuda"][states["cuda_index"]], torch.cuda.current_device())


def set_random_states_of(rank: int, saved: Sequence[Mapping[str, Any]]) -> None:
    """Let the generators of ``rank`` go on, where ``saved`` has the states of all ranks that there were.

    A rank that was not there then goes on as all did, if they had the same states. Else it begins with a seed of its own, which
    follows from the states of one of them and its number: no two ranks draw the same numbers that did not before.
    """
    if rank < len(saved):
        set_random_states(saved[rank])
        return
    stamps = [_stamp(states) for states in saved]
    if len(saved) > 1 and len(set(stamps)) == 1:
        set_random_states(saved[0])
        return
    text = f"{stamps[rank % len(saved)]} {rank}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)  # of GPUs, too


def _stamp(states: Mapping[str, Any]) -> str:
    """Equal where states are."""
    _, keys, *rest = states["numpy"]
    text = repr((states["python"], keys.tolist(), rest)).encode()
    tensors = [states["torch"], *states.get("cuda", ())]
    return hashlib.sha256(text + b"".join(bytes(each.cpu().numpy()) for each in tensors)).hexdigest()
