"""`Init`: modules that are built inside it have their parameters on drives as soon as they get them.

A parameter stays an ordinary torch tensor on the CPU. Only its memory is exchanged for a mapping of a nameless file, so
modules compute the same bits as in memory.

[Note: whose memory may be exchanged] Only memory that no other tensor uses. In ``self.weight = nn.Parameter(w)`` the
local ``w`` uses it as long as it lives. Such a parameter is moved later: with one of the next ones, or when the block
ends.
[Note: after the block] Conversions and copies of parameters on drives (``model.half()``) are on drives as well, until
`initialize` gets the model or it is garbage-collected.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.config import InfinityConfig, load_config
from infinity.config.batch import ANY_BATCH
from infinity.config.schema.directories import make_directories, remove_empty
from infinity.device.drive_tensors import DriveTensors, drives_of, has_drive_tensors, write_out
from infinity.distributed.process_groups import init_distributed
from infinity.errors import ConfigError
from infinity.loading.hugging_face import one_after_the_other
from infinity.torch_internals.module_tensors import announce_made_tensors, announce_nothing

logger = logging.getLogger(__name__)

# Parameters to try again to move with each new one. More find a released `w` sooner, and cost more per parameter. What
# is still in memory at the end of the block is moved then.
_NUM_TRIED_AGAIN = 16


class Init:
    """A ``with`` block in which models are built on drives, with DeepSpeed's arguments; for the thread that enters it.

    The config's ``nvme_path`` says where. Parameters that are on another device (``meta``, a GPU) stay there, and so do
    buffers, small parameters and those of classes of their own. Without a drive in the config, or without a config, the
    model is built in memory, which a message says once.

    Where a launcher or `infinity.as_deepspeed` has set RANK and WORLD_SIZE, there is a process group afterwards.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: str | Path | dict[str, Any] | InfinityConfig | None = None,
        config: str | Path | dict[str, Any] | InfinityConfig | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        """
        Args:
            module: one that exists already: its parameters go to the drives now.
            remote_device: None or "nvme": where the config says. "cpu" or "none": in memory.
            config: path of a JSON file, the name of a ready config ("zero3_nvme"), a dict, or what `load_config` gave.
            config_dict_or_path: the same, under DeepSpeed's other name.
            enabled: False: nothing is different in the ``with`` block.
            dtype: torch's default dtype inside the block. None: it stays what it is, so that weights get the bits that they
                have without `Init`, in any precision of the config (DeepSpeed takes the config's).
            data_parallel_group, mem_efficient_linear, pin_memory, mpu, zero_param_parallel_group, zero_quantized_weights,
                sequence_data_parallel_group, param_swapper: taken as DeepSpeed takes them, without effect: each process
                builds the whole model.
            zero_quantized_nontrainable_weights: False; weights are never quantized.

        Raises:
            ConfigError: an argument or the config is wrong; a directory cannot be used (`StorageError`).
            StorageError: the parameters of ``module`` do not fit.
        """
        self._is_enabled = bool(enabled)
        self._dtype = dtype
        self._entered: list[ExitStack] = []
        self._tensors: DriveTensors | None = None
        self._placed: list[weakref.ref[nn.Parameter]] = []
        if not self._is_enabled:
            return
        given: Any = module
        if given is not None and not isinstance(given, nn.Module):
            raise ConfigError(f"zero.Init: module must be a torch.nn.Module, got {type(module).__name__}")
        wanted: Any = dtype
        if wanted is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
            raise ConfigError(f"zero.Init: dtype must be a floating-point torch.dtype or None, got {dtype!r}")
        if zero_quantized_nontrainable_weights:
            problem = "zero.Init: zero_quantized_nontrainable_weights would change the weights. Leave it at False"
            raise ConfigError(problem)
        if {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # as DeepSpeed's Init; transformers asks for the rank
            init_distributed()
        self._tensors = _tensors_for(config if config is not None else config_dict_or_path, remote_device)
        if module is not None:
            for parameter in module.parameters():
                self.place(parameter)
            write_out()

    def __enter__(self) -> Init:
        if self._is_enabled:
            _active.stack.append(self)
            stack = ExitStack()
            if self._tensors is not None:
                announce_made_tensors(_on_made_tensor)  # `initialize` since __init__ may have ended it
                stack.enter_context(one_after_the_other())
            if self._dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
            # One object may be entered several times, also nested.
            self._entered.append(stack)
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: Any) -> None:
        if not self._is_enabled:
            return
        _active.stack.remove(self)
        self._entered.pop().close()
        if kind is None:
            self._try_again(len(self._placed))
            if self._tensors is not None:
                write_out()
        # Not after an inner block of the same object: its parameters may still be waiting to be moved.
        if self not in _active.stack:
            self._placed.clear()

    def place(self, parameter: torch.Tensor) -> None:
        """Move a tensor that a module gets to the drives, now or later."""
        # See [Note: whose memory may be exchanged].
        if self._tensors is None or not _is_plain(parameter):
            return
        self._tensors.move(parameter)
        self._try_again(_NUM_TRIED_AGAIN)
        if isinstance(parameter, nn.Parameter):
            # Also if it was moved: `p.data = ...` may give it other memory in this block.
            self._placed.append(weakref.ref(parameter))

    def _try_again(self, num: int) -> None:
        """Move those of the last ``num`` parameters that are in memory."""
        for reference in self._placed[-num:] if num else ():
            parameter = reference()
            if parameter is not None and self._tensors is not None:
                self._tensors.move(parameter)


class _Active(threading.local):
    """The `Init` blocks that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Init] = []


_active = _Active()
# Shared by all threads; `_lock` guards it. Weak: an entry is removed with the last `Init` that uses it.
_known: weakref.WeakValueDictionary[tuple[Path, ...], DriveTensors] = weakref.WeakValueDictionary()
_lock = threading.RLock()
_is_watching: list[Any] = []


def _tensors_for(source: Any, remote_device: Any) -> DriveTensors | None:
    """Makes tensors in the config's directories; None if parameters go to memory."""
    device = remote_device.value if isinstance(remote_device, Enum) else remote_device
    if device not in (None, "none", "cpu", "nvme"):
        raise ConfigError(f'zero.Init: remote_device must be "nvme", "cpu", "none" or None, got {remote_device!r}')
    if source is None:
        if device == "nvme":
            raise ConfigError('zero.Init: remote_device="nvme" needs the config that names the drive. Pass config=')
        _log_once("no config is given")
        return None
    # Batch sizes matter only to training, and DeepSpeed's Init does not check them.
    config = source if isinstance(source, InfinityConfig) else load_config(source, overrides=ANY_BATCH)
    directories = config.nvme_paths
    if device in ("none", "cpu"):
        _log_once(f'remote_device is "{device}"')
        return None
    if not directories:
        if device == "nvme":
            raise ConfigError(
                'zero.Init: remote_device is "nvme", and the config names no directory. Set '
                "zero_optimization.offload_param.nvme_path"
            )
        _log_once("the config offloads nothing to nvme")
        return None
    made = make_directories(directories)
    with _lock:
        tensors = _known.get(directories)
        if tensors is None:
            try:
                tensors = DriveTensors(directories)
            except BaseException:
                remove_empty(made)
                raise
            _known[directories] = tensors
        # torch's global hook: registered once, and never removed. Outside of a block it does nothing.
        if not _is_watching:
            _is_watching.append(register_module_parameter_registration_hook(_on_parameter))
        announce_made_tensors(_on_made_tensor)
    return tensors


@functools.cache
def _log_once(reason: str) -> None:
    logger.warning("zero.Init: models are built in host memory, because %s", reason)


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """torch calls this when a module gets a parameter."""
    if _active.stack and parameter is not None:
        _active.stack[-1].place(parameter)


def _on_made_tensor(made: torch.Tensor, source: torch.Tensor | None) -> None:
    """Called for a tensor that replaces or copies the parameter ``source``. See [Note: after the block]."""
    if _active.stack:
        _active.stack[-1].place(made)
    elif source is not None and _is_plain(source) and (tensors := drives_of(source)) is not None and _is_plain(made):
        tensors.move(made)
    # Nothing is on drives any more: stop listening.
    elif not has_drive_tensors() and not _known:
        announce_nothing()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (nn.Parameter, torch.Tensor)
