"""Host memory is a budget: trainings, loads, exports and saves live in a memory control group of that size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.libraries_in_little_memory import LIBRARIES

_MIB = 1 << 20
_Run = Callable[..., list[dict[str, Any]]]
pytestmark = [pytest.mark.root, pytest.mark.deep]


@pytest.mark.parametrize(
    ("update", "schedule", "slack_bytes", "changes"),
    [
        # Slack: what the C library's heap keeps of freed temporaries until it is trimmed, and the kernel's own pages.
        ("in_backward", "ordinary", 64 * _MIB, {}),
        ("deferred", "ordinary", 32 * _MIB, {"gradient_clipping": 1.0}),
        # In the vertical schedule each micro-batch has a heap of its own.
        (
            "in_backward",
            "vertical",
            160 * _MIB,
            {"gradient_accumulation_steps": 4, "infinity": {"schedule": "vertical"}},
        ),
    ],
)
def test_a_training_stays_inside_its_budget_from_the_first_step_on(
    update: str, schedule: str, slack_bytes: int, changes: dict[str, Any], nvme_dir: Path, run_in_little_memory: _Run
) -> None:
    [answer] = run_in_little_memory("budgeted_training", "train", str(nvme_dir), slack_bytes, changes)
    assert (answer["update"], answer["schedule"]) == (update, schedule)


def test_state_dicts_are_made_saved_and_loaded_without_memory_of_their_own(
    nvme_dir: Path, run_in_little_memory: _Run
) -> None:
    slack_bytes = 112 * _MIB  # the flat buffer of the largest unit, 65 MB, which is part of the budget; and some
    [answer] = run_in_little_memory("budgeted_training", "save", str(nvme_dir), slack_bytes)
    assert all(num_bytes > slack_bytes for num_bytes in answer["num_bytes"])


@pytest.mark.parametrize("what", ["load", "as DeepSpeed", "train", "export"])
def test_weights_larger_than_memory_are_loaded_and_exported(
    what: str, nvme_dir: Path, run_in_little_memory: _Run
) -> None:
    shape = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(hidden_size=512, intermediate_size=1536, vocab_size=8000, **shape)
    torch.manual_seed(0)
    with torch.no_grad():
        transformers.MixtralForCausalLM(config).save_pretrained(nvme_dir / "weights", max_shard_size="100MB")
    first = "import infinity.as_deepspeed" if what == "as DeepSpeed" else ""
    *_, answer = run_in_little_memory("loading_in_little_memory", "run", str(nvme_dir), what, first=first)
    assert answer["weights_bytes"] > 2 * answer["slack_bytes"]


def test_a_base_of_five_times_the_budget_is_packed_within_it(nvme_dir: Path, run_in_little_memory: _Run) -> None:
    budget_bytes = 40 * _MIB
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 15, "num_attention_heads": 8}
    _write_llama(nvme_dir / "base", transformers.LlamaConfig(vocab_size=2000, **shape))
    [answer] = run_in_little_memory("loading_in_little_memory", "pack", str(nvme_dir), budget_bytes)
    assert answer["base_bytes"] > 5 * budget_bytes
    assert answer["peak_bytes"] <= budget_bytes


def _write_llama(directory: Path, config: transformers.LlamaConfig) -> None:
    """Files of a Llama in bf16, a shard for each layer, without the whole of it in memory."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        file = f"{name.partition('.layers.')[2].partition('.')[0] or 'rest'}.safetensors"
        shards.setdefault(file, {})[name] = parameter
    config.save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    for file, those in shards.items():
        values = {name: torch.randn(each.shape, generator=generator).bfloat16() / 50 for name, each in those.items()}
        save_file(values, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, those in shards.items() for name in those}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_states_of_several_times_the_memory_are_saved_and_loaded(nvme_dir: Path, run_in_little_memory: _Run) -> None:
    *_, answer = run_in_little_memory("saving_in_little_memory", "run", str(nvme_dir))
    assert answer["is_same"]
    assert answer["num_bytes"] > 3 * answer["allowed"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("is_deepspeed", [False, True], ids=["native", "as_deepspeed"])
def test_no_checkpoint_of_a_library_breaks_the_budget(
    is_deepspeed: bool, nvme_dir: Path, run_in_little_memory: _Run
) -> None:
    answers = run_in_little_memory("libraries_in_little_memory", "run", str(nvme_dir), is_deepspeed=is_deepspeed)
    assert tuple(answer["library"] for answer in answers) == LIBRARIES
    assert all(answer["saved_bytes"] > 10 * answer["allowed_bytes"] for answer in answers)
