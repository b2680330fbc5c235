"""The JSON schema for editors: what loads fits it, and what is refused by name does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from infinity.config import load_config
from infinity.config.load import read_text
from infinity.config.schema.json_schema import json_schema
from infinity.errors import ConfigError

_ROOT = Path(__file__).resolve().parents[3]
_FILES = sorted([*(_ROOT / "configs").glob("*.json"), *Path(__file__).with_name("wild").glob("*.json")])
_SCHEMA = json.loads(json.dumps(json_schema()))
_VALIDATOR = jsonschema.Draft202012Validator(_SCHEMA)


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(_SCHEMA)


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_what_loads_fits(path: Path) -> None:
    """`test_ready_configs` and `test_files_in_the_wild` load them."""
    found = _VALIDATOR.iter_errors(read_text(path.read_text()))
    assert [f"{error.json_path}: {error.message}" for error in found] == []


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_sizes": 1},
        {"train_batch_size": "many"},
        {"train_batch_size": 0},
        {"zero_optimization": {"offload_param": {"device": "disk"}}},
        {"infinity": {"host_memory_budget": "plenty"}},
        {"infinity": {"io_backend": "magic"}},
        {"bf16": {"enabled": "perhaps"}},
    ],
)
def test_what_is_refused_does_not_fit(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_config(config, check_storage=False)
    assert not _VALIDATOR.is_valid(config)


def test_keys_say_what_they_do() -> None:
    block = _SCHEMA["properties"]["infinity"]["anyOf"][0]["properties"]
    assert "Hard limit" in block["host_memory_budget"]["description"]
    assert "no effect" in _SCHEMA["properties"]["gradient_allreduce_op"]["description"].lower()
