#!/usr/bin/env python3
"""Trains a byte-level Llama whose parameters and optimizer state are stored on NVMe. Copy it to start your own.

    python tools/train.py                                                # small model, two cores, under 3 minutes
    python tools/train.py --model 1b --nvme-path /mnt/nvme --text book.txt --host-memory-budget 1GB

Top to bottom: command line, text, model, config, training loop, results. The loop is in `train`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from rich.table import Table
from rich.text import Text
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.console import Console
from swapper import SwapperError

# 100 characters in a file or a pipe, which have no width of their own.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
INTERRUPTED = "interrupted"
WARMUP_SHARE = 0.1
"""Of all steps: the learning rate rises until then, without which large models diverge."""
# What matplotlib can write.
PICTURES = (".png", ".svg", ".pdf")


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
    add("--plot", type=Path, default=Path("train.png"), help="of loss and times, a picture (default: train.png)")
    add("--run-log", type=Path, help="directory for the log that `infinity watch` and `infinity report` show")
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
    if found.plot.suffix.lower() not in PICTURES:
        parser.error(f"--plot {found.plot}: name a file that ends in {', '.join(PICTURES)}")
    folder = found.plot.absolute().parent
    if not folder.is_dir():
        parser.error(f"--plot {found.plot}: there is no directory {folder}; make it first")
    # Checked now: the picture is written at the end of the training.
    if not os.access(found.plot if found.plot.exists() else folder, os.W_OK) or found.plot.is_dir():
        parser.error(f"--plot {found.plot}: it cannot be written; name another file")
    return found


# ------------------------------------------------------------------------------------------------------------ text


def read_text(path: Path | None, max_bytes: int = 8_000_000) -> torch.Tensor:
    """Return the training text as one tensor of bytes: a file, or sources of the standard library."""
    if path is not None:
        data = bytearray(path.read_bytes())
    else:
        data = bytearray()
        for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            is_other = {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(source.parts)
            # Bytes of a file are its tokens, so no tokenizer is needed.
            data += b"" if is_other or len(data) > max_bytes else source.read_bytes()
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")


class RandomWindows(Dataset[dict[str, torch.Tensor]]):
    """`num_samples` windows of the text, each at a place drawn from a generator of its own."""

    def __init__(self, text: torch.Tensor, seq_len: int, num_samples: int, seed: int) -> None:
        if len(text) <= seq_len:
            problem = f"the text has {len(text)} bytes: too short for sequences of {seq_len}. Lower --seq-len"
            raise infinity.InfinityError(problem)
        # A generator of its own: the windows do not depend on how many random numbers the model took.
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
        # Every byte is text: there are no special tokens.
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    # The constructor then makes bf16 weights at once.
    torch.set_default_dtype(dtype)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if checkpointing != "none":
        # transformers 5.23 renamed it
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": checkpointing == "reentrant"})
    return model


# ---------------------------------------------------------------------------------------------------------- config


def make_config(
    arguments: argparse.Namespace, size: Size, more: dict[str, Any] | None = None
) -> infinity.InfinityConfig:
    """The JSON config with what the command line changes in it, and ``more``; the default one suits the size as well."""
    changes = {
        "train_micro_batch_size_per_gpu": arguments.batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "gradient_clipping": arguments.clip,
        "optimizer.params.lr": arguments.lr,
        "infinity.host_memory_budget": arguments.host_memory_budget,
        "infinity.run_log": None if arguments.run_log is None else str(arguments.run_log),
        "zero_optimization.offload_param.nvme_path": arguments.nvme_path,
        "zero_optimization.offload_optimizer.nvme_path": arguments.nvme_path,
    }
    chosen = {key: value for key, value in changes.items() if value is not None} | (more or {})
    if arguments.config is not None:
        return infinity.load_config(arguments.config, overrides=chosen)
    # A config of your own is taken as it is, but for options that were given.
    suitable = {
        "train_micro_batch_size_per_gpu": size.batch_size,
        "optimizer.params.lr": size.learning_rate,
        "infinity.host_memory_budget": size.budget,
    }
    return infinity.load_config("zero3_nvme", overrides=suitable | chosen)


def make_engine(
    arguments: argparse.Namespace, text: torch.Tensor, *, on_drive: bool = False
) -> tuple[infinity.Engine, Any, int]:
    """An engine, the loader of its batches, and the tokens of a step. ``on_drive``: weights go there as they are made."""
    size = SIZES[arguments.model]
    seq_len = arguments.seq_len or size.seq_len
    torch.manual_seed(arguments.seed)
    config = make_config(arguments, size)
    samples_per_step = (config.train_micro_batch_size_per_gpu or 1) * config.gradient_accumulation_steps
    dataset = RandomWindows(text, seq_len, arguments.steps * samples_per_step, arguments.seed)
    with infinity.Init(config_dict_or_path=config) if on_drive else contextlib.nullcontext():
        model = build_model(size, seq_len, config.compute_dtype, arguments.checkpointing)
    # A function, because the engine makes the optimizer of the config first.
    schedule = None if config.scheduler else lambda optimizer: warm_up(optimizer, arguments.steps)
    engine, _, loader, _ = infinity.initialize(model=model, config=config, training_data=dataset, lr_scheduler=schedule)
    return engine, loader, samples_per_step * seq_len


def warm_up(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """Return a schedule that rises in a straight line, and then stays."""
    num_warm = math.ceil(WARMUP_SHARE * num_steps)
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / num_warm))


# ---------------------------------------------------------------------------------------------------- training loop


@dataclass
class History:
    """Reports of the steps so far, for the table and the picture."""

    tokens_per_step: int
    reports: list[infinity.StepReport] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step."""
        return [math.nan if report.loss is None else report.loss for report in self.reports]

    def total(self, name: str) -> float:
        """Sum of one figure of the step reports."""
        return float(sum(getattr(report, name) for report in self.reports))


class Status:
    """The line under the bar. It is drawn anew ten times a second, so it shows what the step waits for right now."""

    def __init__(self, engine: infinity.Engine, history: History) -> None:
        self._engine, self._history = engine, history

    def __rich__(self) -> Text:
        waiting_for = self._engine.waiting_for
        return Text.assemble(self.figures(), (f"  waiting for {waiting_for}" if waiting_for else "", "yellow"))

    def figures(self) -> str:
        """Figures of the last step."""
        if not self._history.reports:
            return "first step: the order of the layers is being recorded"
        report = self._history.reports[-1]
        speed = self._history.tokens_per_step / report.seconds
        read, written = (num_bytes / report.seconds / 1e9 for num_bytes in (report.read_bytes, report.write_bytes))
        return f"loss {report.loss:.3f}  {speed:,.0f} tokens/s  NVMe GB/s: {read:.2f} read {written:.2f} written"


def train(engine: infinity.Engine, loader: Any, num_steps: int, history: History) -> str | None:
    """Runs the steps. Returns None, or why it ended early; `history` holds what was done in any case."""
    columns = TextColumn("training"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    bar = Progress(*columns, expand=True)
    task = bar.add_task("", total=num_steps)
    status = Status(engine, history)
    try:
        with Live(Group(bar, status), console=console, refresh_per_second=10, transient=True):
            for batch in loader:
                # transformers computes the loss itself if it is given labels.
                batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                # `engine.step()` counts micro-batches, and updates at the last one only.
                if engine.global_steps == len(history.reports):
                    continue  # a micro-batch in the middle of a step
                if (report := engine.report) is not None:
                    history.reports.append(report)
                if not math.isfinite(history.losses[-1]):
                    return f"the loss of step {engine.global_steps} is {history.losses[-1]}; try a lower --lr"
                bar.advance(task)
                # Ten lines in a log file, in place of the bar.
                if not console.is_terminal and engine.global_steps % math.ceil(num_steps / 10) == 0:
                    console.print(f"step {engine.global_steps}/{num_steps}  {status.figures()}")
    except KeyboardInterrupt:
        return INTERRUPTED
    except (infinity.InfinityError, SwapperError) as error:  # a loss that is not a number, a drive that fails
        return f"{type(error).__name__}: {error}"
    return None


# ---------------------------------------------------------------------------------------------------------- results


def resident_bytes(name: str) -> int:
    """`VmRSS` (now) or `VmHWM` (largest so far) of this process, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            # The kernel writes kB, and means KiB.
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True)
class Memory:
    """Host memory at its peak while training, in bytes."""

    process: int
    """All of it."""
    libraries: int
    """Before there was a model: Python, torch, libraries, the text."""
    engine: int
    """The engine's buffers: this is what the budget limits."""

    @property
    def rest(self) -> int:
        """Activations, autograd's temporaries, and what libraries took later."""
        return max(0, self.process - self.libraries - self.engine)


def reset_high_water() -> None:
    """Starts `VmHWM` again, so that the peak of training is not hidden behind that of building the model."""
    with contextlib.suppress(OSError):  # not every kernel has it
        # 5 sets VmHWM to the present size, see proc(5).
        Path("/proc/self/clear_refs").write_text("5")


def results_table(engine: infinity.Engine, history: History, memory: Memory) -> Table:
    """Return the table that is printed at the end."""
    plan, num_steps = engine.plan, len(history.reports)
    num_parameters, seconds = plan.num_parameters, history.total("seconds")
    states = plan.states_bytes
    table = Table(title=f"{num_parameters / 1e6:,.1f}M parameters, {num_steps} steps", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")

    few = min(5, max(1, num_steps // 2))
    first, last = statistics.fmean(history.losses[:few]), statistics.fmean(history.losses[-few:])
    table.add_row(f"loss, mean of the first and last {few} steps", f"{first:.3f}  ->  {last:.3f}")
    table.add_row("tokens per second", f"{num_steps * history.tokens_per_step / seconds:,.0f}")
    table.add_section()
    states_bytes = sum(states.values())
    table.add_row("weights and optimizer state", f"{states_bytes / 1e6:,.0f} MB")
    table.add_row("  of them on NVMe", f"{states['nvme'] / 1e6:,.0f} MB")
    percent = 100 * plan.host_budget_bytes / states_bytes
    table.add_row("engine: host memory budget", f"{plan.host_budget_bytes / 1e6:,.0f} MB  ({percent:.0f} % of them)")
    table.add_row("engine: peak of its buffers, measured", f"{memory.engine / 1e6:,.1f} MB")
    table.add_row("beside it: Python, torch, libraries", f"{memory.libraries / 1e6:,.0f} MB")
    table.add_row("beside it: activations and the rest", f"{memory.rest / 1e6:,.0f} MB")
    if torch.cuda.is_available():
        table.add_row("peak device memory", f"{torch.cuda.max_memory_allocated() / 1e6:,.0f} MB")
    table.add_section()
    for word, measured, predicted in (
        ("read", "read_bytes", plan.predicted_read_bytes_per_step),
        ("written", "write_bytes", plan.predicted_write_bytes_per_step),
    ):
        # The median: what the last step leaves to be written behind it is in no report.
        per_step = statistics.median(getattr(report, measured) for report in history.reports) / num_parameters
        table.add_row(
            f"bytes {word} per parameter, step", f"{per_step:.2f}  (predicted {predicted / num_parameters:.2f})"
        )
    table.add_section()
    table.add_row("time per step", f"{seconds / num_steps:.2f} s")
    for label, name in BREAKDOWN:
        spent = history.total(name)
        table.add_row(f"  {label}", f"{spent / num_steps:.2f} s  {100 * spent / seconds:3.0f} %")
    optimizer_seconds = history.total("optimizer_seconds") / num_steps
    table.add_row("optimizer, mostly behind the compute", f"{optimizer_seconds:.2f} s")
    return table


BREAKDOWN = (
    ("compute", "compute_seconds"),
    ("waiting for reads", "read_wait_seconds"),
    ("waiting for updates", "update_wait_seconds"),
)


def draw(history: History, memory: Memory, budget_bytes: int, path: Path) -> None:
    """The loss curve, where the time of each step went, and the engine's memory under its budget."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        console.print("No picture: matplotlib is not installed (pip install 'infinity-offload[plot]').")
        return
    steps = range(1, len(history.losses) + 1)
    figure = Figure(figsize=(9, 9), layout="tight")
    above, below, lowest = figure.subplots(3, 1, height_ratios=(3, 2, 1.5), sharex=True)
    above.plot(steps, history.losses, color="#1f4e79", linewidth=1.8)
    above.set(ylabel="loss (nats per byte)", title="Loss")
    parts = [[getattr(report, name) for report in history.reports] for _, name in BREAKDOWN]
    spent = [sum(part) for part in zip(*parts, strict=True)]
    rest = [max(0.0, report.seconds - used) for report, used in zip(history.reports, spent, strict=True)]
    labels = [*(label for label, _ in BREAKDOWN), "other"]
    below.stackplot(steps, *parts, rest, labels=labels, colors=["#4c9f70", "#e0a030", "#c8553d", "#c9c9c9"], step="mid")
    below.set(ylabel="seconds per step", title="Where the time of a step goes", ylim=(0, None))
    below.legend(loc="upper right", ncols=4, fontsize="small")
    lowest.axhline(budget_bytes / 1e6, color="#c8553d", linestyle="--", label="host_memory_budget")
    buffers = [report.buffers_peak_bytes / 1e6 for report in history.reports]
    lowest.plot(steps, buffers, color="#1f4e79", linewidth=1.8, label="the engine's buffers, peak of the step")
    beside = f"Python, torch and libraries take {memory.libraries / 1e6:,.0f} MB beside it"
    lowest.set(ylabel="MB", xlabel="step", title=f"Host memory of the engine ({beside})", ylim=(0, None))
    lowest.legend(loc="lower right", ncols=2, fontsize="small")
    for axes in (above, below, lowest):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:  # what was measured is told all the same
        console.print(f"No picture: {path}: {error.strerror or error}.", soft_wrap=True)
        return
    console.print(f"Loss curve and times: {path}")


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
    text = read_text(arguments.text)
    # With all imports and the text, before the model.
    baseline_bytes = resident_bytes("VmRSS")
    began = time.perf_counter()
    engine, loader, tokens_per_step = make_engine(arguments, text)
    with engine:
        console.print(str(engine.plan), soft_wrap=True)
        console.print(f"Model built and written in {time.perf_counter() - began:.1f} s.")
        reset_high_water()
        history = History(tokens_per_step)
        problem = train(engine, loader, arguments.steps, history)
        if history.reports:
            engine_bytes = max(report.buffers_peak_bytes for report in history.reports)
            memory = Memory(resident_bytes("VmHWM"), baseline_bytes, engine_bytes)
            console.print(results_table(engine, history, memory))
            draw(history, memory, engine.plan.host_budget_bytes, arguments.plot)
        if problem:
            told = f"Ended after {len(history.reports)} of {arguments.steps} steps: {problem}"
            console.print(told, markup=False, soft_wrap=True)
    # 130 is what a shell shows after Ctrl-C.
    return {None: 0, INTERRUPTED: 130}.get(problem, 1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
