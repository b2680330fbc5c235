"""The printed profile: a summary, classes of modules at each depth, and the model with what each module did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from torch import nn

from infinity.profiling.numbers_as_text import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

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


class Counted(Protocol):
    """A model of which modules were counted."""

    model: nn.Module
    ds_engine: Any
    recompute_fwd_factor: float

    def count_of(self, module: nn.Module) -> ModuleCount: ...


def model_profile(counted: Counted, step: int, module_depth: int, top_modules: int, *, detailed: bool) -> str:
    """All tables as one text; the arguments are those of `FlopsProfiler.print_model_profile`."""
    lines = ["", f"{' Flops Profiler ':-^78}", f"Profile Summary at step {step}:", ""]
    lines += [f"{what + ':':<{_WIDTH}}  {value}" for what, value in _summary(counted)]
    lines += ["", f"{' Aggregated Profile per GPU ':-^78}", *_aggregated(counted, module_depth, top_modules)]
    if detailed:
        lines += ["", f"{' Detailed Profile per GPU ':-^78}", _NOTES, _detailed(counted)]
    return "\n".join([*lines, "-" * 78])


def show(text: str, file: str | Path | None) -> None:
    """To stdout, or into a file, whose directory is made."""
    if not file:
        Console(soft_wrap=True).print(text, markup=False, highlight=False)
        return
    Path(file).absolute().parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(f"{text}\n")


def params_of(module: nn.Module) -> int:
    """Elements of its parameters, each once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _summary(counted: Counted) -> Iterator[tuple[str, object]]:
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


def _aggregated(counted: Counted, module_depth: int, num: int) -> Iterator[str]:
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


def _detailed(counted: Counted) -> str:
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
