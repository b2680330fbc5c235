"""Loading and exporting in a memory control group that is much smaller than the weights."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.internals import Cgroup

_MIB = 1 << 20


@pytest.mark.root
@pytest.mark.deep
@pytest.mark.parametrize("what", ["load", "as DeepSpeed", "train", "export"])
def test_weights_larger_than_memory_are_loaded_and_exported(
    what: str,
    nvme_dir: Path,
    memory_cgroup: Cgroup,
    run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    shape = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(hidden_size=512, intermediate_size=1536, vocab_size=8000, **shape)
    torch.manual_seed(0)
    with torch.no_grad():
        transformers.MixtralForCausalLM(config).save_pretrained(nvme_dir / "weights", max_shard_size="100MB")
    group = str(memory_cgroup.task_files[0].parent)
    code = "import infinity.as_deepspeed\n" if what == "as DeepSpeed" else ""
    code += f"from tests.loading_in_little_memory import run\nrun({group!r}, {str(nvme_dir)!r}, {what!r})\n"
    ended = run_in_cgroup(memory_cgroup, code)
    assert memory_cgroup.num_out_of_memory_kills == 0, "the kernel ended it"
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert answer["weights_bytes"] > 2 * answer["slack_bytes"]
