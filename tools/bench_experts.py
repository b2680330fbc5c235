#!/usr/bin/env python3
"""A mixture of experts with few tokens, paged expert by expert, against the same with all experts read: bytes and time.

    python tools/bench_experts.py --nvme-path /mnt/nvme --throttle 300
    python tools/bench_experts.py --tokens 1,2048 --throttle 300 --json experts.json
    python tools/bench_experts.py --throttle 300 --ways by_expert,deepspeed

Only norms train, in place of adapters; all weights are on the drive. All ways take turns in one process of a control group
that limits the drive (needs root; `--throttle none` measures the drive as it is). Bytes of routed experts and of all else are
counted from the routing itself, so that the bytes read can be compared with them. The way `deepspeed` is ZeRO-3 with the blocks
of experts as leaf modules; it needs an environment that has deepspeed as well.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench.cgroup import Cgroup, why_unavailable
from bench.options import describe_machine, size
from rich.table import Column, Table

import infinity
from infinity.cli.output import write_json
from infinity.console import Console

# Small dense parts, so that experts are nearly all of the model.
_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "use_cache": False,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Figures:
    """Of one way and one number of tokens, per step."""

    way: str
    tokens: int
    num_routed: float
    """Experts of a layer that a step goes to, on average."""
    read_bytes: int
    needed_bytes: int
    """Routed experts and all else, once forward and once backward."""
    seconds: float
    cpu_seconds: float
    """Of all threads: what is left of a step where the drive takes no time."""
    bound_seconds: float | None
    """What the drive takes for the bytes that were read; None where it is not limited."""


def build(options: argparse.Namespace) -> torch.nn.Module:
    """The model, of which only norms train."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **_SHAPE,
        hidden_size=options.width,
        head_dim=options.width // 8,
        moe_intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_experts=options.experts,
        num_experts_per_tok=options.active,
        max_position_embeddings=max(options.tokens),
    )
    model: torch.nn.Module = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        # Gradients still flow through all layers, as with adapters.
        parameter.requires_grad_("norm" in name)
    return model


def count_routing(model: torch.nn.Module) -> Counter[str]:
    """Return what is counted from now on: "bytes" of the experts that steps go to, their number, and "calls" of layers."""
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            # transformers 5 keeps the experts of a layer in two tensors of shape (num_experts, ...). One expert is index 0
            # of each, and an element of bf16 has 2 bytes.
            expert_bytes = sum(getattr(module, each)[0].numel() * 2 for each in ("gate_up_proj", "down_proj"))

            def count(_: torch.nn.Module, args: tuple[Any, ...], expert_bytes: int = expert_bytes) -> None:
                # The second argument of the module is the expert of each token: (tokens, experts per token).
                used = len(args[1].unique())
                counts.update(bytes=used * expert_bytes, experts=used, calls=1)

            module.register_forward_pre_hook(count)
    return counts


def read_bytes() -> int:
    """Bytes that this process has read from drives, also past the page cache."""
    return int(re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)[1])  # type: ignore[index]


def deepspeed_engine(model: torch.nn.Module, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine, which fetches a block of experts as a whole. It keeps as few parameters in memory as it can."""
    from bench.measured.deepspeed_peer import LAUNCHER, free_port

    os.environ |= LAUNCHER | {"MASTER_PORT": str(free_port())}
    import deepspeed

    deepspeed.utils.set_z3_leaf_modules(model, [type(model.get_submodule("model.layers.0.mlp"))])
    zero = config["zero_optimization"]
    zero["offload_param"] |= {
        "buffer_size": max(p.numel() for p in model.parameters()),
        "buffer_count": 6,
        "max_in_cpu": 0,
        "pin_memory": False,
    }
    # Nothing is fetched ahead: 0.19.8 fails where it does ("Not enough buffers").
    least = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    config["zero_optimization"] = zero | least | {"stage3_param_persistence_threshold": 0}
    config["aio"] = {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 2}
    return deepspeed.initialize(model=model, config=config)[0]


def measure(way: str, tokens: int, directory: Path, options: argparse.Namespace) -> Figures:
    """Train some steps, and return their figures."""
    drive = {"device": "nvme", "nvme_path": str(directory)}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # Updates need not wait for all gradients.
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": {"device": "cpu"}},
    }
    ours = {
        "experts": way,
        "host_memory_budget": options.budget if way == "by_expert" else options.budget_whole,
        # A model this small would stay in memory, and nothing would be read.
        "keep_in_memory": False,
        "progress_bars": False,
    }
    model = build(options)
    # Bytes in bf16 of everything that is no expert.
    dense = sum(p.numel() * 2 for name, p in model.named_parameters() if ".experts." not in name)
    routing = count_routing(model)
    generator = torch.Generator().manual_seed(1)
    seconds, cpu_seconds, read = [], [], []
    with contextlib.ExitStack() as stack:
        if way == "deepspeed":
            engine = deepspeed_engine(model, config)
        else:
            engine = stack.enter_context(infinity.initialize(model=model, config=config | {"infinity": ours})[0])
        for step in range(options.warm_up + options.steps):
            # The first steps record the prefetch schedule: they do not count.
            if step == options.warm_up:
                routing.clear()
            batch = torch.randint(_SHAPE["vocab_size"], (1, tokens), generator=generator)
            before = read_bytes()
            began, cpu_began = time.perf_counter(), time.process_time()
            engine.backward(engine(input_ids=batch).logits.float().logsumexp(-1).mean())
            engine.step()
            if step >= options.warm_up:
                seconds.append(time.perf_counter() - began)
                cpu_seconds.append(time.process_time() - cpu_began)
                read.append(read_bytes() - before)
    mean = round(statistics.mean(read))
    return Figures(
        way,
        tokens,
        routing["experts"] / routing["calls"],
        mean,
        # Once in forward and once in backward: each pass reads the weights.
        2 * (dense + routing["bytes"] // options.steps),
        statistics.median(seconds),
        statistics.median(cpu_seconds),
        None if options.throttle is None else mean / options.throttle,
    )


def cells(each: Figures) -> dict[str, str]:
    """What the table shows, by column."""
    bound = each.bound_seconds
    return {
        "tokens": str(each.tokens),
        "experts": each.way,
        "routed": f"{each.num_routed:.1f}",
        "read MB": f"{each.read_bytes / 1e6:.1f}",
        "needed MB": f"{each.needed_bytes / 1e6:.1f}",
        "ratio": f"{each.read_bytes / each.needed_bytes:.3f}",
        "seconds": f"{each.seconds:.3f}",
        "CPU": f"{each.cpu_seconds:.3f}",
        "bound": "" if not bound else f"{bound:.3f} ({each.seconds / bound:.2f})",
    }


def show(found: list[Figures]) -> None:
    """Print the table."""
    rows = [cells(each) for each in found]
    columns = (Column(name, justify="right") for name in next(iter(rows), {}))
    table = Table(*columns, title="a step", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
    for tokens in sorted({each.tokens for each in found}):
        by_way = {each.way: each for each in found if each.tokens == tokens}
        for way in by_way.keys() - {"by_expert"} if "by_expert" in by_way else ():
            factor = by_way[way].seconds / by_way["by_expert"].seconds
            sys.stdout.write(f"{tokens} tokens: by expert {factor:.2f} times as fast as {way}\n")


def main(arguments: list[str] | None = None) -> int:
    """Measure both ways with each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", type=Path, default=Path.cwd())
    parser.add_argument("--throttle", default="300", help="MB/s each way, or none")
    parser.add_argument("--tokens", type=lambda text: [int(each) for each in text.split(",")], default=[1])
    parser.add_argument(
        "--ways", type=lambda text: text.split(","), default=["by_expert", "whole"], help="by_expert, whole, deepspeed"
    )
    numbers = {"layers": 4, "experts": 64, "active": 8, "width": 1024, "inner": 512, "steps": 6, "warm-up": 3}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    # Each budget holds two layers: of 32 MiB with its routed experts alone, and of 200 MiB with all of them.
    parser.add_argument("--budget", type=size, default=size("64MiB"), help="of memory, expert by expert")
    parser.add_argument("--budget-whole", type=size, default=size("450MiB"), help="of memory, with all experts read")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--is-limited", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.throttle = None if options.throttle == "none" else int(float(options.throttle) * 1e6)
    if options.throttle is not None and (problem := why_unavailable("blkio")):
        parser.error(f"the drive cannot be limited here ({problem}): --throttle none")
    if options.throttle is not None and not options.is_limited:
        with Cgroup("experts", ("blkio",)) as group:
            group.throttle(options.nvme_path, options.throttle)
            # This program once more, in a process that is in the group from its first instruction.
            given = sys.argv[1:] if arguments is None else arguments
            return subprocess.call(group.command(sys.executable, __file__, *given, "--is-limited"))
    found = []
    with tempfile.TemporaryDirectory(dir=options.nvme_path) as directory:
        for tokens in options.tokens:
            found += [measure(way, tokens, Path(directory), options) for way in options.ways]
    show(found)
    if options.json is not None:
        machine, figures = describe_machine(options.nvme_path), [asdict(each) for each in found]
        write_json({"machine": machine, "figures": figures}, options.json)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
