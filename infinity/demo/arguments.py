"""The demo trainer's command line and the sizes of its models. Imports no library: `--help` answers at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = """Trains a byte-level Llama whose parameters and optimizer state are on NVMe.

    infinity train                                                # small model, two cores, under 3 minutes
    infinity train --model 1b --nvme-path /mnt/nvme --text book.txt --host-memory-budget 1GB
"""
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Size:
    """A model, and defaults that suit it: what one step reads, and how much host memory the engine may use."""

    hidden: int
    num_layers: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int = 256  # one token per byte
    seq_len: int = 256
    batch_size: int = 4
    learning_rate: float = 3e-4
    budget: str = "1GB"


# Learning rates fall with the width, as in GPT-3's table, and lower: the batches here are small.
SIZES = {
    "tiny": Size(64, 4, 176, 4, 4, seq_len=64, learning_rate=3e-3, budget="8MB"),
    "demo": Size(384, 16, 1056, 6, 6, seq_len=128, learning_rate=1e-3, budget="32MB"),
    "100m": Size(768, 14, 2048, 12, 12, learning_rate=6e-4, budget="128MB"),
    "374m": Size(1024, 24, 2816, 16, 16, vocabulary=32000, batch_size=1, budget="384MB"),  # as in bench_step.py
    "1b": Size(2048, 20, 5632, 32, 32, seq_len=512, learning_rate=1e-4, budget="1GB"),
    "3b": Size(3072, 28, 8192, 24, 8, seq_len=1024, learning_rate=8e-5, budget="2GB"),
    "7b": Size(4096, 32, 14336, 32, 8, seq_len=1024, learning_rate=6e-5, budget="4GB"),
    "13b": Size(5120, 40, 13824, 40, 40, seq_len=2048, learning_rate=5e-5, budget="6GB"),
}


def parse_arguments(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Every option that has no default here takes it from the config or from the model's size."""
    parser = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=SIZES, default="demo", help="size of the model (default: demo)")
    add("--text", type=Path, help="file to train on (default: the sources of Python's standard library)")
    add("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    add("--batch-size", type=int, help="sequences per micro-batch")
    add("--seq-len", type=int, help="bytes per sequence")
    add("--gradient-accumulation-steps", type=int, help="micro-batches per optimizer step")
    add("--lr", type=float, help="learning rate, after warm-up")
    add("--warmup-steps", type=int, help="steps in which it rises; 0 is off (default: a tenth of all)")
    add("--clip", type=float, help="largest global norm of the gradients, 0 is off")
    kinds = ["none", "reentrant", "non-reentrant"]
    add("--checkpointing", choices=kinds, default="non-reentrant", help="of activations (default: non-reentrant)")
    add("--config", type=Path, help="DeepSpeed-style JSON (default: that of configs/zero3_nvme.json)")
    add("--nvme-path", help="directory on the drive that holds the states (default: as in the config)")
    add("--host-memory-budget", help='hard ceiling of the engine\'s host memory, e.g. "2GB"')
    add(
        "--plot",
        type=Path,
        default=Path("train.png"),
        help="where the loss curve and the breakdown go (default: train.png)",
    )
    add("--state-dtype", choices=["fp32", "bf16", "int8"], help="infinity.state_dtype: smaller optimizer states")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print one JSON object at the end, and all else to stderr")
    found = parser.parse_args(arguments)
    for name in ("steps", "batch_size", "seq_len", "gradient_accumulation_steps"):
        value = getattr(found, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for name in ("text", "config"):
        path = getattr(found, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name} {path}: no such file; give one that exists")
    if found.plot.suffix.lower() not in PICTURES:
        parser.error(f"--plot {found.plot}: name a file that ends in {', '.join(PICTURES)}")
    folder = found.plot.absolute().parent
    if not folder.is_dir():
        parser.error(f"--plot {found.plot}: there is no directory {folder}; make it first")
    if not os.access(found.plot if found.plot.exists() else folder, os.W_OK) or found.plot.is_dir():
        parser.error(f"--plot {found.plot}: it cannot be written; name another file")
    return found
