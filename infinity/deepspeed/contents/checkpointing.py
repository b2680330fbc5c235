"""DeepSpeed's module ``checkpointing``: activation checkpointing, by ``torch.utils.checkpoint``.

Activations are not divided among processes: arguments for that have no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from infinity.deepspeed.contents.accelerator import get_accelerator
from infinity.deepspeed.contents.config import DeepSpeedConfig
from infinity.distributed.meshes import current_mesh

_TRACKED = "model-parallel-rng"
_configured = SimpleNamespace(keeps_on_cpu=False, is_made=False)
"""Set by `configure`."""


class CudaRNGStatesTracker:
    """Named random states of the current device (on a CPU, of its generator), as in Megatron."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A new dict: name -> state."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Set what `get_states` returned."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a state that begins with ``seed``.

        Raises:
            ValueError: the name or the seed is taken.
        """
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} already exists")
        if name in self.states_:
            raise ValueError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        with self._drawing(name):
            get_accelerator().manual_seed(seed)

    @contextmanager
    def fork(self, name: str = _TRACKED) -> Iterator[None]:
        """Draw random numbers from the named state in the ``with`` block. The state advances.

        Raises:
            KeyError: there is none of that name.
        """
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        with self._drawing(name):
            yield

    @contextmanager
    def _drawing(self, name: str) -> Iterator[None]:
        """Draw from the named state, if it exists. Store the state at the end of the block under that name."""
        accelerator = get_accelerator()
        before = accelerator.get_rng_state()
        if name in self.states_:
            accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process. `checkpoint` replays its states in backward."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the current device, and the tracked state for model parallel regions with ``seed + 2718`` + the tensor rank.

    The tensor rank is that of the last `infinity.initialize`. All processes call this.
    """
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(_TRACKED, _part_seed(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracked state anew, as `model_parallel_cuda_manual_seed` does."""
    with _tracker.fork():
        get_accelerator().manual_seed(_part_seed(seed))


def _part_seed(seed: int) -> int:
    # 2718: Megatron's constant. Ranks of a tensor-parallel group get different dropout in divided layers.
    return seed + 2718 + current_mesh().place.tensor


def _replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that each further call draws from the tracked states as they were before the first call."""
    states, has_run = _tracker.get_states(), False

    def run(*args: Any) -> Any:
        nonlocal has_run
        # The first call is forward, whose states must advance. A later one is the recomputation in backward. torch
        # restores only its own generators.
        if not has_run:
            has_run = True
            return function(*args)
        before = _tracker.get_states()
        _tracker.set_states(dict(states))
        try:
            return function(*args)
        finally:
            _tracker.set_states(before)

    return run


def _checkpoint(function: Callable[..., Any], args: tuple[Any, ...], *, use_reentrant: bool) -> Any:
    on_cpu = _configured.keeps_on_cpu and get_accelerator().device_name() != "cpu"
    with torch.autograd.graph.save_on_cpu(pin_memory=True) if on_cpu else nullcontext():
        return torch_checkpoint.checkpoint(_replayed(function), *args, use_reentrant=use_reentrant)


def _by_position(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same call with positional arguments only: others get no gradient from torch's reentrant checkpointing."""
    if not kwargs:
        return function, args
    names, num_positional = list(kwargs), len(args)

    @functools.wraps(function)
    def call(*values: Any) -> Any:
        return function(*values[:num_positional], **dict(zip(names, values[num_positional:], strict=True)))

    return call, (*args, *kwargs.values())


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` by reentrant ``torch.utils.checkpoint``: only arguments are kept, and backward calls it again.

    Random states, those of `get_cuda_rng_tracker` included, and autocast are the same both times.
    """
    return _checkpoint(*_by_position(function, args, kwargs), use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `checkpoint`, but non-reentrant: it also works if no input requires a gradient."""
    return _checkpoint(*_by_position(function, args, kwargs), use_reentrant=False)


class CheckpointFunction:
    """DeepSpeed's autograd function, for scripts that call its ``apply``: that is `checkpoint`."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """As `checkpoint`. Appends the outputs to ``all_outputs``."""
        outputs = checkpoint(run_function, *args)
        all_outputs += [outputs] if isinstance(outputs, torch.Tensor) else outputs
        return outputs


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure `checkpoint`. Arguments that are None come from ``deepspeed_config``, or are off.

    Args:
        deepspeed_config: as for `infinity.load_config`. Its block ``activation_checkpointing`` is used.
        checkpoint_in_cpu: keep inputs in pinned host memory until backward. No effect on a CPU.
        mpu_, partition_activations, contiguous_checkpointing, num_checkpoints, synchronize, profile: no effect.

    Raises:
        ConfigError: the config cannot be read.
    """
    if checkpoint_in_cpu is None and deepspeed_config is not None:
        checkpoint_in_cpu = DeepSpeedConfig(deepspeed_config).activation_checkpointing_config.cpu_checkpointing
    _configured.keeps_on_cpu, _configured.is_made = bool(checkpoint_in_cpu), True


def is_configured() -> bool:
    """Whether `configure` was called."""
    return bool(_configured.is_made)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """No effect: activations are not divided among processes."""


def set_num_layers(nlayers: int) -> None:
    """No effect: there are no contiguous buffers."""


def reset() -> None:
    """No effect: there are no contiguous buffers."""
