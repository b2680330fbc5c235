"""The random generators of the process: python's, NumPy's, torch's, and those of the GPUs in use."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_NUMPY_WORDS = 624  # 32-bit words in the state of NumPy's Mersenne Twister (MT19937).


def random_states() -> dict[str, Any]:
    """Return copies of the states of the generators of Python, NumPy and torch, and of the GPUs that are in use."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    # Only if CUDA is initialized: asking would initialize it, and allocate a context, in a process that uses the CPU.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
        states["cuda_index"] = torch.cuda.current_device()
    return states


def are_unchanged(states: Mapping[str, Any]) -> bool:
    """Whether nothing has been drawn since `random_states` returned these."""
    now = random_states()
    of_torch = [(now["torch"], states["torch"]), *zip(now.get("cuda", ()), states.get("cuda", ()), strict=False)]
    # NumPy's state is (name, key array, position, has_gauss, cached_gaussian): the array needs a comparison of its own.
    is_same = bool(now["python"] == states["python"] and now["numpy"][2:] == states["numpy"][2:])
    return (
        is_same
        and np.array_equal(now["numpy"][1], states["numpy"][1])
        and all(torch.equal(before, after) for before, after in of_torch)
    )


def check_random_states(states: Mapping[str, Any]) -> None:
    """Check random states: generators accept some damaged ones, and then read beyond their own memory.

    Raises:
        ValueError, TypeError, LookupError: they are damaged.
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
    """Continue from these states: of the GPUs, as many as there are. The current GPU continues from the one current
    then."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        for index, state in enumerate(states.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
        # The process may use another GPU than then: its current one gets the state of the one that was current.
        if states.get("cuda_index", len(states.get("cuda", ()))) < len(states.get("cuda", ())):
            torch.cuda.set_rng_state(states["cuda"][states["cuda_index"]], torch.cuda.current_device())
