"""Whatever stands in a config, it loads or is refused in words: never another kind of exception."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.config import InfinityConfig, load_config
from infinity.config.schema.block import Block, Keys
from infinity.config.schema.blocks import RootBlock
from infinity.config.schema.vocabulary import child_block
from infinity.errors import ConfigError


def _paths(block: type[Block], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name in (*block.model_fields, *block.renamed):
        found.append((*path, name))
    for name, field in block.model_fields.items():
        if (child := child_block(field)) is not None:
            found.extend(_paths(child, (*path, name)))
        for item in field.metadata:
            if isinstance(item, Keys):
                found.extend((*path, name, key) for key in item.names)
    return found


PATHS = [
    *_paths(RootBlock, ()),
    *[("scheduler", "params", name) for name in ("warmup_num_steps", "total_num_steps", "cycle_min_lr")],
    *[("optimizer", "params", name) for name in ("lr", "betas", "max_grad_norm")],
    *[("zero_optimization", name) for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")],
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["auto", "true", "false", "cpu", "nvme", "none", "/", ".", "WarmupLR", "OneCycle", "1e9", "2GB", "$X"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["enabled", "type", "a"]), inner, max_size=3)
    ),
    max_leaves=4,
)


@pytest.mark.deep
@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(PATHS), values), max_size=4), st.booleans(), st.booleans())
def test_loads_or_says_why_not(changes: list[tuple[tuple[str, ...], Any]], strict: bool, as_overrides: bool) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "infinity": {"strict": strict}}
    overrides: dict[str, Any] = {}
    for path, value in changes:
        if as_overrides:
            overrides[".".join(path)] = value
            continue
        target = config
        for name in path[:-1]:
            inner = target.get(name)
            target = inner if isinstance(inner, dict) else target.setdefault(name, {})
            if not isinstance(target, dict):
                return
        target[path[-1]] = value
    with contextlib.suppress(ConfigError):
        loaded = load_config(config, overrides=overrides)
        assert isinstance(loaded, InfinityConfig)
        assert loaded.describe()
