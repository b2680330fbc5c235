"""Converts a checkpoint of DeepSpeed's into one of this engine, in bounded memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.checkpoint.saved import TIED, writing
from infinity.deepspeed.importer.model_states import ModelStates
from infinity.deepspeed.importer.optimizer_states import OptimizerStates, UniversalStates, loss_scale_of
from infinity.deepspeed.importer.pickles import COPY_ALL, ONE_STATE_DICT, FoundTensor, check
from infinity.errors import CheckpointError, InfinityError
from infinity.metrics.progress import progress
from infinity.numerics.plain_data import UNREADABLE

# Names of DeepSpeed's files: bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt, zero_pp_rank_3_mp_rank_00_model_states.pt
# (stage 3), mp_rank_00_model_states.pt (stages 1 and 2). Groups: data-parallel rank, model-parallel rank.
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_UNIVERSAL = "zero"
_STATE = "optimizer_state.pt"
_LATEST = ("latest", "latest_universal")
_PART_NUMEL = 1 << 20  # elements that are cast and written at a time: 4 MiB of fp32


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        source: the checkpoint that was read.
        folder: the checkpoint that was written.
        num_tensors, num_bytes: of the written tensors.
        version: of the DeepSpeed that wrote the source.
        num_steps: of the training so far.
        left_out: descriptions of what could not be converted.
    """

    source: Path
    folder: Path
    num_tensors: int
    num_bytes: int
    version: str
    num_steps: int
    left_out: list[str]


def convert(
    source: str | Path, target: str | Path, *, tag: str | None = None, skips_unknown: bool = False
) -> Converted:
    """Convert a checkpoint of DeepSpeed's for ``engine.load_checkpoint(target)``. No code of DeepSpeed is run.

    Args:
        source: directory that DeepSpeed's ``save_checkpoint`` wrote to, or a checkpoint itself: of ZeRO stage 1, 2 or
            3, of any number of ranks, or a universal one.
        target: made if it is missing; the checkpoint in it has the source's tag.
        tag: which checkpoint of the source; None: its latest.
        skips_unknown: leave out entries with objects of classes that are neither torch's nor DeepSpeed's.

    Raises:
        CheckpointError: the source is damaged or incomplete, or its kind cannot be converted.
        StorageError: the target cannot be written to or is full.
    """
    files = find(Path(source), tag)
    with progress("checking", sum(path.stat().st_size for path in files.all), is_shown=True) as note:
        for path in files.all:
            # All files first: a damaged one is found before anything is written.
            check(path, note)
    try:
        model, tensors, training_state, left_out = _contents(files, skips_unknown=skips_unknown)
    except InfinityError:
        raise
    except (*UNREADABLE, StopIteration) as error:
        reason = str(error)[:200] or type(error).__name__
        raise CheckpointError(files.folder, f"its files do not hold what DeepSpeed writes: {reason}") from error
    target, name = Path(target), files.folder.resolve().name
    if (target / name).exists():
        problem = "it exists already, and is not replaced"
        raise CheckpointError(target / name, problem, cure="Give another directory to write to")
    specs = [each.spec for each in tensors]
    num_bytes = sum(spec.num_bytes for spec in specs)
    with progress("writing", num_bytes, is_shown=True) as note, writing(target, name, specs, is_latest=True) as saved:
        for each in tensors:
            writer = saved.open_array(each.spec)
            for piece in each.pieces:
                for start in range(0, piece.numel(), _PART_NUMEL):
                    # A view of the mapped file: only this part is read into memory.
                    part = piece[start : start + _PART_NUMEL].to(each.spec.dtype).contiguous()
                    writer.write(part)
                    note(part.nbytes)
        saved.write_training_state(training_state)
    return Converted(files.folder, target / name, len(specs), num_bytes, model.version, model.num_steps, left_out)


def _contents(files: Files, *, skips_unknown: bool) -> tuple[ModelStates, list[FoundTensor], dict[str, Any], list[str]]:
    """Model states, all tensors, the training state, and descriptions of what is left out."""
    model = ModelStates(files.model, skips_unknown=skips_unknown)
    states: OptimizerStates | UniversalStates
    if files.universal is not None:
        states = UniversalStates(files.universal, files.universal / _STATE, model, skips_unknown=skips_unknown)
    else:
        states = OptimizerStates(files.optimizer, model, skips_unknown=skips_unknown)
    trained, scalars = states.tensors()
    tensors = [*trained, *model.fixed_tensors()]
    names: set[Any] = {name for each in tensors for name in (each.spec.fqn, each.spec.kind)}
    for name in names:
        if not isinstance(name, str) or name in ("", ".", ".."):  # it becomes the name of a folder
            raise ValueError(f"a tensor is named {name!r}")
    client_state, left_out = model.client_state()
    training_state = {
        "client_state": client_state,
        "counters": {**model.counters(), "loss_scale": loss_scale_of(states.scaler)},
        TIED: model.tied,
        **_of_optimizer(states.groups(), scalars),
    }
    if model.lr_scheduler is not None:
        training_state["lr_scheduler"] = dict(model.lr_scheduler)
    return model, tensors, training_state, left_out


def _of_optimizer(groups: Sequence[Mapping[str, Any]], scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's entries of training.json, see docs/reference/checkpoint-format.md.

    Args:
        groups: with FQNs as "params".
        scalars: FQN of a trained parameter with states -> its states that are not per element.
    """
    # torch numbers parameters through all groups: groups [a, b], [c] get names {0: a, 1: b, 2: c} and params [0, 1],
    # [2].
    names = dict(enumerate(fqn for group in groups for fqn in group["params"]))
    ids = iter(names)
    return {
        "param_groups": [{**group, "params": [next(ids) for _ in group["params"]]} for group in groups],
        "states": [[key, fqn, dict(scalars[fqn])] for key, fqn in names.items() if fqn in scalars],
        "others": {},
        "names": names,
    }


# ---------------------------------------------------------------------------------------------------- finding the files


@dataclass(frozen=True)
class Files:
    """Files of a checkpoint.

    Attributes:
        folder: of the checkpoint, named like its tag.
        model: files of model states: one, or in stage 3 one for each rank, in order.
        optimizer: files of optimizer states, one for each rank, in order; empty for a universal checkpoint.
        universal: folder of a universal checkpoint's tensors; None for another one.
    """

    folder: Path
    model: Sequence[Path]
    optimizer: Sequence[Path]
    universal: Path | None

    @property
    def all(self) -> list[Path]:
        """All files, those of a universal checkpoint's tensors included."""
        # Checked like the others. Of a universal checkpoint, each parameter has files of its own.
        tensors = sorted(self.universal.rglob("*.pt")) if self.universal is not None else []
        return [*self.model, *self.optimizer, *tensors]


def find(directory: Path, tag: str | None = None) -> Files:
    """Find the files of a checkpoint.

    Args:
        directory: where ``save_checkpoint`` wrote to, or the checkpoint itself.
        tag: which checkpoint; None: the one that ``latest`` names, or ``latest_universal``.

    Raises:
        CheckpointError: there is none, files are missing, or its kind cannot be converted.
    """
    folder = _folder(directory, tag)
    names = sorted(path.name for path in folder.iterdir())
    _refuse_parallel(folder, names)
    model = _by_rank(folder, names, _MODEL)
    universal = folder / _UNIVERSAL
    if (universal / _STATE).is_file():
        return Files(folder, _complete(folder, model), [], universal)
    optimizer = _by_rank(folder, names, _OPTIMIZER)
    if not optimizer:
        what = f"files {names[:4]}" if names else "no files"
        raise CheckpointError(
            folder,
            f"it has {what}, and none of 'zero_pp_rank_N_mp_rank_00_optim_states.pt'",
            cure="Give a checkpoint of ZeRO stage 1, 2 or 3, or a universal one; weights of another one are loaded by "
            "infinity.load_pretrained",
        )
    if not model:
        raise CheckpointError(folder, "it has no file '..._model_states.pt'", cure=COPY_ALL)
    return Files(folder, _complete(folder, model), _complete(folder, optimizer), None)


def _folder(directory: Path, tag: str | None) -> Path:
    if not directory.is_dir():
        problem = "there is no such directory"
        raise CheckpointError(directory, problem, cure="Give the one that save_checkpoint wrote to")
    if tag is not None:
        return _tagged(directory, tag, f"there is no checkpoint '{tag}' in it")
    if any(_MODEL.fullmatch(path.name) or _OPTIMIZER.fullmatch(path.name) for path in directory.iterdir()):
        return directory
    for name in _LATEST:
        latest = directory / name
        if latest.is_file():
            tag = latest.read_text(errors="replace").strip()
            return _tagged(directory, tag, f"its file '{name}' names '{tag}', which is not there")
    others = sorted(path.name for path in directory.iterdir() if path.is_dir())[:4]
    raise CheckpointError(
        directory,
        "it has no file 'latest'",
        cure=f"Give a checkpoint by its tag (--tag), one of {others}" if others else "Give one that DeepSpeed wrote to",
    )


def _tagged(directory: Path, tag: str, problem: str) -> Path:
    folder = directory / tag
    if not tag or folder.parent != directory or tag in (".", "..") or not os.path.isdir(folder):
        raise CheckpointError(directory, problem, cure="Give the tag of an existing checkpoint (--tag)")
    return folder


def _refuse_parallel(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        found = _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        kind = None
        # DeepSpeed's file names tell: layer_0_expert_3_..., layer_00-..., mp_rank_01_...
        if "expert" in name:
            kind = "a mixture of experts over several ranks (MoE)"
        elif name.startswith("layer_"):
            kind = "pipeline parallelism"
        elif found is not None and int(found.group(2)):
            kind = "tensor or pipeline parallelism"
        if kind is not None:
            problem = f"it belongs to a model that was divided by {kind}"
            raise CheckpointError(folder / name, problem, cure=ONE_STATE_DICT)


def _by_rank(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            rank = int(match.group(1) or 0)
            if rank in found:
                cure = "Remove the file that an earlier checkpoint left behind"
                raise CheckpointError(folder / name, f"'{found[rank].name}' is of the same rank", cure=cure)
            found[rank] = folder / name
    return found


def _complete(folder: Path, by_rank: dict[int, Path]) -> list[Path]:
    missing = [rank for rank in range(max(by_rank, default=-1) + 1) if rank not in by_rank]
    if missing or not by_rank:
        example = next(iter(by_rank.values())).name if by_rank else "..._model_states.pt"
        problem = f"the files of ranks {missing} are missing (named like '{example}')"
        raise CheckpointError(folder, problem, cure=COPY_ALL)
    return [by_rank[rank] for rank in sorted(by_rank)]
