"""Rewrites forms that DeepSpeed gave up, and that files still have, to the present ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from infinity.config.schema.block import Findings
from infinity.config.schema.quantities import is_auto, parse_flag
from infinity.errors import ConfigError

_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
OLD_FLAGS = frozenset(f"zero_optimization.{name}" for name in _OFFLOAD)
_DOTTED = re.compile(r"[a-z]\w*(\.\w+)+")


def modernise(raw: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return a copy of `raw` in which `zero_optimization` has its present form.

    Keys with dots are put into their blocks, `true` becomes stage 1, and the flags `cpu_offload` and `cpu_offload_param`
    become the blocks that replaced them.
    """
    # {"zero_optimization.stage": 2, "zero_optimization": {"cpu_offload": true}} becomes
    # {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}.
    config = _undotted(raw, findings)
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        # An old form of DeepSpeed's: a switch in place of the stage.
        config["zero_optimization"] = {"stage": 1 if zero else 0}
    elif isinstance(zero, Mapping):
        config["zero_optimization"] = _modernise_zero(dict(zero), findings)
    return config


def _undotted(raw: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return a copy in which keys like "zero_optimization.stage" are in their block. TRL writes such keys."""
    config: dict[str, Any] = {}
    dotted: dict[str, Any] = {}
    for key, value in raw.items():
        # All blocks first: a dotted key replaces a value wherever it is in the file.
        (dotted if _DOTTED.fullmatch(str(key)) else config)[key] = value
    for key, value in dotted.items():
        target = config
        *blocks, name = key.split(".")
        for block in blocks:
            inner = target.get(block)
            if isinstance(inner, bool):
                inner = {"stage" if block == "zero_optimization" else "enabled": inner}
            # A copy: `raw` is the caller's dict.
            target[block] = dict(inner) if isinstance(inner, Mapping) else {}
            target = target[block]
        target[name] = value
        findings.record(key, "taken as the key of that block, in place of the value there")
    return config


def _modernise_zero(zero: dict[str, Any], findings: Findings) -> dict[str, Any]:
    if "cpu_offload_use_pin_memory" in zero:
        del zero["cpu_offload_use_pin_memory"]
        key = "zero_optimization.cpu_offload_use_pin_memory"
        findings.record(key, "no effect: host memory is pinned when there is a GPU to pin it for")
    for old, new in _OFFLOAD.items():
        value = zero.pop(old, None)
        if value is None or is_auto(value) or not _flag(f"zero_optimization.{old}", value):
            continue
        present = zero.get(new)
        if present is None or is_auto(present):
            present = {"device": "cpu"}
        if not isinstance(present, Mapping):
            continue  # whoever looks at types says what is wrong with it
        # Both forms may be given if they agree. "nvme" and `cpu_offload` do not.
        device = present.get("device", "none")
        if device != "cpu" and not is_auto(device):
            problem = f"it contradicts zero_optimization.{new}.device = {device!r}"
            raise ConfigError.value(
                f"zero_optimization.{old}", value, problem, cure=f"Remove {old}, which is deprecated"
            )
        zero[new] = {**present, "device": "cpu"}
        findings.record(f"zero_optimization.{old}", f'old form of "{new}": {{"device": "cpu"}}, taken as that')
    return zero


def _flag(key: str, value: object) -> bool:
    try:
        return parse_flag(value)
    except ValueError as error:
        raise ConfigError.value(key, value, str(error), cure="Remove it, it is deprecated") from error
