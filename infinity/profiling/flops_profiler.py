"""DeepSpeed's flops profiler: what a forward computes, module by module, and how long that takes.

Operations are counted by ``torch.utils.flop_counter``: those of matrix products, convolutions and attention, at two for each
multiplication with an addition. Element by element (activations, norms) nothing is counted, which DeepSpeed does count as
flops, and not as MACs. What compiled code computes is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from infinity.errors import StepOrderError
from infinity.profiling.numbers_as_text import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from infinity.profiling.profile_text import ModuleCount, model_profile, params_of, show
from infinity.torch_internals.attention_flops import attention_formulas


class FlopsProfiler:
    """Counts what a model computes between `start_profile` and `stop_profile`.

    Attributes:
        counts: of each module that was called.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        """
        Args:
            model: its forward is looked at.
            ds_engine: whose sizes are printed, too.
            recompute_fwd_factor: how much of a forward is computed once more in backward, for backward's FLOPS.
        """
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.counts: dict[nn.Module, ModuleCount] = {}
        self._counter: FlopCounterMode | None = None
        self._handles: list[RemovableHandle] = []
        self._open: list[tuple[nn.Module, int, float]] = []

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Forget what was counted, and count from now on, what this thread computes.

        Args:
            ignore_list: classes of modules that are not looked at; what they compute counts for those around them.
        """
        self.end_profile()
        ignored = tuple(ignore_list or ())
        for module in self.model.modules():
            if type(module) not in ignored:
                # First and last of all hooks: so the wait for paged weights is in the time.
                self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._counter = FlopCounterMode(display=False, custom_mapping=attention_formulas())
        self._counter.__enter__()
        torch.ones((), dtype=torch.float32, device="cpu").neg()  # torch loads what it counts with: not the model's time
        self.started = True

    def stop_profile(self) -> None:
        """Count no more; what was counted stays."""
        if self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
        while self._handles:
            self._handles.pop().remove()
        self._open.clear()

    def reset_profile(self) -> None:
        """Forget what was counted so far."""
        self.counts.clear()

    def end_profile(self) -> None:
        """Count no more, and forget."""
        self.stop_profile()
        self.reset_profile()
        self.started = False

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._open.append((module, self._total_so_far(), _now()))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if not any(each is module for each, _, _ in self._open):
            return
        while True:  # an exception may have kept modules inside it from leaving
            entered, flops, began = self._open.pop()
            if entered is module:
                break
        if not any(each is module for each, _, _ in self._open):  # else it is counted by its outer call
            count = self.counts.setdefault(module, ModuleCount())
            count.flops += self._total_so_far() - flops
            count.seconds += _now() - began
            count.num_calls += 1

    def _total_so_far(self) -> int:
        return 0 if self._counter is None else self._counter.get_total_flops()

    def count_of(self, module: nn.Module) -> ModuleCount:
        """Of a module that is never called itself (a list), those of the modules in it."""
        if module in self.counts:
            return self.counts[module]
        inside = [self.count_of(child) for child in module.children()]
        return ModuleCount(sum(each.flops for each in inside), sum(each.seconds for each in inside))

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations of all that was profiled."""
        flops = self.count_of(self.model).flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiplications with an addition: half as many."""
        macs = self.count_of(self.model).flops // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds."""
        seconds = self.count_of(self.model).seconds
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Elements of the model's parameters, each once."""
        num = params_of(self.model)
        return params_to_string(num) if as_string else num

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
    ) -> None:
        """Print what was counted; nothing before `start_profile`.

        Args:
            profile_step: is told.
            module_depth: down to which depth classes of modules are compared; -1: to the innermost.
            top_modules: how many classes of each depth.
            detailed: whether to print the model with what each module did.
            output_file: where to; its directory is made. None: to stdout.
        """
        if self.started:
            show(model_profile(self, profile_step, module_depth, top_modules, detailed=detailed), output_file)


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[Any, Any, Any]:
    """Count what one forward of a model computes. The model is in evaluation mode afterwards, as with DeepSpeed.

    Args:
        model: any module, paged as well.
        input_shape: of a tensor of ones, in the dtype and on the device of the first parameter, the only argument.
        args, kwargs: or those that the model is called with.
        print_profile: whether to print tables.
        detailed, module_depth, top_modules, output_file: see `FlopsProfiler.print_model_profile`.
        warm_up: calls before it, which do not count.
        as_string: whether to return texts ("1.5 G") in place of numbers.
        ignore_modules: see `FlopsProfiler.start_profile`.
        mode: "generate": ``model.generate`` is called.

    Returns:
        Floating-point operations, multiplications with an addition, parameters.

    Raises:
        StepOrderError: there is neither a shape nor an argument.
    """
    kwargs = kwargs or {}
    if input_shape is not None:
        first = next(model.parameters(), None)
        dtype, device = (torch.float32, torch.device("cpu")) if first is None else (first.dtype, first.device)
        args = [torch.ones(input_shape, dtype=dtype, device=device)]
    if not args and not kwargs:
        problem = "it has nothing to call the model with"
        raise StepOrderError("get_model_profile", problem, cure="Pass input_shape, args or kwargs")
    profiler = FlopsProfiler(model)
    model.eval()
    call: Any = model if mode == "forward" else model.generate
    for _ in range(warm_up):
        call(*args, **kwargs)
    profiler.start_profile(ignore_modules)
    try:
        call(*args, **kwargs)
        profiler.stop_profile()
        found = profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    finally:
        profiler.end_profile()
    flops, macs, params = found
    return (number_to_string(flops), macs_to_string(macs), params_to_string(params)) if as_string else found


NAMES = {
    "FlopsProfiler": FlopsProfiler,
    "bytes_to_string": bytes_to_string,
    "duration_to_string": duration_to_string,
    "flops_to_string": flops_to_string,
    "get_model_profile": get_model_profile,
    "macs_to_string": macs_to_string,
    "number_to_string": number_to_string,
    "params_to_string": params_to_string,
}
"""What DeepSpeed's module of this name has."""

__all__ = ["NAMES", *NAMES]
