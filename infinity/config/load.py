"""`load_config`: from what the user has to an `InfinityConfig`; and the text of a file: JSON with comments and trailing commas,
or HJSON if `hjson` is installed.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.config.reading import apply_rules, overridden, read_strictness, tidy, validate
from infinity.config.resolve import resolve
from infinity.config.resolved import InfinityConfig
from infinity.config.schema.block import Findings
from infinity.distributed.process_groups import num_processes
from infinity.errors import ConfigError, nearest
from infinity.optim.lr_schedules import schedule_parameters

logger = logging.getLogger(__name__)

ConfigSource = Mapping[str, Any] | str | os.PathLike[str] | InfinityConfig

# DeepSpeed reads files with hjson, so they have comments (`//`, `#`, `/* */`) and trailing commas. Both are replaced
# by blanks before `json` sees the text, so that its line and column are still those of the file. Each pattern matches
# a string first: the `//` inside "http://x" is then part of a string, which `_blank` keeps.
#   {"a": "http://x", // note     ->   {"a": "http://x",
#    "b": [1, 2,]}                ->    "b": [1, 2 ]}
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|\#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_READY = Path(__file__).with_name("ready")
_CURE = (
    "Comments and trailing commas are allowed. Keys and texts need double quotes, unless the package hjson is installed "
    "(pip install hjson). Flags are true and false, not True and False"
)


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
    if isinstance(source, str) and source.lstrip()[:1] in ("{", ""):
        # No path begins with a brace in practice. JSON text cannot begin otherwise. An empty text would be the path ".".
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


# ----------------------------------------------------------------------------------------------------------------- text


class _Object(dict[str, Any]):
    """A JSON object that remembers its duplicate keys. `json` silently keeps the last value of each."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.duplicates = [key for key, num in Counter(key for key, _ in pairs).items() if num > 1]


def ready_names() -> list[str]:
    """Return the names of the configs that come with the package."""
    return sorted(path.stem for path in _READY.glob("*.json"))


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a config file, or of a ready config by its name. An existing file comes first."""
    try:
        # A file of your own named like a ready config wins.
        if not path.exists() and str(path) in ready_names():
            path = _READY / f"{path}.json"
        # Without "-sig", json.loads refuses the first character.
        # utf-8-sig: editors on Windows put a byte order mark in front.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        ready = ", ".join(ready_names())
        cure = f"Give the path of an existing JSON file, a ready config ({ready}), or the config itself as a dict"
        raise ConfigError.in_text(f"config file '{path}'", "it does not exist", cure=cure) from None
    # ValueError: it is not UTF-8, or the name has a character that paths cannot have.
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise ConfigError.in_text(f"config file '{path}'", problem, cure="Give a readable JSON file") from error
    return read_text(text, source=f"config file '{path}'")


def read_text(text: str, *, source: str = "config text") -> dict[str, Any]:
    """Return the content of a config given as text.

    Raises:
        ConfigError: with line and column, or with the dotted path of a duplicate key.
    """
    if not text.strip():
        raise ConfigError.in_text(
            source, "it is empty", cure='Write a config, such as {"train_micro_batch_size_per_gpu": 4}'
        )
    try:
        content = json.loads(_TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text)), object_pairs_hook=_Object)
    except json.JSONDecodeError as error:
        # Only text that is no JSON needs hjson, which is an optional package.
        content = _by_hjson(text)
        if content is None:
            place = f"line {error.lineno}, column {error.colno}"
            raise ConfigError.in_text(source, f"{error.msg} at {place}", cure=_CURE) from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise ConfigError.in_text(
            source, str(error), cure="Give a config: no config has a value that long, or objects nested that deep"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError.in_text(source, f"it holds a {type(content).__name__}, not an object", cure="Begin it with {")
    _refuse_duplicates(content, "", source)
    return content


def _by_hjson(text: str) -> Any:
    """Parse text with `hjson`, as DeepSpeed does; None if that fails, or if the package is not installed."""
    try:
        import hjson

        return hjson.loads(text, object_pairs_hook=_Object)
    except (ImportError, ValueError, RecursionError):
        return None


def _blank(match: re.Match[str]) -> str:
    token = match[0]
    # Line breaks inside a comment stay: they carry the line numbers.
    return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)


def _refuse_duplicates(value: object, path: str, source: str) -> None:
    if isinstance(value, _Object):
        if value.duplicates:
            key = path + value.duplicates[0]
            raise ConfigError.in_text(source, f"key '{key}' occurs twice", cure="Keep one of them", key=key)
        for name, item in value.items():
            _refuse_duplicates(item, f"{path}{name}.", source)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_duplicates(item, f"{path}{index}.", source)
