#!/usr/bin/env python3
"""Trains a byte-level Llama whose parameters and optimizer state are stored on NVMe. Copy it to start your own.

    python tools/train.py                                                # small model, two cores, under 3 minutes
    python tools/train.py --model 1b --nvme-path /mnt/nvme --text book.txt --host-memory-budget 1GB

Top to bottom: command line, text, model, config, training loop, results. The loop is in `train`.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model comes from a config: nothing is downloaded
# Read once, when torch is imported. Threads that spin while they wait hold up each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if __name__ == "__main__":
    # Libraries turn a KeyboardInterrupt in their imports into an ImportError: until then Ctrl-C just ends the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.console import Console
from infinity.reporting.live import watch
from infinity.reporting.page import run_report
from swapper import SwapperError

console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
INTERRUPTED = "interrupted"
WARMUP_SHARE = 0.1
"""Of all steps: the learning rate rises until then, without which large models diverge."""


# ---------------------------------------------------------------------------------------------------- command line


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


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Every option that has no default here takes it from the config or from the model's size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=SIZES, default="demo", help="size of the model (default: demo)")
    add("--text", type=Path, help="file to train on (default: the sources of Python's standard library)")
    add("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    add("--batch-size", type=int, help="sequences per micro-batch")
    add("--seq-len", type=int, help="bytes per sequence")
    add("--gradient-accumulation-steps", type=int, help="micro-batches per optimizer step")
    add("--lr", type=float, help="learning rate, after warm-up")
    add("--clip", type=float, help="largest global norm of the gradients, 0 is off")
    kinds = ["none", "reentrant", "non-reentrant"]
    add("--checkpointing", choices=kinds, default="non-reentrant", help="of activations (default: non-reentrant)")
    add("--config", type=Path, help="DeepSpeed-style JSON (default: that of configs/zero3_nvme.json)")
    add("--nvme-path", help="directory on the drive that holds the states (default: as in the config)")
    add("--host-memory-budget", help='hard ceiling of the engine\'s host memory, e.g. "2GB"')
    add("--log", type=Path, default=Path("train"), help="directory for the log and a page with charts (default: train)")
    add("--seed", type=int, default=0)
    found = parser.parse_args(arguments)
    for name in ("steps", "batch_size", "seq_len", "gradient_accumulation_steps"):
        value = getattr(found, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for name in ("text", "config"):
        path = getattr(found, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name} {path}: no such file; give one that exists")
    return found


# ------------------------------------------------------------------------------------------------------------ text


def read_text(path: Path | None, max_bytes: int = 8_000_000) -> torch.Tensor:
    """The training text as one tensor of bytes: a file, or as much of the standard library's sources as is useful."""
    if path is not None:
        data = bytearray(path.read_bytes())
    else:
        data = bytearray()
        for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            is_other = {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(source.parts)
            data += b"" if is_other or len(data) > max_bytes else source.read_bytes()
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")


class RandomWindows(Dataset[dict[str, torch.Tensor]]):
    """`num_samples` windows of the text, each at a place drawn from a generator of its own."""

    def __init__(self, text: torch.Tensor, seq_len: int, num_samples: int, seed: int) -> None:
        if len(text) <= seq_len:
            problem = f"the text has {len(text)} bytes: too short for sequences of {seq_len}. Lower --seq-len"
            raise infinity.InfinityError(problem)
        generator = torch.Generator(device="cpu").manual_seed(seed)
        self._starts = torch.randint(
            0, len(text) - seq_len, (num_samples,), generator=generator, dtype=torch.int64, device="cpu"
        ).tolist()
        self._text, self._seq_len = text, seq_len

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self._starts[index]
        tokens = self._text[start : start + self._seq_len].long()
        return {"input_ids": tokens, "labels": tokens}


# ----------------------------------------------------------------------------------------------------------- model


def build_model(size: Size, seq_len: int, dtype: torch.dtype, checkpointing: str) -> LlamaForCausalLM:
    """A Llama with random weights, built directly in the dtype it trains in: no fp32 copy of it ever exists."""
    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.num_layers,
        intermediate_size=size.intermediate,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=max(2048, seq_len),
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    torch.set_default_dtype(dtype)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if checkpointing != "none":
        # transformers 5.23 renamed it
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": checkpointing == "reentrant"})
    return model


# ---------------------------------------------------------------------------------------------------------- config


def make_config(arguments: argparse.Namespace, size: Size) -> infinity.InfinityConfig:
    """The JSON config with what the command line changes in it; the default one also takes what suits the size."""
    changes = {
        "train_micro_batch_size_per_gpu": arguments.batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "gradient_clipping": arguments.clip,
        "optimizer.params.lr": arguments.lr,
        "infinity.host_memory_budget": arguments.host_memory_budget,
        "infinity.run_log": str(arguments.log),
        "zero_optimization.offload_param.nvme_path": arguments.nvme_path,
        "zero_optimization.offload_optimizer.nvme_path": arguments.nvme_path,
    }
    chosen = {key: value for key, value in changes.items() if value is not None}
    if arguments.config is not None:
        return infinity.load_config(arguments.config, overrides=chosen)
    suitable = {
        "train_micro_batch_size_per_gpu": size.batch_size,
        "optimizer.params.lr": size.learning_rate,
        "infinity.host_memory_budget": size.budget,
    }
    return infinity.load_config("zero3_nvme", overrides=suitable | chosen)


def warm_up(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """The learning rate rises in a straight line, and then stays."""
    num_warm = math.ceil(WARMUP_SHARE * num_steps)
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / num_warm))


# ---------------------------------------------------------------------------------------------------- training loop


class Status:
    """The line under the bar. It is drawn anew ten times a second, so it shows what the step waits for right now."""

    def __init__(self, engine: infinity.Engine) -> None:
        self._engine = engine

    def __rich__(self) -> Text:
        waiting_for = self._engine.waiting_for
        return Text.assemble(self.figures(), (f"  waiting for {waiting_for}" if waiting_for else "", "yellow"))

    def figures(self) -> str:
        """Figures of the last step."""
        report = self._engine.report
        if report is None:
            return "first step: the order of the layers is being recorded"
        read, written = (num_bytes / report.seconds / 1e9 for num_bytes in (report.read_bytes, report.write_bytes))
        speed = f"{report.tokens_per_second or 0:,.0f} tokens/s"
        return f"loss {report.loss:.3f}  {speed}  NVMe GB/s: {read:.2f} read {written:.2f} written"


def train(engine: infinity.Engine, loader: Any, num_steps: int) -> str | None:
    """Runs the steps. Returns None, or why it ended early; the log of the run has what was done in any case."""
    columns = TextColumn("training"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    bar = Progress(*columns, expand=True)
    task = bar.add_task("", total=num_steps)
    status, num_done = Status(engine), 0
    try:
        with Live(Group(bar, status), console=console, refresh_per_second=10, transient=True):
            for batch in loader:
                batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                if engine.global_steps == num_done or engine.report is None:
                    continue  # a micro-batch in the middle of a step
                num_done = engine.global_steps
                if not math.isfinite(engine.report.loss or 0.0):
                    return f"the loss of step {num_done} is {engine.report.loss}; try a lower --lr"
                bar.advance(task)
                if not console.is_terminal and num_done % math.ceil(num_steps / 10) == 0:
                    console.print(f"step {num_done}/{num_steps}  {status.figures()}")
    except KeyboardInterrupt:
        return INTERRUPTED
    except (infinity.InfinityError, SwapperError) as error:  # a loss that is not a number, a drive that fails
        return f"{type(error).__name__}: {error}"
    return None


# ---------------------------------------------------------------------------------------------------------- results


def show(log: Path) -> None:
    """What the log of the run shows, as ``infinity watch`` and ``infinity report`` do."""
    watch(log, console, once=True)
    try:
        console.print(f"Page with charts: {run_report(log)}", soft_wrap=True)
    except (infinity.InfinityError, OSError) as error:  # matplotlib is not installed, the disk is full
        console.print(f"No page with charts: {error}", soft_wrap=True, markup=False)


def main(given: Sequence[str] | None = None) -> int:
    """Sets up, trains, prints. Returns the exit code: 0, 1 if training failed or ended early, 130 if Ctrl-C ended it."""
    arguments = parse_arguments(sys.argv[1:] if given is None else given)
    try:
        return run(arguments)
    except (infinity.InfinityError, SwapperError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def run(arguments: argparse.Namespace) -> int:
    """See `main`."""
    size = SIZES[arguments.model]
    seq_len = arguments.seq_len or size.seq_len
    torch.manual_seed(arguments.seed)
    text = read_text(arguments.text)
    began = time.perf_counter()
    config = make_config(arguments, size)
    samples_per_step = (config.train_micro_batch_size_per_gpu or 1) * config.gradient_accumulation_steps
    dataset = RandomWindows(text, seq_len, arguments.steps * samples_per_step, arguments.seed)
    model = build_model(size, seq_len, config.compute_dtype, arguments.checkpointing)
    schedule = None if config.scheduler else lambda optimizer: warm_up(optimizer, arguments.steps)
    engine, _, loader, _ = infinity.initialize(model=model, config=config, training_data=dataset, lr_scheduler=schedule)
    try:
        with engine:
            console.print(str(engine.plan), soft_wrap=True)
            console.print(f"Model built and written in {time.perf_counter() - began:.1f} s.")
            problem = train(engine, loader, arguments.steps)
            if problem:
                told = f"Ended after {engine.global_steps} of {arguments.steps} steps: {problem}"
                console.print(told, markup=False, soft_wrap=True)
    finally:
        show(arguments.log)
    return {None: 0, INTERRUPTED: 130}.get(problem, 1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
