"""``infinity import-deepspeed SOURCE [TARGET]``: convert a checkpoint of DeepSpeed to one of ours."""

from __future__ import annotations

from pathlib import Path

import click

from infinity.cli.output import PathType, display, json_option, print_json
from infinity.errors import format_bytes


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
    It needs a few MiB of memory besides the page cache.

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
    if as_json:
        facts = dict(vars(done))
        print_json({"deepspeed_version": facts.pop("version"), **facts})
        return
    text = f"{done.num_tensors} tensors, {format_bytes(done.num_bytes)}, after {done.num_steps} steps"
    display(f"{done.folder}: {text} with DeepSpeed {done.version}", soft_wrap=True)
    for what in done.left_out:
        display(f"left out: {what}", soft_wrap=True)
