"""Which processes train together: all of them, and some.

[Note: how a group ends] in ``infinity.distributed.process_groups`` says why groups are kept weakly.
"""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from infinity.distributed.causes import Causes, own_process
from infinity.distributed.collectives import Ranks
from infinity.distributed.process_groups import (
    call_torch,
    default_group,
    default_store,
    group_of,
    is_initialized,
    met,
    num_processes,
    number_of_launcher,
    process_rank,
)

_ALONE = Ranks()
_worlds: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
"""By torch's default group, what `world` made of it: see [Note: how a group ends]."""


def world() -> Ranks:
    """Return all processes of ``torch.distributed``'s default group, or this one alone. The first call is collective."""
    if not is_initialized() or num_processes() == 1:
        return _ALONE
    default = default_group()
    if default not in _worlds:
        takes_host_memory = "gloo" in call_torch("get_backend_config")
        group = None if takes_host_memory else group_of(None)
        place = process_rank(), range(num_processes()), group
        ranks = Ranks(*place)  # without causes, which are made by an exchange
        store, causes = default_store(), None
        if store is not None:
            # A launcher's store outlives a restart of the ranks, so the keys of each group have a random prefix.
            number = ranks.all_gather_ints("the first exchange of all processes", [secrets.randbits(62)])[0][0]
            processes = ranks.gather("telling of processes", own_process().encode())
            causes = Causes(store, f"infinity/{number}", ranks.index, [each.decode() for each in processes])
            causes.listen()
        met.append(ranks.num)
        _worlds[default] = Ranks(*place, causes)
    return _worlds[default]


def subsets(wanted: Iterable[Sequence[int]], purpose: str = "") -> dict[tuple[int, ...], Ranks]:
    """Return those of ``wanted`` (sets of ranks) that this process is in. A collective call: ``wanted`` is equal on all ranks.

    Each set gets a process group of its own: the script may use and destroy its groups independently.

    ``purpose``: for exchanges in another thread, which need groups of their own, one of all processes included. Both groups
    of a set count the bytes that they send together.

    [Note: names of groups] Members of a group find each other by its name. torch's new_group numbers the groups, so all ranks
    have to make all groups in the same order. With use_local_synchronization the name follows from the number of groups that
    a rank is in, which differs if a script has put some ranks into more groups than others.
    """
    everyone = world()
    # (purpose, members) -> the sets that this process is in.
    known: dict[tuple[str, tuple[int, ...]], Ranks] = everyone.services.setdefault("subsets", {})
    most = everyone.num if purpose else everyone.num - 1
    several = sorted({each for members in wanted if 0 < len(each := tuple(sorted(members))) <= most})
    mine = {members for members in several if everyone.number in members}
    present = {members for (use, members), ranks in known.items() if use == purpose and ranks.has_group}
    are_lacking_by_rank = everyone.all_gather_ints(
        "making process groups", [members in mine - present for members in several]
    )
    for members, *are_lacking in zip(several, *are_lacking_by_rank, strict=True):
        if any(are_lacking):
            # Called while a member is waited for: raises if one on this machine has ended.
            group = group_of(members, everyone.check_local_ranks) if len(members) > 1 else None
            if members in mine:
                same = everyone if members == everyone.members else known.get(("", members))
                known[purpose, members] = Ranks(everyone.number, members, group, everyone.causes, same)
    # A rank that ends right now would make the others fail while they still join their groups.
    everyone.all_gather_ints("having made process groups")
    return {everyone.members: everyone} | {members: known[purpose, members] for members in mine}


class Numbered:
    """A number that no other one in use has, on any process: for what is exchanged beside the rest, by one of several engines.

    All processes make it at the same point; each ends its use when nothing of it is under way any more.
    """

    def __init__(self) -> None:
        everyone = world()
        self._used: set[int] = everyone.services.setdefault("numbers", set())
        free = max(self._used, default=-1) + 1
        self.number = max(found for (found,) in everyone.all_gather_ints("numbering process groups", [free]))
        self._used.add(self.number)

    def end(self) -> None:
        """It may be another one's from now on. From any thread; doing so again does nothing."""
        used, self._used = self._used, set()
        used.discard(self.number)


def num_local_processes() -> int:
    """How many of those that train together are on this machine. All processes call it at the same point."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    hosts = world().gather("counting the processes of each machine", socket.gethostname().encode())
    return number_of_launcher("LOCAL_WORLD_SIZE", "") if told and len(hosts) > 1 else hosts.count(hosts[world().index])
