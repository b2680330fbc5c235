"""DeepSpeed's module ``checkpointing``: activation checkpointing as scripts call it, by torch's own.

Activations are not divided among processes: what scripts say of that is taken without effect.
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
"""What `configure` was told last."""


class CudaRNGStatesTracker:
    """Random states of the current device by name, to draw from them in between. On a CPU, of its generator."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """All of them, by name: a new dict of the same states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """What `get_states` gave."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """A state that begins with ``seed``.

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
        """Inside the ``with`` block random numbers come from the named state, which goes on where it ended.

        Raises:
            KeyError: there is none of that name.
        """
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        with self._drawing(name):
            yield

    @contextmanager
    def _drawing(self, name: str) -> Iterator[None]:
        """Draw from the named state, if there is one, and keep under that name what is reached at the end of the block."""
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
    """The one of this process. Its states are replayed in backward by `checkpoint`."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the current device, and the tracked state for model parallel regions with ``seed + 2718`` + the tensor rank.

    That is of `configure`'s ``mpu_``, or of the last `infinity.initialize`. All processes call it.
    """
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(_TRACKED, _part_seed(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracked state anew, as `model_parallel_cuda_manual_seed` does."""
    with _tracker.fork():
        get_accelerator().manual_seed(_part_seed(seed))


def _part_seed(seed: int) -> int:
    return seed + 2718 + current_mesh().place.tensor


def _replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which draws from the same tracked states whenever it is called, as the first time."""
    states, has_run = _tracker.get_states(), False

    def run(*args: Any) -> Any:
        nonlocal has_run
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
    """The same call without keywords: torch's reentrant checkpointing carries gradients to positional arguments only."""
    if not kwargs:
        return function, args
    names, num_positional = list(kwargs), len(args)

    @functools.wraps(function)
    def call(*values: Any) -> Any:
        return function(*values[:num_positional], **dict(zip(names, values[num_positional:], strict=True)))

    return call, (*args, *kwargs.values())


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, keep its arguments only, and call it once more in backward (``torch.utils.checkpoint``, reentrant).

    Args:
        function: from tensors and others to a tensor, or a tuple of tensors and others.
        args, kwargs: its arguments; tensors among them, by keyword as well, get their gradients.

    Random states, those of `get_cuda_rng_tracker` included, and autocast are the same both times.
    """
    return _checkpoint(*_by_position(function, args, kwargs), use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `checkpoint`, by torch's non-reentrant way, which works where no input needs a gradient as well."""
    return _checkpoint(*_by_position(function, args, kwargs), use_reentrant=False)


class CheckpointFunction:
    """For scripts that call DeepSpeed's autograd function itself: its ``apply`` is `checkpoint`."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """As `checkpoint`; everything that ``run_function`` returns is put into ``all_outputs``, too."""
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
    """Say how `checkpoint` works from now on. What is not given is taken from ``deepspeed_config``, or off.

    Args:
        mpu_: taken as DeepSpeed takes it, without effect: `model_parallel_cuda_manual_seed` goes by ``mesh_param``.
        deepspeed_config: a config as `infinity.load_config` takes it; its block ``activation_checkpointing`` counts.
        partition_activations, contiguous_checkpointing, num_checkpoints: without effect: they divide activations between
            processes.
        checkpoint_in_cpu: inputs wait in pinned host memory for backward. On a CPU they are there anyway.
        synchronize, profile: without effect: torch.profiler tells how long functions take.

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
    """Taken without effect: activations are not divided among processes."""


def set_num_layers(nlayers: int) -> None:
    """Taken without effect: there are no contiguous buffers."""


def reset() -> None:
    """Without effect: there are no buffers between forward and backward but autograd's own."""
