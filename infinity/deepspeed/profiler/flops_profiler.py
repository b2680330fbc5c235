"""DeepSpeed's flops profiler: what a forward computes, module by module, and how long that takes.

Operations are counted by ``torch.utils.flop_counter``: those of matrix products, convolutions and attention, at two for each
multiplication with an addition. Element by element (activations, norms) nothing is counted, which DeepSpeed does count as
flops, and not as MACs. What compiled code computes is not seen.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from infinity.config.schema.blocks import FlopsProfilerBlock
from infinity.console import Console
from infinity.errors import StepError
from infinity.torch_internals.names import attention_formulas
from swapper.volumes.publish import make_directory, opener

logger = logging.getLogger(__name__)
_WIDTH = 70
_NOTES = """\
Behind each module's name: parameters, MACs, time of its forward, each with its share of all, and operations per second.

Counted are matrix products, convolutions and attention, two operations for each MAC. What a module computes beside its
submodules (attention by a function, a loss) is its own. The time is that of the forward that was counted, with the wait for
paged weights, and counting takes time itself: infinity.timeline and engine.report have those of ordinary steps.
"""


@dataclass
class ModuleCount:
    """What one module did in all its calls, with all that it called."""

    flops: int = 0
    """Floating-point operations of its forward."""
    seconds: float = 0.0
    """With the wait for its weights, where those are paged."""
    num_calls: int = 0


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

    def show(self, section: FlopsProfilerBlock) -> None:
        """Print what was counted, once. A file that cannot be written is told: a training does not end for it."""
        try:
            self.print_model_profile(
                section.profile_step, section.module_depth, section.top_modules, section.detailed, section.output_file
            )
        except OSError as error:
            logger.warning("the profile was not written: %s. Name another file in flops_profiler.output_file", error)
        self.end_profile()

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
        if not self.started:
            return
        text = _told(self, profile_step, module_depth, top_modules, detailed=detailed)
        if output_file:
            make_directory(Path(output_file).absolute().parent)
            with open(output_file, "w", opener=opener) as file:
                file.write(f"{text}\n")
        else:
            Console(soft_wrap=True).print(text, markup=False, highlight=False)


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
        StepError: there is neither a shape nor an argument.
    """
    kwargs = kwargs or {}
    if input_shape is not None:
        first = next(model.parameters(), None)
        dtype, device = (torch.float32, torch.device("cpu")) if first is None else (first.dtype, first.device)
        args = [torch.ones(input_shape, dtype=dtype, device=device)]
    if not args and not kwargs:
        problem = "it has nothing to call the model with"
        raise StepError.order("get_model_profile", problem, cure="Pass input_shape, args or kwargs")
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


# ---------------------------------------------------------------------------------------------------------- the text


def _told(counted: FlopsProfiler, step: int, module_depth: int, top_modules: int, *, detailed: bool) -> str:
    """All tables as one text; the arguments are those of `FlopsProfiler.print_model_profile`."""
    lines = ["", f"{' Flops Profiler ':-^78}", f"Profile Summary at step {step}:", ""]
    lines += [f"{what + ':':<{_WIDTH}}  {value}" for what, value in _summary(counted)]
    lines += ["", f"{' Aggregated Profile per GPU ':-^78}", *_aggregated(counted, module_depth, top_modules)]
    if detailed:
        lines += ["", f"{' Detailed Profile per GPU ':-^78}", _NOTES, _detailed(counted)]
    return "\n".join([*lines, "-" * 78])


def params_of(module: nn.Module) -> int:
    """Elements of its parameters, each once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _summary(counted: FlopsProfiler) -> Iterator[tuple[str, object]]:
    engine, whole, params = counted.ds_engine, counted.count_of(counted.model), params_of(counted.model)
    if engine is not None:
        yield "world size", engine.world_size
        yield "data parallel size", engine.dp_world_size
        yield "model parallel size", engine.mp_world_size
        yield "batch size per GPU", engine.train_micro_batch_size_per_gpu()
    yield "params per GPU", params_to_string(params)
    yield "fwd MACs per GPU", macs_to_string(whole.flops // 2)
    yield "fwd flops per GPU", number_to_string(whole.flops)
    yield "fwd latency", duration_to_string(whole.seconds)
    yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", flops_to_string(_rate(whole.flops, whole.seconds))
    if engine is None or engine.report is None or not engine.wall_clock_breakdown():
        return
    report, factor = engine.report, 2 + counted.recompute_fwd_factor
    flops = whole.flops * engine.gradient_accumulation_steps()
    yield "bwd latency of the step", duration_to_string(report.backward_seconds)
    rate = flops_to_string(_rate(factor * flops, report.backward_seconds))
    yield f"bwd FLOPS per GPU = {factor:g} * fwd flops of the step / bwd latency", rate
    yield "step latency", duration_to_string(report.update_seconds)
    yield "iter latency", duration_to_string(report.seconds)
    rate = flops_to_string(_rate((factor + 1) * flops, report.seconds))
    yield f"FLOPS per GPU = {factor + 1:g} * fwd flops of the step / iter latency", rate
    if report.num_samples is not None:
        yield "samples/second", round(_rate(report.num_samples, report.seconds), 2)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def _aggregated(counted: FlopsProfiler, module_depth: int, num: int) -> Iterator[str]:
    depths: dict[int, dict[str, list[nn.Module]]] = defaultdict(lambda: defaultdict(list))

    def walk(module: nn.Module, depth: int) -> None:
        depths[depth][type(module).__name__].append(module)
        for child in module.children():
            walk(child, depth + 1)

    walk(counted.model, 0)
    kinds: list[tuple[str, Callable[[nn.Module], float], Callable[[float], str]]] = [
        ("params", params_of, params_to_string),
        ("MACs", lambda module: counted.count_of(module).flops // 2, macs_to_string),
        ("fwd latency", lambda module: counted.count_of(module).seconds, duration_to_string),
    ]
    yield f"Top {num} modules in terms of params, MACs or fwd latency at different model depths:"
    for depth, classes in depths.items():
        if module_depth != -1 and depth > module_depth:
            return
        yield f"depth {depth}:"
        for kind, amount_of, as_text in kinds:
            amounts = {name: sum(map(amount_of, modules)) for name, modules in classes.items()}
            top = sorted(amounts, key=lambda name: amounts[name], reverse=True)[:num]
            yield f"    {kind:<11} - { ({name: as_text(amounts[name]) for name in top}) }"


def _detailed(counted: FlopsProfiler) -> str:
    whole, params = counted.count_of(counted.model), params_of(counted.model)

    def facts(module: nn.Module, count: ModuleCount) -> str:
        own = params_of(module)
        items = [
            f"{params_to_string(own)} = {_share(own, params)} Params",
            f"{macs_to_string(count.flops // 2)} = {_share(count.flops, whole.flops)} MACs",
            f"{duration_to_string(count.seconds)} = {_share(count.seconds, whole.seconds)} latency",
            flops_to_string(_rate(count.flops, count.seconds)),
        ]
        return ", ".join([*items, *filter(None, [module.extra_repr()])])

    def told(module: nn.Module) -> str:
        own, inside = facts(module, counted.count_of(module)), list(module.named_children())
        if not inside:
            return f"{type(module).__name__}({own})"
        lines = [own, *(f"({name}): {told(child)}" for name, child in inside)]
        indented = "\n".join(lines).replace("\n", "\n  ")
        return f"{type(module).__name__}(\n  {indented}\n)"

    return told(counted.model)


def _share(part: float, whole: float) -> str:
    return f"{round(100 * part / whole, 2) if whole else 0:g}%"


# ---------------------------------------------------------------- numbers as text, under DeepSpeed's names

_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """``1.5 G``.

    Args:
        num: not negative.
        units: of T, G, M, K, "", m and u; None: the one that fits.
        precision: digits behind the point, at most.
    """
    if units is None:
        units = next((unit for unit, size in _MAGNITUDES.items() if num >= size), "u") if num else ""
    return f"{round(num / _MAGNITUDES.get(units, 1.0), precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations per second."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiplications with an addition."""
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Bytes."""
    return f"{number_to_string(b, units, precision)}B"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds."""
    return f"{number_to_string(duration, units, precision)}s"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Parameters; a thousand millions are ``B``."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()
