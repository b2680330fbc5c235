"""Finds the files of one of DeepSpeed's checkpoints, and refuses by name those that are not for one process's model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.deepspeed.importer.pickles import COPY_ALL, ONE_STATE_DICT
from infinity.errors import CheckpointError

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_UNIVERSAL = "zero"
_STATE = "optimizer_state.pt"
_LATEST = ("latest", "latest_universal")


@dataclass(frozen=True)
class Files:
    """Where everything lies.

    Attributes:
        folder: of the checkpoint, named like its tag.
        model: the model's states: one file, or in stage 3 one of each rank, in their order.
        optimizer: the optimizer's states of each rank, in their order; empty for a universal checkpoint.
        universal: folder of a universal checkpoint's tensors; None for the others.
    """

    folder: Path
    model: Sequence[Path]
    optimizer: Sequence[Path]
    universal: Path | None

    @property
    def all(self) -> list[Path]:
        """Each of them, the universal checkpoint's tensors as well."""
        tensors = sorted(self.universal.rglob("*.pt")) if self.universal is not None else []
        return [*self.model, *self.optimizer, *tensors]

    @property
    def optimizer_state(self) -> Path:
        """What a universal checkpoint has of the optimizer besides tensors."""
        return self.folder / _UNIVERSAL / _STATE


def find(directory: Path, tag: str | None = None) -> Files:
    """Find a checkpoint.

    Args:
        directory: where ``save_checkpoint`` wrote to, or the checkpoint's own.
        tag: which one; None: the one that ``latest`` names, and else ``latest_universal``.

    Raises:
        CheckpointError: there is none, files are missing, or it is of a kind that cannot be taken over.
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
        raise CheckpointError(
            directory, "there is no such directory", cure="Give the one that save_checkpoint wrote to"
        )
    if tag is not None:
        return _tagged(directory, tag, f"there is no checkpoint '{tag}' in it")
    if any(_MODEL.fullmatch(path.name) or _OPTIMIZER.fullmatch(path.name) for path in directory.iterdir()):
        return directory
    for name in _LATEST:
        latest = directory / name
        if latest.is_file():
            tag = latest.read_text().strip()
            return _tagged(directory, tag, f"its file '{name}' names '{tag}', which is not there")
    others = sorted(path.name for path in directory.iterdir() if path.is_dir())[:4]
    raise CheckpointError(
        directory,
        "it has no file 'latest'",
        cure=f"Give a checkpoint by its tag (--tag), one of {others}" if others else "Give one that DeepSpeed wrote to",
    )


def _tagged(directory: Path, tag: str, problem: str) -> Path:
    folder = directory / tag
    if not tag or folder.parent != directory or tag in (".", "..") or not folder.is_dir():
        raise CheckpointError(directory, problem, cure="Give the tag of one that is there (--tag)")
    return folder


def _refuse_parallel(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        found = _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        kind = None
        if "expert" in name:
            kind = "a mixture of experts over several ranks (MoE)"
        elif name.startswith("layer_"):
            kind = "pipeline parallelism"
        elif found is not None and int(found.group(2)):
            kind = "tensor or pipeline parallelism"
        if kind is not None:
            raise CheckpointError(
                folder / name, f"it belongs to a model that was divided by {kind}", cure=ONE_STATE_DICT
            )


def _by_rank(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            rank = int(match.group(1) or 0)
            if rank in found:
                raise CheckpointError(
                    folder / name,
                    f"'{found[rank].name}' is of the same rank",
                    cure="Remove the one that was left of an earlier checkpoint",
                )
            found[rank] = folder / name
    return found


def _complete(folder: Path, by_rank: dict[int, Path]) -> list[Path]:
    missing = [rank for rank in range(max(by_rank, default=-1) + 1) if rank not in by_rank]
    if missing or not by_rank:
        example = next(iter(by_rank.values())).name if by_rank else "..._model_states.pt"
        raise CheckpointError(
            folder, f"files of ranks {missing} are missing, such as '{example}' is one", cure=COPY_ALL
        )
    return [by_rank[rank] for rank in sorted(by_rank)]
