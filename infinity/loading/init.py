"""`Init`: modules that are built inside it have their parameters on drives from the moment they get them.

A parameter stays what it is, an ordinary torch tensor on the CPU that can be read and written; only its memory is exchanged
for a mapping of a nameless file. So whatever a module's code does with it gives the same bits as in memory.

[Note: whose memory may be exchanged] Only memory that nobody else looks at. In ``self.weight = nn.Parameter(w)`` the local
``w`` does, as long as it lives: such a parameter is moved later, with one of the next ones or when the ``with`` block ends.
[Note: after the block] Conversions and copies of parameters that lie on drives lie there, too, until `initialize` takes the
model over or it is gone.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from types import TracebackType
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

_NUM_TRIED_AGAIN = 16
"""With each new parameter, so many of the last ones."""


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
            raise ConfigError(
                "zero.Init: zero_quantized_nontrainable_weights would change the weights. Leave it at False"
            )
        if {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # as DeepSpeed does: transformers asks the group for its rank
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
                announce_made_tensors(_on_made_tensor)  # again: an `initialize` in between ends that
                stack.enter_context(one_after_the_other())
            if self._dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
            self._entered.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_enabled:
            return
        _active.stack.remove(self)
        self._entered.pop().close()
        if error is None:
            self._try_again(len(self._placed))
            if self._tensors is not None:
                write_out()
        if self not in _active.stack:
            self._placed.clear()

    def place(self, parameter: torch.Tensor) -> None:
        """Bring a tensor that a module gets to the drives, now or later."""
        if self._tensors is None or not _is_plain(parameter):
            return
        self._tensors.move(parameter)
        self._try_again(_NUM_TRIED_AGAIN)
        if isinstance(parameter, nn.Parameter):
            self._placed.append(weakref.ref(parameter))

    def _try_again(self, num: int) -> None:
        """Move those of the last parameters that could not be moved, or have got other memory since (``p.data = ...``)."""
        for reference in self._placed[-num:] if num else ():
            parameter = reference()
            if parameter is not None and self._tensors is not None:
                self._tensors.move(parameter)


class _Active(threading.local):
    """The blocks that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Init] = []


_active = _Active()
_known: weakref.WeakValueDictionary[tuple[Path, ...], DriveTensors] = weakref.WeakValueDictionary()
_logged: set[str] = set()
_lock = threading.RLock()
_is_watching: list[Any] = []


def _tensors_for(source: Any, remote_device: Any) -> DriveTensors | None:
    """Where parameters go; None if that is memory."""
    device = remote_device.value if isinstance(remote_device, Enum) else remote_device
    if device not in (None, "none", "cpu", "nvme"):
        raise ConfigError(f'zero.Init: remote_device must be "nvme", "cpu", "none" or None, got {remote_device!r}')
    if source is None:
        if device == "nvme":
            raise ConfigError('zero.Init: remote_device="nvme" needs the config that names the drive. Pass config=')
        _log_once("no config is given")
        return None
    # As long as nothing trains, batch sizes do not matter; DeepSpeed's does not ask for them.
    config = source if isinstance(source, InfinityConfig) else load_config(source, overrides=ANY_BATCH)
    directories = config.nvme_paths
    if device in ("none", "cpu"):
        _log_once(f'remote_device is "{device}"')
        return None
    if not directories:
        if device == "nvme":
            raise ConfigError('zero.Init: remote_device is "nvme", and the config names no nvme_path. Name one')
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
        if not _is_watching:
            _is_watching.append(register_module_parameter_registration_hook(_on_parameter))
        announce_made_tensors(_on_made_tensor)
    return tensors


def _log_once(reason: str) -> None:
    if reason not in _logged:
        _logged.add(reason)
        logger.warning("zero.Init: models are built in host memory, because %s", reason)


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """A module gets a parameter."""
    if _active.stack and parameter is not None:
        _active.stack[-1].place(parameter)


def _on_made_tensor(made: torch.Tensor, source: torch.Tensor | None) -> None:
    """A tensor takes a parameter's place, or is its copy."""
    if _active.stack:
        _active.stack[-1].place(made)
    elif source is not None and _is_plain(source) and (tensors := drives_of(source)) is not None and _is_plain(made):
        tensors.move(made)
    elif not has_drive_tensors() and not _known:
        announce_nothing()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (nn.Parameter, torch.Tensor)
