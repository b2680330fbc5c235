"""Turns a checkpoint that DeepSpeed wrote into one of ours, a few MiB at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.checkpoint.saved import TIED, writing
from infinity.deepspeed.importer.files import Files, find
from infinity.deepspeed.importer.model_states import ModelStates
from infinity.deepspeed.importer.optimizer_states import OptimizerStates, UniversalStates, loss_scale_of
from infinity.deepspeed.importer.pickles import FoundTensor, check
from infinity.errors import CheckpointError, InfinityError

_PART_NUMEL = 1 << 20
_OTHER_CONTENTS = (
    *(LookupError, TypeError, ValueError, AttributeError),
    *(ArithmeticError, RuntimeError, MemoryError, StopIteration),
)
"""What code raises that meets values of other types and sizes than it was written for."""

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
    try:
        model, tensors, rest, left_out = _contents(files, skips_unknown=skips_unknown)
    except InfinityError:
        raise
    except _OTHER_CONTENTS as error:
        reason = str(error)[:200] or type(error).__name__
        raise CheckpointError(files.folder, f"its files hold something else than DeepSpeed writes: {reason}") from error
    target, name = Path(target), files.folder.resolve().name
    if (target / name).exists():
        raise CheckpointError(
            target / name, "it is there already, and is not replaced", cure="Give another directory to write to"
        )
    specs = [each.spec for each in tensors]
    num_bytes = sum(spec.num_bytes for spec in specs)
    with writing(target, name, specs, is_latest=True) as saved:
        for each in tensors:
            writer = saved.open_array(each.spec)
            for piece in each.pieces:
                for start in range(0, piece.numel(), _PART_NUMEL):
                    part = piece[start : start + _PART_NUMEL].to(each.spec.dtype).contiguous()
                    writer.write(part)
                    progress("Writing", part.nbytes, num_bytes)
        saved.write_rest(rest)
    return Converted(files.folder, target / name, len(specs), num_bytes, model.version, model.num_steps, left_out)


def _contents(files: Files, *, skips_unknown: bool) -> tuple[ModelStates, list[FoundTensor], dict[str, Any], list[str]]:
    """The model's states, all tensors, everything else, and what is left out."""
    model = ModelStates(files.model, skips_unknown=skips_unknown)
    states: OptimizerStates | UniversalStates
    if files.universal is not None:
        states = UniversalStates(files.universal, files.optimizer_state, model, skips_unknown=skips_unknown)
    else:
        states = OptimizerStates(files.optimizer, model, skips_unknown=skips_unknown)
    trained, scalars = states.tensors()
    client_state, left_out = model.client_state()
    rest = {
        "client_state": client_state,
        "counters": {**model.counters(), "loss_scale": loss_scale_of(states.scaler)},
        TIED: model.tied,
        **_of_optimizer(states.groups(), scalars),
    }
    if model.lr_scheduler is not None:
        rest["lr_scheduler"] = dict(model.lr_scheduler)
    return model, [*trained, *model.fixed_tensors()], rest, left_out


def _of_optimizer(groups: Sequence[Mapping[str, Any]], scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What is no large tensor, see the format's description.

    Args:
        groups: whose members are FQNs.
        scalars: FQN of a trained parameter with states -> those that are one number.
    """
    names = dict(enumerate(fqn for group in groups for fqn in group["params"]))
    ids = iter(names)
    return {
        "param_groups": [{**group, "params": [next(ids) for _ in group["params"]]} for group in groups],
        "states": [[key, fqn, dict(scalars[fqn])] for key, fqn in names.items() if fqn in scalars],
        "others": {},
        "names": names,
    }
