"""Cuts a model into units: one per repeated block, and groups of the other parameters in order of registration."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from infinity.errors import ConfigError
from infinity.units.tiles import tiled_in

# Leftovers are grouped up to the size of the largest block, but at least up to 1 MiB: a unit of a few bytes would cost
# a request to the drive of its own. Also the scale of models without blocks.
_SMALL_UNIT_BYTES = 1 << 20


@dataclass
class UnitMembers:
    """A unit before it is made: a name for messages, and the FQNs of its parameters in registration order."""

    name: str
    fqns: list[str] = field(default_factory=list)
    num_bytes: int = 0


def find_blocks(module: nn.Module, patterns: Sequence[str] = ()) -> list[str]:
    """FQNs of the modules that become units of their own.

    Without ``patterns``: the children of every ``ModuleList`` or ``Sequential`` that holds two or more modules of one
    class with parameters (outermost lists only). With ``patterns``: every outermost module whose class name or FQN
    matches one of them (shell-style wildcards).

    Raises:
        ConfigError: a pattern matches nothing.
    """
    blocks: list[str] = []
    matched: set[str] = set()

    def by_pattern(child: nn.Module, fqn: str) -> bool:
        hits = {p for p in patterns if fnmatch.fnmatchcase(type(child).__name__, p) or fnmatch.fnmatchcase(fqn, p)}
        matched.update(hits)
        return bool(hits)

    def has_parameters(child: nn.Module) -> bool:
        return any(True for _ in child.parameters())

    def is_list_of_blocks(parent: nn.Module) -> bool:
        if patterns or not isinstance(parent, nn.ModuleList | nn.Sequential):
            return False
        # Two of a class, so that a Sequential of a Linear and a ReLU is no list of blocks, and one of Linear, ReLU,
        # Linear is one.
        classes = [type(block) for block in parent if has_parameters(block)]
        return any(classes.count(kind) >= 2 for kind in set(classes))

    def visit(parent: nn.Module, prefix: str) -> None:
        is_list = is_list_of_blocks(parent)
        for name, child in parent.named_children():
            # Not visited any deeper once it is a block: inner lists (experts of a layer, say) belong to their block's
            # unit.
            if has_parameters(child) if is_list else by_pattern(child, f"{prefix}{name}"):
                blocks.append(f"{prefix}{name}")
            elif not is_list:
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    unmatched = [p for p in patterns if p not in matched]
    if unmatched:
        classes = sorted({type(m).__name__ for m in module.modules()})
        raise ConfigError(
            f"infinity.units: {', '.join(map(repr, unmatched))} matches no module of the model. Give class names, or "
            f"patterns of module names; the model's classes are {', '.join(classes)}."
        )
    return blocks


def partition(
    module: nn.Module,
    item_bytes: int,
    patterns: Sequence[str] = (),
    takes: Callable[[nn.Parameter], bool] = lambda parameter: True,
) -> list[UnitMembers]:
    """Assign every parameter to exactly one unit, in registration order. Each tile (`infinity.units.tiles`) is its own
    unit.

    Args:
        module: the model.
        item_bytes: bytes of one element of the compute dtype, used for sizes.
        patterns: see `find_blocks`.
        takes: whether a parameter is assigned; others are in no unit.
    """
    # Worked example: embed (tied to lm_head), layers.0, layers.1, norm, with blocks of 8 MB.
    #   embed.weight has the home None (embed and lm_head are outside of blocks): it begins a unit of leftovers
    #   layers.0 and layers.1 are units of their own, whatever their size; each of them ends the leftovers before it
    #   norm.weight begins new leftovers, "norm"; lm_head.weight is not listed again
    blocks = find_blocks(module, patterns)
    block_set = set(blocks)
    tiles = tiled_in(module)

    def block_of(fqn: str) -> str | None:
        parts = fqn.split(".")
        return next((".".join(parts[:n]) for n in range(1, len(parts)) if ".".join(parts[:n]) in block_set), None)

    # A parameter used by two blocks, or by a block and a module outside, has two homes and becomes a leftover. In the
    # unit of one of its blocks, it would keep that whole block in memory whenever the other user runs.
    homes: dict[int, set[str | None]] = {}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        homes.setdefault(id(parameter), set()).add(block_of(fqn))

    home_of = {key: found.pop() if len(found) == 1 else None for key, found in homes.items()}
    named = {fqn: parameter for fqn, parameter in module.named_parameters() if takes(parameter)}
    sizes: Counter[str] = Counter()
    for parameter in named.values():
        home = home_of[id(parameter)]
        if home is not None and id(parameter) not in tiles:
            sizes[home] += parameter.numel() * item_bytes
    most_bytes = max([_SMALL_UNIT_BYTES, *sizes.values()])

    by_home: dict[str, UnitMembers] = {}  # blocks and tiles
    units: list[UnitMembers] = []
    leftovers: UnitMembers | None = None
    owner_of_last = ""
    for fqn, parameter in named.items():
        home = fqn if id(parameter) in tiles else home_of[id(parameter)]
        num_bytes = parameter.numel() * item_bytes
        if home is not None:
            leftovers = None
            if home not in by_home:
                by_home[home] = UnitMembers(home)
                units.append(by_home[home])
            unit = by_home[home]
        else:
            owner = fqn.rpartition(".")[0]
            # Parameters of one module stay together even if that is too large: weight and bias are used at the same
            # moment.
            too_large = leftovers is not None and leftovers.num_bytes + num_bytes > most_bytes
            if leftovers is None or (too_large and owner != owner_of_last):
                leftovers = UnitMembers(owner or fqn)
                units.append(leftovers)
            owner_of_last = owner
            unit = leftovers
        unit.fqns.append(fqn)
        unit.num_bytes += num_bytes
    return units


def used_together(model: nn.Module, patterns: Sequence[str], unit_of: Mapping[int, int]) -> tuple[frozenset[int], ...]:
    """For each block, the units of its parameters, which must fit into memory together. Shared weights add other units.

    Args:
        model: the model.
        patterns: see `find_blocks`.
        unit_of: ``id`` of a parameter -> index of its unit.
    """
    modules = dict(model.named_modules())
    blocks = [modules[fqn] for fqn in find_blocks(model, patterns)]
    tiles = tiled_in(model)  # not counted: tiles are fetched and released one by one while their block runs
    return tuple(
        frozenset(unit_of[id(p)] for p in block.parameters() if id(p) in unit_of and id(p) not in tiles)
        for block in blocks
    )
