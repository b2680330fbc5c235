"""``infinity launch``: torchrun on each host of a DeepSpeed hostfile, over ssh, or on this one."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from infinity.cli import rank_script
from infinity.cli.output import PathType
from infinity.errors import ConfigError, InfinityError
from infinity.secret_names import is_secret

logger = logging.getLogger(__name__)

_PASSED_ON = ("PYTHONPATH", "NCCL_", "GLOO_", "OMP_NUM_THREADS", "HF_")
"""Environment variables that other hosts get: these, or all that begin so. Secrets are not passed on: every user of a host
can read the command lines there."""
# How late an end may be noticed. Less would cost more CPU time beside the training.
_POLL_SECONDS = 0.2
_LOCALHOST = "localhost"
_LOCAL_NAMES = (_LOCALHOST, "127.0.0.1", socket.gethostname())
"""Of this host, which needs no ssh."""
_GRACE_SECONDS = 40.0
"""torchrun kills a process 30 seconds after it has sent SIGTERM to it. We kill torchrun later than that."""
# SIGHUP comes when the terminal is closed.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Of one host. A mistyped number would fill memory with a list of slots, or start that many processes.
_MOST_SLOTS = 9999
_HOST = re.compile(r"([A-Za-z0-9_][\w.+-]*@)?(\[[0-9A-Fa-f:.]+(%\w+)?\]|[A-Za-z0-9_][\w.:%-]*)", re.ASCII)
"""A name or address, with a user before it or without. One that begins with a dash would be an option of ssh."""

Hosts = dict[str, list[int]]
"""Host -> its slots (GPUs) that take part, in order."""


# Options after SCRIPT are the script's own.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-H", "--hostfile", type=PathType(), help="File with one host per line, such as: worker-1 slots=8.")
@click.option("-i", "--include", default="", help="Use only these hosts or slots: worker-1@worker-2:0,2.")
@click.option("-e", "--exclude", default="", help="Do not use these hosts or slots.")
@click.option("--num_nodes", type=click.IntRange(min=1), help="Use only so many hosts of the hostfile, the first ones.")
@click.option(
    "--num_gpus",
    type=click.IntRange(1, _MOST_SLOTS),
    help="Number of processes on each host. They use its first slots.",
)
@click.option("--master_addr", help="Address at which the processes meet. Default: the first host.")
@click.option("--master_port", type=click.IntRange(0, 65535), default=29500, show_default=True)  # 0: a free one
@click.option("--ssh_port", type=click.IntRange(1, 65535), help="Port of ssh. Default: ssh's own.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(**options: Any) -> None:
    """Start a training on this host, or on the hosts of a DeepSpeed hostfile.

    Without a hostfile, torchrun starts one process for each GPU of this host (--num_gpus for another number). With a
    hostfile, torchrun starts on each host over ssh, in the current directory and with the same Python. Each process
    runs SCRIPT with its ARGUMENTS. When one process fails, the others are stopped. SIGTERM and Ctrl-C stop all of them.
    Other hosts get PYTHONPATH, OMP_NUM_THREADS and all NCCL_, GLOO_ and HF_ variables, but no secrets such as HF_TOKEN.

    \b
    Examples:
      infinity launch --num_gpus 4 train.py --epochs 3
      infinity launch --hostfile hosts --include worker-1@worker-2:0,2 train.py
    """
    arguments = SimpleNamespace(**options)
    run_all(commands_of(_hosts(arguments), arguments, os.environ))


def _hosts(arguments: SimpleNamespace) -> Hosts:
    if arguments.hostfile is None:
        if not Path(arguments.script).is_file():
            raise ConfigError(f"{arguments.script}: there is no such script. Give the path of one")
        if (arguments.num_nodes or 1) > 1:
            raise ConfigError(
                f"--num_nodes {arguments.num_nodes}: without a hostfile there is only this host. Pass --hostfile"
            )
        import torch  # here, because `--help` does not need it

        # Without a hostfile, --include and --exclude select among the GPUs of this host: localhost:0,2.
        choice = _choice(arguments)
        num_slots = arguments.num_gpus or max(torch.cuda.device_count(), 1)
        if choice:  # without a GPU, slots are just processes, of which there can be any number
            num_slots = torch.cuda.device_count() or num_slots + 1 + largest_slot(choice)
        host = choice.partition(":")[0]
        found = {host if host in _LOCAL_NAMES else _LOCALHOST: list(range(num_slots))}
    else:
        found = read_hostfile(arguments.hostfile)
    found = chosen(found, arguments.include, arguments.exclude)
    _check_number("--num_nodes", arguments.num_nodes, len(found), f"there are {len(found)} hosts")
    # None takes all of them.
    found = dict(islice(found.items(), arguments.num_nodes))
    for host, slots in found.items():
        _check_number("--num_gpus", arguments.num_gpus, len(slots), f"{host} has {len(slots)} slots")
    return {host: slots[: arguments.num_gpus] for host, slots in found.items()}


def _check_number(option: str, number: int | None, most: int, there: str) -> None:
    if number is not None and number > most:
        raise ConfigError(f"{option} {number}: {there}. Give a number from 1 to {most}")


def _choice(arguments: SimpleNamespace) -> str:
    return str(arguments.include or arguments.exclude)


def _environment(slots: Sequence[int], arguments: SimpleNamespace, mine: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that processes on this host get in addition to ours."""
    if arguments.hostfile is None and not _choice(arguments):
        # All GPUs that this process sees: nothing to restrict.
        return {}
    # Slots count the visible GPUs. With CUDA_VISIBLE_DEVICES=4,5 in the environment, slot 1 is GPU 5. A hostfile
    # numbers the GPUs of the host itself.
    visible = mine.get("CUDA_VISIBLE_DEVICES", "").split(",") if arguments.hostfile is None else []
    names = [visible[slot] if slot < len(visible) and visible[slot] else str(slot) for slot in slots]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def commands_of(hosts: Hosts, arguments: SimpleNamespace, environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the command that starts each host's processes, by host."""
    is_alone = len(hosts) == 1 and next(iter(hosts)) in _LOCAL_NAMES
    # The first host runs the rendezvous. `rpartition` drops a user in front ("user@host").
    master = arguments.master_addr or ("127.0.0.1" if is_alone else next(iter(hosts)).rpartition("@")[2])
    found: dict[str, list[str]] = {}
    named = {name: value for name, value in environment.items() if name.startswith(_PASSED_ON)}
    secrets = sorted(name for name, value in named.items() if is_secret(name, value))
    # Every user of a host can read the command lines of all processes there (/proc/PID/cmdline).
    if secrets and not is_alone:
        logger.warning(
            "%s: not passed to other hosts, because every user there could read it in the command line. Set it in "
            "the shell's startup file on those hosts, or store it in a file (hf auth login)",
            ", ".join(secrets),
        )
    for rank, (host, slots) in enumerate(hosts.items()):
        # The module and not the script `torchrun`: that one may belong to another Python.
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += [f"--nnodes={len(hosts)}", f"--node-rank={rank}", f"--nproc-per-node={len(slots)}"]
        torchrun += [f"--master-addr={master}", f"--master-port={arguments.master_port}"]
        torchrun += [rank_script.__file__, arguments.script, *arguments.arguments]
        # No ssh: processes inherit our environment, secrets included.
        if host in _LOCAL_NAMES:
            added = [f"{name}={value}" for name, value in _environment(slots, arguments, environment).items()]
            found[host] = ["env", *added, *torchrun] if added else torchrun
            continue
        exported = {name: value for name, value in sorted(named.items()) if name not in secrets}
        exported["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
        assignments = [f"{name}={value}" for name, value in exported.items()]
        # ssh starts in the home directory, without our environment. `exec` replaces the remote shell, so the hangup of
        # the terminal reaches torchrun.
        there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *assignments, *torchrun])}"
        port = ["-p", str(arguments.ssh_port)] if arguments.ssh_port else []
        # -tt gives the remote command a terminal: it gets SIGHUP when ssh ends. BatchMode fails where ssh would ask for
        # a password, and -- keeps a host from being read as an option.
        found[host] = ["ssh", "-tt", "-o", "BatchMode=yes", *port, "--", host, there]
    return found


def run_all(commands: Mapping[str, Sequence[str]]) -> None:
    """Run one command per host until all have ended; the first that fails ends the others, and so does a signal to this process.

    To end a command, its process group gets SIGTERM, and SIGKILL 40 seconds later or at a second signal.

    Args:
        commands: by host.

    Raises:
        InfinityError: a command has failed; names its host and exit status.
        SystemExit: a signal was received. The status is 128 and its number, as in shells.
    """
    started: dict[str, subprocess.Popen[bytes]] = {}
    with _signals() as received:
        try:
            for host, command in commands.items():
                # A session of its own: Ctrl-C of the terminal then reaches only us, and `_end` can signal torchrun with
                # its children.
                started[host] = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            # `poll` sets `returncode`. A status other than 0 is an error.
            while not received and None in [process.returncode for process in started.values()]:
                for host, process in started.items():
                    if status := process.poll():
                        how = f"by signal {-status}" if status < 0 else f"with status {status}"
                        raise InfinityError(f"{host} ended {how}, and the other hosts were stopped. See its output")
                time.sleep(_POLL_SECONDS)
        finally:
            # Also after an exception in Popen: hosts that were started are ended.
            _end([*started.values()], received)
    if received:
        raise SystemExit(128 + received[0])


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the numbers of signals inside the ``with`` block, in place of their usual effect."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(running: Sequence[subprocess.Popen[bytes]], received: list[int]) -> None:
    """End processes with SIGTERM, and with SIGKILL after the grace period or at a second signal."""
    _signal_all(running, signal.SIGTERM)
    num_received, deadline = len(received), time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in running):
        if time.monotonic() > deadline or len(received) > num_received:
            _signal_all(running, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _signal_all(running: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in running:
        # Only processes that are not reaped yet: the kernel may have given the id of others to a new process.
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


# ---------------------------------------------------------------------------------------------------------------- hosts


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
        match = re.fullmatch(r"(\S+)\s+slots=([1-9][0-9]{0,3})", text)
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
    return max((int(slot) for slot in numbers if slot.isdecimal() and len(slot) < 5), default=-1)


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
