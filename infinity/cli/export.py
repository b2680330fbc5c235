"""``python -m infinity export``: a checkpoint's weights as safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from infinity.checkpoint.saved import Checkpoint
from infinity.cli.checkpoint_export import CheckpointExport
from infinity.config.schema.quantities import parse_bytes

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="write a checkpoint's weights as safetensors, in bounded memory",
        description="Writes the weights of a checkpoint that engine.save_checkpoint made as safetensors, tensor by tensor. "
        "With --config-from, DIR is what transformers' from_pretrained loads.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="directory of checkpoints, or of one")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to; made if it is missing")
    parser.add_argument("--tag", help="which checkpoint; the newest by default")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of all floating-point parameters, rounded to nearest; by default as they are: fp32 main weights",
    )
    parser.add_argument(
        "--config-from",
        type=Path,
        metavar="DIR",
        help="a Hugging Face model's directory: its config and names are used",
    )
    parser.add_argument("--max-shard-size", type=_size, default="50GB", metavar="SIZE", help="of a file; default 50GB")
    parser.set_defaults(run=_run)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run(arguments: argparse.Namespace) -> None:
    export = CheckpointExport(
        Checkpoint.open(arguments.checkpoint, arguments.tag),
        arguments.directory,
        dtype=_DTYPES[arguments.dtype] if arguments.dtype else None,
        config_from=arguments.config_from,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("export", total=export.num_bytes)
        export.write(arguments.max_shard_size, lambda num_bytes: progress.advance(task, num_bytes))
    console.print(f"{export.num_bytes:,} bytes in {arguments.directory}", markup=False, highlight=False, soft_wrap=True)
