"""``infinity plan``: will a model train, with which offload, how fast, and what is the smallest change that makes it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from infinity.cli.checkpoint import size_in_bytes
from infinity.cli.config import loaded_for_one
from infinity.cli.output import PathType, display, json_option, print_facts, print_json, table
from infinity.errors import size

if TYPE_CHECKING:
    from infinity.plan.ladder import Outcome
    from infinity.plan.machine import Machine

_SIZE = functools.partial(click.option, type=size_in_bytes, metavar="SIZE")
# Tokens of a step, if none are given. The predicted time of computing grows with them.
_TOKENS = 2048


def _positive(text: str) -> float:
    # click turns a ValueError of `float` into its own message.
    if not math.isfinite(found := float(text)):
        raise click.BadParameter(f"{text} is not a finite number.")
    if found <= 0:
        raise click.BadParameter(f"{text} is not above 0.")
    return found


_NUMBER = functools.partial(click.option, type=_positive, metavar="NUMBER")


@click.command()
@click.argument("model", required=False)
@click.option(
    "--params", metavar="NUMBER", help="A model of equal blocks with this number of parameters: 7b, 374m, 1.2e9."
)
@click.option("--config", "file", type=PathType(), help="Config to plan for. Default: bf16 with AdamW.")
@click.option(
    "--nvme-path",
    "directories",
    multiple=True,
    type=PathType(file_okay=False),
    help="Directory on a drive for weights and states; repeat the option for each drive. Default: the config's, or "
    "the current directory.",
)
@click.option(
    "--tokens", type=click.IntRange(min=1), default=_TOKENS, show_default=True, help="Tokens of one optimizer step."
)
@_SIZE("--ram", help="Describe a machine: its free host memory, e.g. 64GB.")
@_SIZE("--disk", help="Its free space on drives.")
@_SIZE("--drive-speed", help="Bytes per second of its drives, reads and writes together, e.g. 6GB.")
@_SIZE("--gpu", help="Memory of its GPU.")
@_SIZE("--link", help="Bytes per second between memory and GPU, each way, e.g. 25GB.")
@_NUMBER("--updates", help="10^9 parameters per second that its CPU updates with AdamW.")
@_NUMBER("--tflops", help="TFLOP/s (10^12 operations per second) that your model reaches on it.")
@_NUMBER("--tbw", help="Terabytes that its drives are rated to write (TBW).")
@click.option(
    "--lora",
    type=click.IntRange(1, 1 << 20),
    metavar="RANK",
    help="Train LoRA adapters of this rank on a frozen base, instead of all weights.",
)
@click.option(
    "--frozen-dtype",
    type=click.Choice(["nf4", "int8", "fp8_e4m3", "bf16"]),
    help="Format of the frozen base, instead of the config's infinity.frozen_dtype.",
)
@click.option(
    "--no-measure", is_flag=True, help="Do not measure drive and compute, which takes a second and writes 34 MB."
)
@click.option("--largest", is_flag=True, help="Also find the largest model of this family that fits.")
@json_option
def plan(
    model: str | None,
    params: str | None,
    file: Path | None,
    directories: tuple[Path, ...],
    tokens: int,
    lora: int | None,
    frozen_dtype: str | None,
    largest: bool,
    as_json: bool,
    **described: Any,
) -> int:
    """Predict whether MODEL trains on this or a described machine: bytes and step time of every offload choice.

    MODEL is a Hugging Face config.json or a directory with one; or give --params. Nothing is downloaded, and no weights
    are made. Bytes are those of the engine's own plan. The time of a step is the longest of drives, copies to and from
    a GPU, compute, and updates by the CPU, as far as their speeds are known: a step takes at least as long. Where the
    CPU does both, updates and compute add up. If it does not fit, the exit status is 1, and the command names the
    smallest change that makes it fit.

    \b
    Examples:
      infinity plan --params 7b
      infinity plan path/to/config.json --nvme-path /mnt/nvme --tokens 8192
      infinity plan model-directory --config ds_config.json --json
      infinity plan --params 70b --ram 64GB --disk 2TB --drive-speed 6GB --gpu 24GB --tflops 150 --tbw 1200
      infinity plan path/to/config.json --largest
      infinity plan --params 70b --lora 16 --frozen-dtype nf4 --ram 64GB --disk 1TB --drive-speed 6GB --gpu 24GB
    """
    if (model is None) == (params is None):
        raise click.UsageError("give a MODEL (config.json or a directory with one) or --params, and not both.")
    # A name such as "meta-llama/Llama-3-8B" looks like a path. The command has to work without a network.
    if model is not None and not Path(model).exists():
        raise click.UsageError(f"{model}: no such file or directory; names on the hub are not looked up.")
    if params is not None and Path(params).exists():
        raise click.UsageError(f"--params {params}: it is a path. Give it without --params.")
    from infinity.machine.here import room_bytes
    from infinity.plan.ladder import PLAIN, Ladder
    from infinity.plan.model_shapes import ModelRefused, add_adapters, read_model

    try:
        name, shapes = read_model(params or str(model))
        if lora is not None:
            name, shapes = f"{name}, LoRA of rank {lora}", add_adapters(shapes, lora)
    except ModelRefused as error:
        raise (click.ClickException(str(error)) if params is None else click.UsageError(f"--params {error}")) from error
    # The config's states go to these directories, if any are given.
    places = [str(path) for path in directories]
    keys = [f"zero_optimization.{name}.nvme_path" for name in ("offload_param", "offload_optimizer")] if places else []
    config = None if file is None else loaded_for_one(file, dict.fromkeys(keys, places))
    # The ladder tries every offload choice, so it needs the JSON: it replaces the devices and loads the config anew.
    written = dict(PLAIN if config is None else config)
    if frozen_dtype is not None:
        written["infinity"] = {**(written.get("infinity") or {}), "frozen_dtype": frozen_dtype}
    paths = list(directories) or ([] if config is None else list(config.nvme_paths)) or [Path.cwd()]
    machine, source = _machine(paths, SimpleNamespace(**described))
    # None: the space is given by --disk. Otherwise the ladder looks at the directories of each choice.
    look = None if described["disk"] else room_bytes
    ladder = Ladder(shapes, written, machine, [str(path) for path in paths], tokens, look)
    rungs = list(ladder.rungs())
    # Without a config, take the first choice that fits. `rungs` begins with everything in the memory of the device.
    given = ladder.given() if config is not None else next((each for each in rungs if each.fits), rungs[-1])
    # Searches many placements, so only if it is needed.
    change = None if given.fits else ladder.smallest_change(given)
    most = ladder.largest() if largest else None
    if as_json:
        print_json(
            {
                "model": name,
                "num_parameters": sum(each.numel() for each in shapes.parameters()),
                "fits": given.fits,
                "machine": dataclasses.asdict(machine),
                "chosen": _as_json(given, tokens),
                "choices": [_as_json(each, tokens) for each in rungs],
                "smallest_change": None if change is None else change.differences_from(given),
                "largest": None if most is None else {"num_layers": most[0], "num_parameters": most[1]},
            }
        )
        return 0 if given.fits else 1
    _print_machine(name, shapes, machine, source, tokens)
    _print_rungs(rungs, given, machine, tokens, is_given=config is not None)
    _print_verdict(given, change, machine, is_given=config is not None)
    if largest:
        display(f"\nThe largest model of this family that fits: {_largest_words(most)}")
    return 0 if given.fits else 1


def _machine(paths: Sequence[Path], asked: SimpleNamespace) -> tuple[Machine, str]:
    """Return this machine with the described values in place of its own, and the source of its computing speed."""
    from infinity.machine.bandwidth_cache import now
    from infinity.machine.hardware import measure_copies
    from infinity.machine.here import glance, measure_flops_per_second, measure_updates_per_second, this_machine
    from infinity.plan.machine import Bandwidth

    # Any of the three describes another machine: measured speeds of this one would be wrong there.
    is_here = asked.ram is None and asked.disk is None and asked.gpu is None
    is_measured = is_here and not asked.no_measure
    speed, source = (asked.tflops * 1e12, "as given") if asked.tflops else (None, "")
    link, updates = asked.link, asked.updates and asked.updates * 1e9
    try:
        # --ram without --gpu describes a machine without a GPU.
        machine = this_machine(paths, asks_gpu=asked.ram is None and asked.gpu is None)
        if speed is None and is_measured:
            speed, device = measure_flops_per_second()
            source = f"measured: {device}"
        if updates is None and is_measured:
            updates = measure_updates_per_second()
        if link is None and is_measured and machine.device_free_bytes is not None:
            copies = measure_copies()
            link = min(copies.up, copies.down)
    except RuntimeError as error:  # torch's: another process has all of the GPU, or has it alone
        raise click.ClickException(
            f"the GPU cannot be used: {str(error).strip().partition(chr(10))[0]}. End the program that uses it "
            "(`nvidia-smi` lists them), set CUDA_VISIBLE_DEVICES, or describe it with --gpu"
        ) from error
    # In this order: as given, as `infinity profile` measured, or a glance of a third of a second.
    bandwidth = machine.bandwidth if is_here else None
    if asked.drive_speed is not None:
        bandwidth = Bandwidth(asked.drive_speed, asked.drive_speed, asked.drive_speed, now())
    elif bandwidth is None and is_measured:
        bandwidth = glance(paths)
    changed = dataclasses.replace(
        machine,
        host_free_bytes=asked.ram or machine.host_free_bytes,
        drive_free_bytes=asked.disk or machine.drive_free_bytes,
        # See `asks_gpu` above.
        device_free_bytes=asked.gpu or (None if asked.ram else machine.device_free_bytes),
        bandwidth=bandwidth,
        flops_per_second=speed,
        drive_tbw=asked.tbw,
        link_bytes_per_second=link,
        updates_per_second=updates,
    )
    if asked.link is not None and changed.uses_host_memory:
        raise click.UsageError("--link is the speed of copies to a GPU: give --gpu as well.")
    return changed, source


def _largest_words(most: tuple[int, int] | None) -> str:
    from infinity.plan.ladder import MOST_LAYERS

    if most is None:
        return "unknown: the model has no repeated layers, or does not fit with one"
    more = " or more" if most[0] >= MOST_LAYERS else ""
    return f"{most[0]:,} layers{more}, {most[1] / 1e9:,.2f}B parameters"


def _print_machine(name: str, shapes: Any, machine: Machine, source: str, tokens: int) -> None:
    count = sum(each.numel() for each in shapes.parameters())
    drives = "no limit" if machine.drive_free_bytes is None else size(machine.drive_free_bytes)
    speed = machine.bandwidth
    at = "speed unknown: run `infinity profile DIR`, or give --drive-speed"
    if speed is not None:
        at = f"{size(speed.mixed_bytes_per_second)}/s both ways"
    device = "the CPU" if machine.uses_host_memory else f"a GPU with {size(machine.device_free_bytes or 0)} free"
    rows = [
        ("model", f"{name.removesuffix(' parameters')}: {count:,} parameters"),
        ("memory free", size(machine.host_free_bytes)),
        ("drives free", f"{drives}, {at}"),
        ("device", device),
        ("step", f"{tokens:,} tokens"),
    ]
    if machine.link_bytes_per_second:
        rows.append(("copies", f"{size(machine.link_bytes_per_second)}/s each way between memory and GPU"))
    if machine.flops_per_second:
        rows.append(("compute", f"{machine.flops_per_second / 1e12:,.3g} TFLOP/s ({source})"))
    if machine.updates_per_second:
        rows.append(("updates", f"{machine.updates_per_second / 1e9:,.3g}e9 parameters/s by the CPU"))
    print_facts(rows)


def _print_rungs(rungs: list[Outcome], given: Outcome, machine: Machine, tokens: int, *, is_given: bool) -> None:
    """Print a table of all choices of tiers. ``given``: the one with a star; ``is_given``: it is that of the config."""
    has_gpu = not machine.uses_host_memory
    gpu = ["GPU"] if has_gpu else []
    shown = table(
        "", "weights", "states", "memory", *gpu, "drives", "moved", "step", "tokens/s", "RAM at least", is_dense=True
    )
    for each in rungs:
        plan = each.plan
        is_chosen = (each.param_tier, each.optimizer_tier) == (given.param_tier, given.optimizer_tier)
        # A choice that does not fit at all has no plan, only the memory that it would need at least.
        resting = plan.states_bytes if plan is not None else {}
        moved = None if plan is None else plan.predicted_read_bytes_per_step + plan.predicted_write_bytes_per_step
        cells = [
            ("fits" if each.fits else "no") + (" *" if is_chosen else ""),
            each.param_tier,
            each.optimizer_tier,
            _bytes(resting.get("host")),
            *([_bytes(resting.get("device"))] if has_gpu else []),
            _bytes(resting.get("nvme")),
            _bytes(moved),
            _seconds(each),
            "-" if each.seconds is None else _figures(tokens / each.seconds),
            _bytes(each.minimum_bytes or None),
        ]
        shown.add_row(*cells)
    display("")
    display(shown)
    star = "the config" if is_given else "taken"
    display(f"\nmemory, GPU, drives: bytes stored there. moved: read and written in a step. *: {star}.")


def _print_verdict(given: Outcome, change: Outcome | None, machine: Machine, *, is_given: bool) -> None:
    if given.plan is not None:
        plan = given.plan
        life = plan.predicted_drive_life_steps
        written = plan.predicted_write_bytes_per_step
        wear = f"{size(written)} written in a step" if written else "nothing is written in a step"
        if life is not None:
            wear += f": {life:,} steps until {machine.drive_tbw or plan.drive_tbw:g} TB are written"
        elif written:
            wear += "; with --tbw, the number of steps until the drives' rated writes is shown"
        display(f"wear: {wear}")
        if plan.retention is not None:
            display(f"durable run: {size(plan.durable_bytes)} on the drives: {plan.retention}")
    if given.fits:
        has_gpu = not machine.uses_host_memory
        how = "with this config" if is_given else _placed(given.param_tier, given.optimizer_tier, has_gpu=has_gpu)
        display(f"\nIt fits: {how}. Activations come on top of what is shown.")
        return
    display(f"\nIt does not fit: {given.problem}.")
    if change is None and not given.lacks_room:
        display("More memory or larger drives would not help: change what this message names.")
    elif change is None:
        display("No change of the config helps: more memory or more space on the drives is needed.")
    else:
        changes = change.differences_from(given).items()
        keys = ", ".join(f"{key} = {value if isinstance(value, str) else json.dumps(value)}" for key, value in changes)
        display(f"The smallest change that makes it fit: {keys}")


def _placed(weights: str, states: str, *, has_gpu: bool) -> str:
    places = {"none": "the GPU" if has_gpu else "memory", "cpu": "RAM", "nvme": "NVMe"}
    if places[weights] == places[states]:
        return f"weights and optimizer state go to {places[weights]}"
    verb = "stay on" if weights == "none" else "go to"
    return f"weights {verb} {places[weights]}, and optimizer state goes to {places[states]}"


def _seconds(each: Outcome) -> str:
    seconds = each.seconds
    return "-" if seconds is None else f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else size(num_bytes) if num_bytes else "0"


_OF_PLAN = {
    "resting_bytes": "resting_bytes",
    "read_bytes_per_step": "predicted_read_bytes_per_step",
    "write_bytes_per_step": "predicted_write_bytes_per_step",
    "upload_bytes_per_step": "predicted_upload_bytes_per_step",
    "download_bytes_per_step": "predicted_download_bytes_per_step",
    "drive_life_steps": "predicted_drive_life_steps",
}
"""Key of the JSON -> attribute of the plan."""


def _as_json(each: Outcome, tokens: int) -> dict[str, Any]:
    retention = None if each.plan is None else each.plan.retention
    return {
        **{name: getattr(each, name) for name in ("param_tier", "optimizer_tier", "fits", "problem")},
        **{key: getattr(each.plan, name, None) for key, name in _OF_PLAN.items()},
        "retention": None if retention is None else dataclasses.asdict(retention),
        "minimum_memory_bytes": each.minimum_bytes,
        "step_seconds": each.seconds,
        "tokens_per_second": None if each.seconds is None else tokens / each.seconds,
    }
