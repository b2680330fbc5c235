"""``infinity checkpoint``: inspect, verify and seal checkpoints, export their weights, and convert those of DeepSpeed."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from infinity.cli.output import PathType, display, json_option, print_facts, print_json, print_result, table
from infinity.errors import CheckpointError, format_bytes

if TYPE_CHECKING:
    from infinity.checkpoint.saved import Checkpoint

# torch's names. torch itself is imported inside the command, because `--help` imports this file.
_DTYPES = ("float32", "bfloat16", "float16")
_SOURCE = click.argument("source", metavar="CHECKPOINT", type=PathType())
_TAG = click.option("--tag", help="Tag of the checkpoint in the directory. Default: the newest.")


def size_in_bytes(text: str) -> int:
    """The type of an option: ``8GB``, ``1.5GiB`` or a number of bytes."""
    from infinity.config.schema.quantities import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} {error}") from None


def _opened(source: Path, tag: str | None) -> Checkpoint:
    from infinity.checkpoint.saved import Checkpoint

    # `Checkpoint.open` would raise as well, but cannot tell a file from a missing path.
    if not source.is_dir():
        problem = "it is a file" if source.exists() else "it does not exist"
        raise CheckpointError(source, problem, cure="Give a directory that engine.save_checkpoint has written to")
    return Checkpoint.open(source, tag)


@click.group()
def checkpoint() -> None:
    """Inspect or verify a checkpoint, or export its weights, without its model and in bounded memory.

    CHECKPOINT is the directory that engine.save_checkpoint was given, or the one of a single tag in it.
    """


@checkpoint.command()
@_SOURCE
@_TAG
@click.option("--tensors", is_flag=True, help="List every tensor.")
@json_option
def inspect(source: Path, tag: str | None, tensors: bool, as_json: bool) -> None:
    """List what a checkpoint contains. Reads only its small files.

    \b
    Examples:
      infinity checkpoint inspect checkpoints
      infinity checkpoint inspect checkpoints --tag global_step100 --tensors
      infinity checkpoint inspect checkpoints --json | jq .counters
    """
    found = _opened(source, tag)
    facts = _facts(found)
    if as_json:
        print_json({**facts, "tensors": [_tensor(each) for each in found.tensors]} if tensors else facts)
        return
    # Everything below is for people; programs got all of it as JSON above.
    rows = [
        ("checkpoint", str(found.folder)),
        *(
            (name.replace("_", " "), str(value))
            for name, value in facts["counters"].items()
            # Nested counters, of the data loader for example, are in --json only.
            if not isinstance(value, dict)
        ),
        ("parameters", f"{facts['num_parameters']:,} elements in {facts['num_parameter_tensors']} tensors"),
        ("bytes", format_bytes(facts["num_bytes"])),
        *(
            (f"  {kind}", f"{of['num_tensors']} tensors, {format_bytes(of['num_bytes'])}")
            for kind, of in facts["kinds"].items()
        ),
        ("added by the script", ", ".join(facts["client_state"]) or "nothing"),
    ]
    excluded = f"{len(facts['excluded'])} frozen parameters (exclude_frozen_parameters or frozen_dtype)"
    # Only what a checkpoint has.
    rare = [
        ("left out", facts["excluded"] and excluded),
        ("tied", ", ".join(f"{name} = {first}" for name, first in facts["tied"].items())),
        ("others beside it", ", ".join(facts["other_tags"])),
        ("cannot be told", facts["problem"]),
    ]
    print_facts([*rows, *((what, value) for what, value in rare if value)])
    if tensors:
        listed = table("group", "kind", "shape", "dtype", "name")
        for each in map(_tensor, found.tensors):
            shape = "x".join(map(str, each["shape"])) or "scalar"
            listed.add_row(each["group"], each["kind"], shape, each["dtype"], each["name"])
        display(listed)


def _facts(found: Checkpoint) -> dict[str, Any]:
    from infinity.checkpoint.manifest import MANIFEST
    from infinity.checkpoint.saved import WEIGHT

    kinds: dict[str, dict[str, int]] = defaultdict(lambda: {"num_tensors": 0, "num_bytes": 0})
    for each in found.tensors:
        # Weights of parameters, buffers, and one row per kind of optimizer state (exp_avg, ...).
        name = "buffers" if each.group == "buffers" else "weights" if each.kind == WEIGHT else each.kind
        kinds[name]["num_tensors"] += 1
        kinds[name]["num_bytes"] += each.num_bytes
    weights = found.of("parameters").values()
    counters, client_state, problem = {}, [], None
    try:
        training_state = found.training_state()
        counters, client_state = training_state["counters"], sorted(map(str, training_state["client_state"] or {}))
    # The training state is a file of its own. If it cannot be read, all else is shown without it.
    except CheckpointError as error:  # objects of classes that are not loaded unasked: the rest can be told
        problem = str(error)
    others = [path.parent.name for path in found.folder.parent.glob(f"*/{MANIFEST}") if path.parent != found.folder]
    return {
        "folder": str(found.folder.absolute()),
        "counters": counters,
        "num_parameters": sum(each.numel for each in weights),
        "num_parameter_tensors": len(weights),
        "num_bytes": sum(each.num_bytes for each in found.tensors),
        "kinds": dict(kinds),
        "client_state": client_state,
        "excluded": found.omitted.excluded,
        "tied": found.omitted.tied,
        "other_tags": sorted(others),
        "problem": problem,
    }


def _tensor(each: Any) -> dict[str, Any]:
    dtype = str(each.dtype).removeprefix("torch.")
    return {"group": each.group, "name": each.fqn, "kind": each.kind, "shape": list(each.shape), "dtype": dtype}


@checkpoint.command()
@_SOURCE
@_TAG
@click.option("--all", "takes_all", is_flag=True, help="Verify every checkpoint of the directory.")
@json_option
def verify(source: Path, tag: str | None, takes_all: bool, as_json: bool) -> int:
    """Read all of a checkpoint and compare every checksum. Exit status 1 if something is damaged.

    \b
    Examples:
      infinity checkpoint verify checkpoints
      infinity checkpoint verify checkpoints --all
    """
    from rich.text import Text

    from infinity.checkpoint.arrays import TENSORS
    from infinity.checkpoint.manifest import MANIFEST
    from infinity.checkpoint.saved import Checkpoint
    from infinity.console import Console

    if takes_all and tag is not None:
        raise click.UsageError("--all verifies every tag: leave out --tag or --all")
    # DIRECTORY/TAG/manifest, one folder per tag. A copy that was cut off may lack the manifest.
    names = (MANIFEST, TENSORS) if takes_all else ()
    all_of_them = sorted({path.parent for name in names for path in source.glob(f"*/{name}")})
    folders = all_of_them or [_opened(source, tag).folder]
    # The status line goes to stderr, so that `--json | jq` reads only JSON.
    console = Console(stderr=True)
    results: list[dict[str, Any]] = []
    for folder in folders:
        try:
            with console.status(Text(f"reading {folder}")):
                results.append({"folder": str(folder), "num_bytes": Checkpoint(folder).verify(), "problem": None})
        # One damaged checkpoint does not hide the others: all are read, and the exit status tells.
        except CheckpointError as error:
            results.append({"folder": str(folder), "num_bytes": None, "problem": str(error)})
    is_whole = all(each["problem"] is None for each in results)
    told = [each["problem"] or f"every checksum is right, {format_bytes(each['num_bytes'])}" for each in results]
    lines = (f"{each['folder']}: {words}" for each, words in zip(results, told, strict=True))
    print_result(as_json, {"is_whole": is_whole, "checkpoints": results}, *lines)
    return 0 if is_whole else 1


@checkpoint.command()
@_SOURCE
@_TAG
@json_option
def seal(source: Path, tag: str | None, as_json: bool) -> None:
    """Accept arrays that another program wrote with zarr.

    The arrays are in tensors.zarr, and may have any chunks and compression. This command computes their checksums: until
    then, the checkpoint counts as damaged. From then on zarr reads all of its arrays, which takes longer.

    \b
    Examples:
      infinity checkpoint seal checkpoints
      infinity checkpoint seal checkpoints --tag global_step100
    """
    from infinity.checkpoint.arrays import TENSORS
    from infinity.checkpoint.saved import find
    from infinity.checkpoint.saved import seal as seal_checkpoint

    # SOURCE may be the folder of one tag; `find` would look for tags inside it.
    folder = source if (source / TENSORS).is_dir() else find(source, tag)
    if folder is None:
        raise CheckpointError(source, "there is no checkpoint in it", cure="Give the directory that has tensors.zarr")
    found = seal_checkpoint(folder)
    facts = {"folder": str(folder.absolute()), "num_tensors": len(found.tensors)}
    print_result(as_json, facts, f"{folder}: {len(found.tensors)} tensors, all files have a checksum")


@click.command()
@_SOURCE
@click.argument("directory", metavar="DIR", type=PathType())
@_TAG
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    help="Dtype of floating-point parameters, rounded to nearest. Default: the fp32 main weights, unchanged.",
)
@click.option(
    "--config-from",
    type=PathType(),
    metavar="DIR",
    help="Directory of a Hugging Face model, whose config and tensor names are used.",
)
@click.option(
    "--max-shard-size",
    type=size_in_bytes,
    default="50GB",
    show_default=True,
    metavar="SIZE",
    help="Largest size of one file.",
)
@json_option
def export(
    source: Path,
    directory: Path,
    tag: str | None,
    dtype: str | None,
    config_from: Path | None,
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Write a checkpoint's weights to DIR as safetensors.

    Tensors are written one by one. With --config-from, DIR is what transformers' from_pretrained loads. DIR is made if
    it is missing.

    \b
    Examples:
      infinity checkpoint export checkpoints out --dtype bfloat16
      infinity checkpoint export checkpoints out --config-from original-model --max-shard-size 5GB
    """
    import torch

    from infinity.checkpoint.safetensors_export import export_checkpoint

    wanted: torch.dtype | None = getattr(torch, dtype) if dtype else None
    opened = _opened(source, tag)
    num_bytes = export_checkpoint(
        opened, directory, max_shard_size, dtype=wanted, config_from=config_from, shows_progress=True
    )
    if as_json:
        print_json({"directory": str(directory.absolute()), "num_bytes": num_bytes})
        return
    display(f"exported {num_bytes:,} bytes to {directory}", stderr=True, soft_wrap=True)


# The same command under two names: `infinity export` and `infinity checkpoint export`.
checkpoint.add_command(export)


@click.command()
@click.argument("source", type=PathType())
@click.argument("target", type=PathType(), required=False)
@click.option("--tag", help="Tag of the checkpoint in SOURCE. Default: the one that the file 'latest' names.")
@click.option(
    "--skip-unknown",
    is_flag=True,
    help="Leave out objects of the script whose classes are neither torch's nor DeepSpeed's.",
)
@json_option
def import_deepspeed(source: Path, target: Path | None, tag: str | None, skip_unknown: bool, as_json: bool) -> None:
    """Convert a DeepSpeed checkpoint (ZeRO stage 1 to 3, or universal) into one for engine.load_checkpoint.

    SOURCE is a directory that DeepSpeed's save_checkpoint wrote to, or one tag's. TARGET is made if it is missing; by
    default it is SOURCE with "-infinity" appended. DeepSpeed need not be installed, and no object in the source is run.
    It needs a few MB of memory besides the page cache.

    \b
    Examples:
      infinity import-deepspeed out/checkpoint-500
      infinity import-deepspeed out/checkpoint-500 ours
      infinity import-deepspeed out ours --tag global_step500 --json
    """
    from infinity.deepspeed.importer.conversion import convert

    if target is None:
        # `.` has no name to append to.
        whole = source.absolute()
        target = whole.with_name(f"{whole.name}-infinity")
    done = convert(source, target, tag=tag, skips_unknown=skip_unknown)
    facts = dict(vars(done))
    facts = {"deepspeed_version": facts.pop("version"), **facts}
    text = f"{done.num_tensors} tensors, {format_bytes(done.num_bytes)}, after {done.num_steps} steps"
    left_out = (f"left out: {what}" for what in done.left_out)
    print_result(as_json, facts, f"{done.folder}: {text} with DeepSpeed {done.version}", *left_out)
