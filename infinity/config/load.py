"""`load_config`: from what the user has to an `InfinityConfig`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.config.overrides import overridden
from infinity.config.reading import apply_rules, read_strictness, tidy, validate
from infinity.config.resolve import resolve
from infinity.config.resolved import InfinityConfig
from infinity.config.schema.block import Findings
from infinity.config.text import read_file, read_text
from infinity.distributed.process_groups import num_processes
from infinity.errors import ConfigError, nearest
from infinity.optim.lr_schedules import schedule_parameters

logger = logging.getLogger(__name__)

ConfigSource = Mapping[str, Any] | str | os.PathLike[str] | InfinityConfig


def load_config(
    source: ConfigSource,
    *,
    world_size: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    check_storage: bool = True,
) -> InfinityConfig:
    """Read, validate and decide a config.

    Args:
        source: path of a JSON file, the name of a ready config ("zero3_nvme"), the JSON itself (a text that begins with
            `{`), a dict, or a finished config, which is returned as it is.
        world_size: number of processes that train together; None: of ``torch.distributed``, or as their launcher says.
        overrides: values that replace those of `source`, by dotted key, e.g. `{"aio.block_size": "4MiB"}`; None removes
            a key.
        check_storage: whether directories have to exist and be writable.

    Raises:
        ConfigError: of the kind that fits; nothing has been written by then.
    """
    if isinstance(source, InfinityConfig):
        if overrides:
            raise ConfigError("overrides cannot be applied to a finished config. Pass them when it is loaded")
        return source
    findings = Findings()
    # The order matters: overrides first, so that every later pass sees one config; unknown keys before types, because
    # a misspelt key is the likelier cause of a missing one; rules last, because they read validated values.
    raw = overridden(read_source(source), overrides or {})
    tidied = tidy(raw, findings)
    _drop_unknown_scheduler_params(tidied, findings)
    if findings.unknown:
        error = ConfigError.unknown_keys(findings.unknown)
        # `infinity.strict` is read by hand: pydantic has not run yet, and it refuses unknown keys by itself.
        if read_strictness(tidied):
            raise error
        logger.warning("%s", error)
    root = validate(tidied)
    apply_rules(root, findings)
    # torch.distributed may not be initialized yet, so the launcher's WORLD_SIZE counts as well.
    num = num_processes() if world_size is None else world_size
    return resolve(root, findings, world_size=num, check_storage=check_storage, source=raw)


def read_source(source: object) -> Mapping[str, Any]:
    """Return the content of a config, unchecked.

    Raises:
        ConfigError: it is not a config, or cannot be read.
    """
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str) and source.lstrip().startswith("{"):
        # No path begins with a brace in practice. JSON text cannot begin otherwise.
        return read_text(source)
    if isinstance(source, str | os.PathLike):
        return read_file(Path(source))
    cure = "Give the path of a JSON file, a dict, or JSON text"
    raise ConfigError.in_text("config", f"an object of type {type(source).__name__} is not a config", cure=cure)


def _drop_unknown_scheduler_params(tidied: dict[str, Any], findings: Findings) -> None:
    """Drop arguments that the schedule's constructor does not have, and record them as unknown keys."""
    # An optimizer's arguments are checked where its class is looked up (`optim`): that may be a class of the user's.
    block = tidied.get("scheduler")
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        return
    params = block.get("params")
    if not isinstance(params, dict):
        return
    # Raises ConfigError for a name that is no schedule.
    known = schedule_parameters(block["type"])
    for name in [name for name in params if name not in known]:
        near = nearest(name, known)
        findings.unknown.append((f"scheduler.params.{name}", near and f"scheduler.params.{near}"))
        del params[name]
