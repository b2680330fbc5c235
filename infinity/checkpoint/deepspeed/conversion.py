"""Turns a checkpoint that DeepSpeed wrote into one of ours, a few MiB at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.checkpoint.arrays import ArraySpec
from infinity.checkpoint.deepspeed.contents import Contents
from infinity.checkpoint.deepspeed.files import Files, find
from infinity.checkpoint.deepspeed.model_states import ModelStates
from infinity.checkpoint.deepspeed.optimizer_states import OptimizerStates, loss_scale_of
from infinity.checkpoint.deepspeed.pickles import check
from infinity.checkpoint.deepspeed.universal import UniversalStates
from infinity.checkpoint.saved import TIED, writing
from infinity.errors import CheckpointError

_PART_NUMEL = 1 << 20

Progress = Callable[[str, int, int], None]
"""Told of what is being done, of bytes that have been done since the last call, and of how many there are in all."""


@dataclass(frozen=True)
class Converted:
    """What a conversion did.

    Attributes:
        source: the checkpoint that was read.
        folder: the one that was written.
        num_tensors: in it.
        num_bytes: of their elements.
        version: of the DeepSpeed that wrote the source.
        num_steps: after how many.
        left_out: what of the source has no place in ours.
    """

    source: Path
    folder: Path
    num_tensors: int
    num_bytes: int
    version: str
    num_steps: int
    left_out: list[str]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    tag: str | None = None,
    skips_unknown: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Converted:
    """Write a checkpoint that ``engine.load_checkpoint(target)`` goes on from. Nothing of DeepSpeed is imported or run.

    Args:
        source: directory that DeepSpeed's ``save_checkpoint`` wrote to, or a checkpoint's own: of ZeRO stage 1, 2 or 3,
            of any number of ranks, or a universal one.
        target: made if it is missing; the checkpoint in it has the source's tag.
        tag: which one of the source; None: its latest.
        skips_unknown: whether to leave out what holds objects of classes that are neither torch's nor DeepSpeed's.
        progress: told how far it is.

    Raises:
        CheckpointError: the source is damaged, not whole, or of a kind that cannot be taken over.
        StorageError: the target cannot take it.
    """
    files = find(Path(source), tag)
    total = sum(path.stat().st_size for path in files.all)
    for path in files.all:
        check(path, lambda done: progress("Checking", done, total))
    contents, model = _read(files, skips_unknown=skips_unknown)
    target, name = Path(target), files.folder.resolve().name
    if (target / name).exists():
        raise CheckpointError(
            target / name, "it is there already, and is not replaced", cure="Give another directory to write to"
        )
    specs = [ArraySpec.of(each.group, each.fqn, each.kind, each.shape, each.dtype) for each in contents.tensors]
    num_bytes = sum(each.num_bytes for each in contents.tensors)
    with writing(target, name, specs, is_latest=True) as saved:
        for each, spec in zip(contents.tensors, specs, strict=True):
            writer = saved.open_array(spec)
            for piece in each.pieces:
                for start in range(0, piece.numel(), _PART_NUMEL):
                    part = piece[start : start + _PART_NUMEL].to(each.dtype).contiguous()
                    writer.write(part)
                    progress("Writing", part.numel() * each.dtype.itemsize, num_bytes)
        saved.write_rest(_rest(contents))
    return Converted(
        files.folder,
        target / name,
        len(specs),
        num_bytes,
        model.version,
        model.num_steps,
        list(contents.left_out),
    )


def _read(files: Files, *, skips_unknown: bool) -> tuple[Contents, ModelStates]:
    model = ModelStates(files.model, skips_unknown=skips_unknown)
    states: OptimizerStates | UniversalStates
    if files.universal is not None:
        states = UniversalStates(files.universal, files.optimizer_state, model, skips_unknown=skips_unknown)
    else:
        states = OptimizerStates(files.optimizer, model, skips_unknown=skips_unknown)
    trained, scalars = states.tensors()
    client_state, left_out = model.client_state()
    counters = {**model.counters(), "loss_scale": loss_scale_of(states.scaler)}
    tensors = [*trained, *model.fixed_tensors()]
    contents = Contents(
        tensors, states.groups(), scalars, model.lr_scheduler, counters, client_state, left_out, model.tied
    )
    return contents, model


def _rest(contents: Contents) -> Mapping[str, Any]:
    """All that is no large tensor, see the format's description."""
    names: dict[int, str] = {}
    groups = []
    for group in contents.groups:
        ids = list(range(len(names), len(names) + len(group.fqns)))
        names.update(zip(ids, group.fqns, strict=True))
        groups.append({**group.settings, "params": ids})
    states = [[key, fqn, dict(contents.scalars[fqn])] for key, fqn in names.items() if fqn in contents.scalars]
    rest = {
        "client_state": dict(contents.client_state),
        "param_groups": groups,
        "states": states,
        "others": {},
        "names": names,
        "counters": dict(contents.counters),
        TIED: dict(contents.tied),
    }
    if contents.lr_scheduler is not None:
        rest["lr_scheduler"] = dict(contents.lr_scheduler)
    return rest


__all__ = ["Converted", "Progress", "convert"]
