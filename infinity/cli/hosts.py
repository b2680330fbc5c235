"""Reads DeepSpeed's hostfile, and selects hosts and slots from it."""

from __future__ import annotations

import re
from pathlib import Path

from infinity.errors import ConfigError

_HOST = re.compile(r"([A-Za-z0-9_][\w.+-]*@)?(\[[0-9A-Fa-f:.]+(%\w+)?\]|[A-Za-z0-9_][\w.:%-]*)", re.ASCII)
"""A name or address, with a user before it or without. One that begins with a dash would be an option of ssh."""

Hosts = dict[str, list[int]]
"""Host -> its slots (GPUs) that take part, in order."""


def read_hostfile(path: Path) -> Hosts:
    """Read lines such as ``worker-1 slots=8``. ``#`` begins a comment.

    Raises:
        ConfigError: it is not text, a line is malformed, a host appears twice or has no valid name, or none is given.
    """
    found: Hosts = {}
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"hostfile '{path}': it is not a text file. Give lines like: worker-1 slots=8") from error
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", text)
        if match is None:
            raise ConfigError(f"{path}, line {number}: '{text}' is not a host. Write it as: worker-1 slots=8")
        if _HOST.fullmatch(match[1]) is None:
            raise ConfigError(
                f"{path}, line {number}: {match[1]!r} is not the name or address of a host. Write user@host or host"
            )
        if match[1] in found:
            raise ConfigError(
                f"{path}, line {number}: {match[1]} is listed twice. Write it once, with all of its slots"
            )
        found[match[1]] = list(range(int(match[2])))
    if not found:
        raise ConfigError(f"{path}: there is no host in it. Write one in each line, as: worker-1 slots=8")
    return found


def largest_slot(choice: str) -> int:
    """Return the largest slot that ``choice`` names; -1 if it names none."""
    # "worker-1@worker-2:0,2" -> ["", "0", "2"]; a host without slots gives "", which is no number.
    numbers = [slot for part in choice.split("@") for slot in part.partition(":")[2].split(",")]
    return max((int(slot) for slot in numbers if slot.isdecimal()), default=-1)


def chosen(hosts: Hosts, include: str, exclude: str) -> Hosts:
    """Return the hosts and slots that ``include`` names, or all but those that ``exclude`` names.

    ``worker-1@worker-2:0,2`` is one host, and two slots of another.

    Raises:
        ConfigError: both are given, a host or slot does not exist, or nothing is left.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude are both given. Take one")
    if not include and not exclude:
        return hosts
    # Example: hosts {"a": [0, 1], "b": [0, 1, 2]}, include "a@b:0,2". named is {"a": {0, 1}, "b": {0, 2}}, and so is
    # the result. With the same text as exclude, the result is {"b": [1]}.
    named: dict[str, set[int]] = {}
    for part in (include or exclude).split("@"):
        host, _, slots = part.strip().partition(":")
        known = hosts.get(host)
        if known is None:
            raise ConfigError(f"'{host}' is not one of the hosts. They are: {', '.join(hosts)}")
        try:
            numbers = {int(slot) for slot in slots.split(",")} if slots else set(known)
        except ValueError:
            raise ConfigError(f"'{part}': slots are numbers. Write them as {host}:0,1") from None
        if not numbers <= set(known):
            raise ConfigError(f"'{part}': {host} has the slots 0 to {len(known) - 1}. Name some of these")
        named[host] = named.get(host, set()) | numbers
    left = {
        # include keeps the named slots, exclude all others.
        host: [slot for slot in slots if (slot in named.get(host, ())) == bool(include)]
        for host, slots in hosts.items()
    }
    # A host without slots would start torchrun with no process.
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise ConfigError(f"--exclude {exclude}: no slot is left. Exclude fewer")
    return left
