"""Loads, packs, trains and exports a model in less memory than its weights need. Run in a process of its own."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import torch
import transformers

import infinity
from tests.internals import MemoryGroup, main
from tests.little_memory import Peak, config_on, load_libraries, settled_bytes

_BUDGET_BYTES = 160 << 20
_SLACK_BYTES = 88 << 20
"""Beyond the budget, where there is an engine; in all, where there is none."""
_UNSEEN_BYTES = 8 << 20
"""What the kernel counts to the group besides memory of the process: page tables, and pages of files that it is reading."""

_M_MMAP_THRESHOLD = -3  # <malloc.h>


def run(group: str, directory: str, what: str) -> None:
    """Print a line of JSON in the end, if the kernel has let it come that far.

    Args:
        group: directory of the memory control group that this process is in.
        directory: on a drive, with weights in it.
        what: to "load" them (cast and merged, and looked at), to let transformers do so "as DeepSpeed", to "train" and save
            the model, or to "export" a checkpoint.
    """
    torch.set_num_threads(1)
    load_libraries()
    transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    )
    config = config_on(directory, host_memory_budget=_BUDGET_BYTES, keep_in_memory=False)
    weights = Path(directory) / "weights"
    if what == "export":
        with _engine(weights, config) as engine:
            engine.save_checkpoint(Path(directory) / "checkpoints")
    limit = settled_bytes() + _SLACK_BYTES + (_BUDGET_BYTES if what == "train" else 0)
    MemoryGroup(Path(group)).limit(limit)
    out = Path(directory) / "out"
    if what == "load":
        model = infinity.load_pretrained(transformers.MixtralForCausalLM, weights, config=config, dtype=torch.bfloat16)
        total = sum(float(parameter.sum()) for parameter in model.parameters())
        if total != total:
            raise RuntimeError("the weights are no numbers")
    elif what == "as DeepSpeed":
        from transformers.integrations import HfDeepSpeedConfig

        ctypes.CDLL(None).mallopt(
            _M_MMAP_THRESHOLD, 1 << 20
        )  # as merged experts of a large model, these go back at once
        kept = HfDeepSpeedConfig(config)
        model = transformers.MixtralForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
        total = sum(float(parameter.sum()) for parameter in model.parameters())
        if total != total or not kept.is_zero3():
            raise RuntimeError("the weights are no numbers")
    elif what == "train":
        with _engine(weights, config) as engine:
            engine.save_pretrained(out)
            engine.save_fp32_model(out)
    else:
        places = ["export", f"{directory}/checkpoints", str(out), "--config-from", str(weights)]
        if main([*places, "--max-shard-size", "100MB"]):
            raise RuntimeError("the export has failed")
    weights_bytes = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
    print(json.dumps({"weights_bytes": weights_bytes, "slack_bytes": _SLACK_BYTES}))


def _engine(weights: Path, config: dict[str, Any]) -> Any:
    model = infinity.load_pretrained(transformers.MixtralForCausalLM, weights, config=config, dtype=torch.bfloat16)
    return infinity.initialize(model=model.train(), config=config)[0]


def pack(group: str, directory: str, budget_bytes: int) -> None:
    """Print a line of JSON: what a frozen base takes, and the most memory while it was loaded, packed and got adapters.

    Args:
        group: directory of the memory control group that this process is in.
        directory: on a drive, with a base in it.
        budget_bytes: of the engine.
    """
    torch.set_num_threads(1)
    load_libraries()
    config = config_on(directory, host_memory_budget=budget_bytes, frozen_dtype="nf4")
    small = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
    transformers.LlamaForCausalLM(small).save_pretrained(Path(directory) / "small")
    _with_adapters(Path(directory) / "small", config)[0].close()  # imports and compiles what is wanted late
    before = settled_bytes()
    MemoryGroup(Path(group)).limit(before + budget_bytes + _UNSEEN_BYTES)
    peak = Peak()
    peak.start()
    engine, base_bytes = _with_adapters(Path(directory) / "base", config)
    peak_bytes = peak.end() - before
    engine.close()
    print(json.dumps({"base_bytes": base_bytes, "peak_bytes": peak_bytes}))


def _with_adapters(base: Path, config: dict[str, Any]) -> tuple[Any, int]:
    """An engine, and bytes of the base in its files' dtype."""
    import peft

    model = infinity.load_pretrained(transformers.LlamaForCausalLM, base, config=config)
    base_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return infinity.initialize(model=adapted, config=config)[0], base_bytes
