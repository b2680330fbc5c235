"""What libraries' arguments and configs agree on, and which versions are taken."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.config import load_config
from infinity.errors import ConfigError, LibraryError
from infinity.integrations.settings import Setting, agreed
from infinity.integrations.versions import require

_BATCH = {"train_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize("source", [dict, json.dumps, "file"])
def test_what_is_open_is_filled(source: Any, tmp_path: Path) -> None:
    given: Any = {**_BATCH, "gradient_clipping": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}
    if source == "file":
        (tmp_path / "config.json").write_text(json.dumps(given))
        given = tmp_path / "config.json"
    else:
        given = source(given)
    settings = [
        Setting("gradient_clipping", 0.25, "clip"),
        Setting("gradient_accumulation_steps", 3, "accumulate", is_always=True),
        Setting("fp16.enabled", False, "half"),
        Setting("bf16.enabled", False, "brain", must_match=False),
        Setting("torch_autocast.enabled", True, "autocast"),
    ]
    config = agreed(given, settings)
    assert (config.gradient_clipping, config.gradient_accumulation_steps) == (0.25, 3)
    assert (config.compute_dtype, config.autocast_dtype) == (torch.bfloat16, None)


def test_all_conflicts_are_named() -> None:
    given = {**_BATCH, "gradient_clipping": 1, "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.99]}}}
    settings = [
        Setting("gradient_clipping", 1.0, "clip"),
        Setting("train_micro_batch_size_per_gpu", 4, "batch"),
        Setting("optimizer.params.betas", (0.9, 0.999), "betas"),
    ]
    with pytest.raises(ConfigError) as raised:
        agreed(given, settings)
    assert "'gradient_clipping'" not in str(raised.value)
    assert "'train_micro_batch_size_per_gpu' is 2 and batch 4" in str(raised.value)
    assert "'optimizer.params.betas'" in str(raised.value)


def test_what_was_agreed_on_stays_when_it_is_agreed_on_again(tmp_path: Path) -> None:
    given = {
        **_BATCH,
        "optimizer": {"type": "AdamW"},
        "optimizer.params.lr": "auto",
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }
    settings = [Setting("optimizer.params.lr", 5e-5, "learning_rate")]
    config = agreed(load_config(given, overrides={"zero_optimization": {"stage": 2}}), settings)
    again = agreed(config, [])
    assert again == config
    assert again.optimizer is not None and again.optimizer.params == {"lr": 5e-5}
    assert (again.zero_stage, again.nvme_paths) == (2, (tmp_path,))


def test_dropped_blocks_are_gone() -> None:
    given = {**_BATCH, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    assert agreed(given, [Setting("scheduler.params.warmup_max_lr", 1.0, "lr")], drops=["scheduler"]).scheduler is None


def test_old_and_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"some": "2.9.1"}.__getitem__)
    require("some", "2.9", extra="hf")
    with pytest.raises(LibraryError, match=r"some is 2\.9\.1 here, and 2\.10 or newer is needed"):
        require("some", "2.10", extra="hf")
    require("some", "2.9", extra="hf", below="2.10")
    with pytest.raises(LibraryError, match=r"from 2\.8 to below 2\.9 is needed\. pip install 'some>=2\.8,<2\.9'"):
        require("some", "2.8", extra="hf", below="2.9")
    monkeypatch.undo()
    with pytest.raises(LibraryError, match="no-such-thing is not installed"):
        require("no-such-thing", "1", extra="hf")


def test_an_extra_brings_what_the_integrations_require() -> None:
    """Else the error's advice, to install the extra, would change nothing."""
    root = Path(__file__).resolve().parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    call = r'^ *require\((?:"([\w-]+)"|library), "([\d.]+)", extra="(\w+)"(?:, below="([\d.]+)")?\)$'
    required = {
        found
        for path in (root / "infinity" / "integrations").glob("*.py")
        for found in re.findall(call, path.read_text(), re.MULTILINE)
    }
    # Of Lightning's two packages, one brings the other: their strategies are made by one function.
    required = {(library or "lightning", *rest) for library, *rest in required}
    assert {library for library, *_ in required} == {"transformers", "accelerate", "lightning"}
    for brought_by, least, extra, below in required:
        assert f"{brought_by}>={least}" + (f",<{below}" if below else "") in extras[extra]


@pytest.mark.deep
def test_infinity_alone_imports_nothing_that_few_need() -> None:
    libraries = {"transformers", "accelerate", "lightning", "infinity.integrations", "torch._dynamo", "numba", "zarr"}
    code = f"import sys; from infinity import *; print({libraries} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
