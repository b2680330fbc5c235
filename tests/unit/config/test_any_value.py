"""Whatever stands in a config, it loads or is refused in words: never another kind of exception."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.config import InfinityConfig, load_config
from infinity.config.schema.vocabulary import blocks, known_paths
from infinity.errors import ConfigError

PATHS = [
    *[tuple(path.split(".")) for path in known_paths()],
    *[(*path.split(".")[:-1], name) for path, block in blocks() for name in block.renamed],
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
