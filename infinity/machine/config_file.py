"""Writes settings into a config file and leaves everything else in it as it is: order, indentation, comments."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from infinity.config import load_config
from infinity.config.batch import ANY_BATCH
from infinity.config.schema.blocks import InfinityBlock
from infinity.config.schema.offload_blocks import AioBlock
from infinity.config.text import blank_comments, read_text
from infinity.errors import ConfigError
from infinity.machine.drive_profile import Block
from swapper.volumes.publish import replacing

NOTE_KEY = "// infinity profile"
"""Keys like this one are comments to the engine."""
_OTHER_NAMES = {"aio": AioBlock.renamed, "infinity": InfinityBlock.renamed}
_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"\s*")


class ConfigRefused(ValueError):
    """The file cannot be changed; the message says why. It is as it was."""


@dataclass(frozen=True)
class Change:
    """One value that is not what it was. `before` is None where there was none."""

    key: str
    before: Any
    after: Any

    def words(self) -> str:
        """`aio.block_size: 1048576 -> 4194304`."""
        return (
            f"{self.key}: {'not set' if self.before is None else json.dumps(self.before)} -> {json.dumps(self.after)}"
        )


class _Member(NamedTuple):
    """One key of an object: where it and its value stand in the text."""

    start: int
    value_start: int
    value_stop: int


def check(path: Path) -> None:
    """Refuse a file that could not be changed, before anything is measured.

    Raises:
        ConfigRefused: it is missing, not writable, no JSON, or no config.
    """
    if not path.is_file():
        raise ConfigRefused(f"{path}: no such file; --apply changes a config that exists (configs/ has some to copy)")
    if not os.access(path, os.W_OK) or not os.access(path.resolve().parent, os.W_OK):
        raise ConfigRefused(f"{path} is not writable: make it so, or paste the block by hand")
    _load(_read(path), path)


def apply(path: Path, block: Block, note: str) -> list[Change]:
    """Write `block` into the config, all or nothing.

    Args:
        path: the config file.
        block: values by block and key. "auto" is only written where nothing stands yet.
        note: what measured this, for the comment that is left in the file.

    Returns:
        What is different now; a comment in the file says the same. Empty if everything was so already.

    Raises:
        ConfigRefused: the file cannot be read, changed or written.
    """
    text = _read(path)
    _load(text, path)
    changed, changes = merge(text, block)
    if not changes:
        return []
    today = datetime.date.today().isoformat()
    sentence = f"{note}, {today}: " + "; ".join(change.words() for change in changes).replace('"', "'")
    changed = _set(changed, (), NOTE_KEY, sentence)
    _load(changed, path)
    try:
        with replacing(path) as file:
            file.write(changed.encode())
    except OSError as error:
        raise ConfigRefused(f"{path} cannot be written: {error}") from error
    return changes


def merge(text: str, block: Block) -> tuple[str, list[Change]]:
    """The text of a config with the values of `block` in it, and what that changed."""
    changes = []
    for name, values in block.items():
        present = read_text(text.lstrip("\ufeff")).get(name)
        if not isinstance(present, Mapping):
            present = {}
            text = _set(text, (), name, {})
        for key, value in values.items():
            written = [key, *(other for other, real in _OTHER_NAMES[name].items() if real == key)]
            there = [each for each in written if each in present]
            before = present[there[0]] if there else None
            if value == "auto" and before is not None:
                continue
            for each in there or [key]:
                text = _set(text, (name,), each, value)
            if before != value:
                changes.append(Change(f"{name}.{key}", before, value))
    return text, changes


def _set(text: str, path: tuple[str, ...], key: str, value: Any) -> str:
    """Replace or add one value of the object at `path`."""
    plain = blank_comments(text)
    start = plain.index("{")  # behind a byte order mark, or blanks
    for name in path:
        start = _members(plain, start)[name].value_start
    members = _members(plain, start)
    if key in members:
        member = members[key]
        return text[: member.value_start] + json.dumps(value, ensure_ascii=False) + text[member.value_stop :]
    entry = f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
    if members:
        first, last = next(iter(members.values())), list(members.values())[-1]
        gap = plain[: first.start]
        lead = gap[len(gap.rstrip()) :]
        newline = "\r\n" if "\r\n" in text else "\n"
        separator = newline + lead.rpartition("\n")[2] if "\n" in lead else " "
        return f"{text[: last.value_stop]},{separator}{entry}{text[last.value_stop :]}"
    return f"{text[: start + 1]}{entry}{text[start + 1 :]}"


def _members(plain: str, start: int) -> dict[str, _Member]:
    """The keys of the object that begins at `start`, in order."""
    found: dict[str, _Member] = {}
    position = _skip(plain, start + 1)
    while plain[position] != "}":
        begin = position
        key, position = _DECODER.raw_decode(plain, position)
        position = _skip(plain, position)  # the colon
        value_start = _skip(plain, position + 1)
        _, value_stop = _DECODER.raw_decode(plain, value_start)
        found[key] = _Member(begin, value_start, value_stop)
        position = _skip(plain, value_stop)
        if plain[position] == ",":
            position = _skip(plain, position + 1)
    return found


def _skip(plain: str, position: int) -> int:
    match = _BLANK.match(plain, position)
    return match.end() if match else position


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigRefused(f"{path} cannot be read: {error}") from error


def _load(text: str, path: Path) -> None:
    try:
        # As a dict: a text that does not begin with { would be taken as the name of a file. Its batch sizes may be completed
        # when it is loaded.
        content = read_text(text.lstrip("\ufeff"), source=str(path))
        load_config(content, overrides=ANY_BATCH, check_storage=False)
    except ConfigError as error:
        raise ConfigRefused(
            f"{path} is left as it is, because it is no config that the engine takes: {error}"
        ) from error
