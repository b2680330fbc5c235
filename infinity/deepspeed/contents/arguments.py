"""The command line arguments that scripts for DeepSpeed have."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag for the script) and ``--deepspeed_config`` (a path, see `infinity.initialize`)."""
    group = parser.add_argument_group("DeepSpeed", "the config of infinity-offload, in DeepSpeed's format")
    group.add_argument("--deepspeed", default=False, action="store_true", help="a flag for the script's own use")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of a JSON config")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
