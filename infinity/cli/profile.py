"""``infinity profile``: what drives do under the engine's requests, beside fio, and the settings for it."""

from __future__ import annotations

from typing import Any

import click

from infinity.cli.checkpoint import SIZE
from infinity.cli.output import PathType, check_output, json_or_file_option
from infinity.io_profile.arguments import CHOICES, EXAMPLE, ask, count, list_of, positive, seconds, terabytes
from infinity.io_profile.grid import FULL, LEAST_PAIRS, QUICK, size_words


@click.command(
    epilog="""\b
Examples:
  infinity profile /mnt/nvme                                   # about two minutes
  infinity profile /mnt/nvme0 /mnt/nvme1 --quick --no-fio      # several drives, striped
  infinity profile /mnt/nvme --json io.json --png io.png --model 7B --tbw 600 --apply ds_config.json
  infinity profile /mnt/nvme --quick --json                    # results on stdout, all else on stderr"""
)
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=PathType())
@click.option("--quick", is_flag=True, help="Fewer and shorter samples: under a minute.")
@click.option("--no-fio", is_flag=True, help="Do not compare with fio.")
@click.option("--fio-huge-pages", is_flag=True, help="Give fio's buffers huge pages, which ours always have.")
@json_or_file_option
@click.option("--png", type=PathType(), metavar="FILE", help="Draw throughput over request size and depth.")
@click.option("--apply", type=PathType(), metavar="CONFIG", help="Write the settings into this config.")
@click.option(
    "--size",
    type=SIZE,
    help=f"Test file in each directory (default {size_words(FULL.file_bytes)}, quick {size_words(QUICK.file_bytes)}).",
)
@click.option("--seconds", type=seconds, help="Length of one sample, for the sweep and the comparison.")
@click.option("--repetitions", type=count, help=f"Rounds of the sweep (default {FULL.num_repetitions}).")
@click.option("--pairs", type=count, help=f"Pairs of the comparison with fio (default {LEAST_PAIRS}).")
@click.option("--request-sizes", type=list_of(SIZE), metavar="SIZES", help="E.g. 256KiB,1MiB,4MiB.")
@click.option("--in-flight", type=list_of(count), metavar="NUMBERS", help="Requests under way at once, e.g. 4,8,16,32.")
@click.option("--backends", type=list_of(click.Choice(CHOICES)), metavar="NAMES", help=f"Of {', '.join(CHOICES)}.")
@click.option(
    "--model", metavar="N", help=f"Parameters (7B, 374M) or the path of a Hugging Face config (default {EXAMPLE})."
)
@click.option(
    "--state-dtype",
    type=click.Choice(["fp32", "bf16", "int8"]),
    default="fp32",
    help="infinity.state_dtype for it.",
)
@click.option(
    "--tokens-per-second", type=positive, metavar="N", help="What your device computes with the model in memory."
)
@click.option(
    "--tbw", type=terabytes, metavar="TB", help="What one drive is rated to take in its life, e.g. 600 or 1.2PB."
)
def profile(**options: Any) -> int:
    """Measure what drives do under the engine's requests, beside fio, and give the settings for it.

    DIR is one directory on each drive. Ctrl-C ends it at any time, with a report of what was measured by then. The test
    files have no names, so that nothing is left in the directories, whatever ends the program. It writes for about a minute
    as fast as it can, and says how much.
    """
    from infinity.io_profile import program

    if options["png"] is not None:
        check_output(options["png"], "--png")
    return program.run(ask(**options))
