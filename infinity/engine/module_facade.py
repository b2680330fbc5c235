"""An ``nn.Module`` in front of another one, with that one's parameters, names and attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_SHARED = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes that facade and module share, the same dictionaries: torch's functions read them without calling
methods."""


class ModuleFacade(nn.Module):
    """An ``nn.Module`` whose parameters, buffers, children and state dicts are those of `module`.

    Names have no prefix for the facade. It appears itself in `modules` only. Forward hooks registered on it run around
    its own calls. Attributes that it does not have are looked up in `module`; parameters and modules that you assign to
    it are assigned to `module`.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        """``module``: the module to show."""
        super().__init__()
        # By `__dict__`, because `__setattr__` below sends modules to `module`, which does not exist yet.
        self.__dict__.update({name: vars(module)[name] for name in _SHARED})
        # Not a child: its parameters would be found twice.
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        # Called only if the facade has no such attribute.
        # Special names are asked for by copy, pickle and the like, which mean this very object.
        module = self.__dict__.get("module")
        if module is not None and not (name.startswith("__") and name.endswith("__")):
            try:
                return getattr(module, name)
            except AttributeError:
                pass
        cure = "" if name.startswith("_") else self._cure_of_absent(name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'{cure}", name=name, obj=self)

    @staticmethod
    def _cure_of_absent(name: str) -> str:
        """End of the error for a name that neither facade nor module has."""
        return ""

    def __setattr__(self, name: str, value: Any) -> None:
        # Not nn.Module's: the model may have a buffer that is called as an attribute here.
        if isinstance(value, nn.Module | nn.Parameter) and name not in self.__dict__ and "module" in self.__dict__:
            setattr(self.module, name, value)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __repr__(self) -> str:
        inner = repr(self.module).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  (module): {inner}\n)"

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        module = self.__dict__.get("module")
        return True if module is None else bool(module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__:  # else torch's constructor says so of a module without content
            self.module.training = mode

    # ------------------------------------------------------------------------------------- what walks through modules

    # A model may have methods of its own with fewer arguments, so only what is given is passed on.

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The modules of `module` with their names, `module` first."""
        found: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **kwargs)
        return found

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """The facade itself (Lightning's Fabric looks for an engine there), and all modules of `module`."""
        yield self
        yield from self.module.modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> ModuleFacade:
        """Call ``fn`` on every module."""
        self.module.apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ModuleFacade:
        """Implements `to`, `float`, `cuda` and the like. Does nothing if all tensors have the wanted dtype and device
        already."""
        kinds = {(tensor.dtype, tensor.device) for tensor in (*self.module.parameters(), *self.module.buffers())}
        for dtype, device in kinds:
            found = fn(torch.empty(0, dtype=dtype, device=device))
            # Tried on an empty tensor of each kind: scripts call `engine.to(device)` out of habit, and paged parameters
            # refuse conversions.
            if (found.dtype, found.device) != (dtype, device):
                self.module._apply(fn, recurse)
                break
        return self

    def share_memory(self) -> ModuleFacade:
        """As ``module.share_memory``."""
        self.module.share_memory()
        return self

    # --------------------------------------------------------------------------------------------------- state dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Copies of the weights and buffers, with the module's names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``module.load_state_dict``."""
        return self.module.load_state_dict(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.module._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.module._load_from_state_dict(*args)
