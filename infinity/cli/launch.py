"""``python -m infinity launch``: torchrun on each host of a hostfile, over ssh, or on this one."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from infinity.cli.hosts import Hosts, chosen, read_hostfile
from infinity.errors import ConfigError, InfinityError

_PASSED_ON = ("PYTHONPATH", "NCCL_", "GLOO_", "OMP_NUM_THREADS", "HF_")
"""Environment variables that other hosts get: these, or all that begin so."""
_POLL_SECONDS = 0.2


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "launch",
        help="start a training on the hosts of a DeepSpeed hostfile",
        description="Starts torchrun on each host, over ssh, in the present directory and with the same Python. When one ends "
        "with an error, so do the others. Without a hostfile, on this host alone.",
    )
    parser.add_argument("--hostfile", type=Path, help="lines like: worker-1 slots=8")
    parser.add_argument("--include", default="", help="hosts, or slots of them: worker-1@worker-2:0,2")
    parser.add_argument("--exclude", default="", help="the same, of what stays out")
    parser.add_argument("--num_nodes", type=int, help="so many hosts, the first of the hostfile")
    parser.add_argument("--num_gpus", type=int, help="so many processes on each host, on its first slots")
    parser.add_argument("--master_addr", help="where the processes meet; by default the first host")
    parser.add_argument("--master_port", type=int, default=29500, help="default 29500")
    parser.add_argument("--ssh_port", type=int, help="by default ssh's own")
    parser.add_argument("script", help="what each process runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    hosts = _hosts(arguments)
    run_all(commands_of(hosts, arguments, os.environ))


def _hosts(arguments: argparse.Namespace) -> Hosts:
    if arguments.hostfile is None:
        if arguments.include or arguments.exclude or (arguments.num_nodes or 1) > 1:
            raise ConfigError("--include, --exclude and --num_nodes need hosts. Pass --hostfile")
        return {"localhost": list(range(arguments.num_gpus or max(torch.cuda.device_count(), 1)))}
    found = chosen(read_hostfile(arguments.hostfile), arguments.include, arguments.exclude)
    if (arguments.num_nodes or 1) > len(found) or (arguments.num_nodes or 1) < 1:
        raise ConfigError(f"--num_nodes {arguments.num_nodes}: there are {len(found)} hosts. Take as many at most")
    found = dict(islice(found.items(), arguments.num_nodes))
    if arguments.num_gpus is None:
        return found
    for host, slots in found.items():
        if not 0 < arguments.num_gpus <= len(slots):
            raise ConfigError(f"--num_gpus {arguments.num_gpus}: {host} has {len(slots)} slots. Take as many at most")
    return {host: slots[: arguments.num_gpus] for host, slots in found.items()}


def commands_of(hosts: Hosts, arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Host -> what to start for it on this one."""
    is_local = arguments.hostfile is None
    master = arguments.master_addr or ("127.0.0.1" if is_local else next(iter(hosts)))
    found: dict[str, list[str]] = {}
    for rank, (host, slots) in enumerate(hosts.items()):
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += [f"--nnodes={len(hosts)}", f"--node-rank={rank}", f"--nproc-per-node={len(slots)}"]
        torchrun += [f"--master-addr={master}", f"--master-port={arguments.master_port}"]
        torchrun += [arguments.script, *arguments.arguments]
        if is_local:
            found[host] = torchrun
            continue
        exported = {name: value for name, value in sorted(environment.items()) if name.startswith(_PASSED_ON)}
        exported["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
        assignments = [f"{name}={value}" for name, value in exported.items()]
        there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *assignments, *torchrun])}"
        port = ["-p", str(arguments.ssh_port)] if arguments.ssh_port else []
        # With a terminal of its own, what runs there ends with ssh.
        found[host] = ["ssh", "-tt", "-o", "BatchMode=yes", *port, host, there]
    return found


def run_all(commands: Mapping[str, Sequence[str]]) -> None:
    """Run one command per host until all have ended; the first that fails ends the others.

    Raises:
        InfinityError: one has failed; which, and its exit status.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for host, command in commands.items():
            running[host] = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while running:
            for host, process in list(running.items()):
                status = process.poll()
                if status is None:
                    continue
                del running[host]
                if status:
                    raise InfinityError(f"{host} ended with status {status}, and the others were ended. See its output")
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
