"""The JSON schema for editors: what loads fits it, and what is refused by name does not."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from infinity.config import load_config
from infinity.config.schema.json_schema import json_schema
from infinity.config.text import read_text
from infinity.errors import ConfigError

_ROOT = Path(__file__).resolve().parents[3]
_SCHEMA = json.loads(json.dumps(json_schema()))
_VALIDATOR = jsonschema.Draft202012Validator(_SCHEMA)


def _texts() -> list[dict[str, Any]]:
    """The ready files, and every config in the tests that stands there as JSON and loads."""
    found = [path.read_text() for path in sorted((_ROOT / "configs").glob("*.json"))]
    for path in sorted((_ROOT / "tests" / "unit" / "config").glob("test_*.py")):
        constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        found += [text for text in constants if isinstance(text, str) and text.lstrip().startswith("{")]
    loaded = []
    for text in found:
        try:
            load_config(text.replace("/local_nvme", "/tmp"), check_storage=False)
            loaded.append(read_text(text))
        except ConfigError:
            continue
    return loaded


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(_SCHEMA)


def test_what_loads_fits() -> None:
    configs = _texts()
    assert len(configs) > 10
    for config in configs:
        problems = [f"{error.json_path}: {error.message}" for error in _VALIDATOR.iter_errors(config)]
        assert problems == [], config


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_sizes": 1},
        {"train_batch_size": "many"},
        {"train_batch_size": 0},
        {"zero_optimization": {"offload_param": {"device": "disk"}}},
        {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": [{"capacity": "1GB"}]}}},
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
    block = _SCHEMA["$defs"]["InfinityBlock"]["properties"]
    assert "Hard ceiling" in block["host_memory_budget"]["description"]
    assert "no effect" in _SCHEMA["properties"]["gradient_allreduce_op"]["description"].lower()
