"""DeepSpeed's module ``utils.zero_to_fp32``: fp32 weights of a checkpoint of this engine.

``python -m infinity export`` writes them without holding them in memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.safetensors_export import cut, export_checkpoint
from infinity.checkpoint.saved import Checkpoint, SavedTensor
from infinity.config.schema.quantities import parse_bytes
from infinity.errors import ConfigError
from infinity.units.unit import cast_dtype
from swapper.volumes.publish import make_directory, opener

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor of a checkpoint that is read by `contiguous`."""

    saved: SavedTensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return torch.Size(self.saved.shape)

    @property
    def dtype(self) -> torch.dtype:
        """fp32 for floating-point tensors of more than 8 bits, else the saved dtype."""
        return cast_dtype(self.saved.dtype, torch.float32)

    def contiguous(self) -> torch.Tensor:
        """Read and check the tensor. Returns it on the CPU.

        Raises:
            CheckpointError: it is damaged.
        """
        return self.saved.read().to(self.dtype)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: Any = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The weights and buffers of a checkpoint, as fp32.

    Args:
        checkpoint_dir: where `Engine.save_checkpoint` has written to.
        tag: which checkpoint; None: the newest.
        exclude_frozen_parameters: must be False: a checkpoint does not record which parameters are frozen.
        lazy_mode: give a `LazyTensor` for each; False: tensors on the CPU.

    Returns:
        FQN -> tensor, for ``load_state_dict``. A tied weight is one tensor under all of its names.

    Raises:
        CheckpointError: there is none, or it is damaged. Convert DeepSpeed's own checkpoints first, by
            ``python -m infinity import-deepspeed``.
        ConfigError: ``exclude_frozen_parameters`` is true.
    """
    if exclude_frozen_parameters:
        problem = "a checkpoint does not say which parameters are frozen"
        cure = "Take those out of the dict whose parameters do not require a gradient"
        raise ConfigError.value("exclude_frozen_parameters", True, problem, cure=cure)
    checkpoint = Checkpoint.open(checkpoint_dir, tag)
    lazy = {
        fqn: LazyTensor(saved) for group in ("parameters", "buffers") for fqn, saved in checkpoint.of(group).items()
    }
    # The same object under all names of a tied weight: `_read` and the shards below go by identity.
    lazy |= {fqn: lazy[first] for fqn, first in checkpoint.omitted.tied.items() if first in lazy and fqn not in lazy}
    return dict(lazy) if lazy_mode else _read(lazy)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str | Path, tag: Any = None) -> nn.Module:
    """Load these weights into ``model``, on the CPU.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: Any = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of `get_fp32_state_dict_from_zero_checkpoint` to files.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: as there.
        output_dir: made if it is missing.
        max_shard_size: bytes of a file, if it has more than one tensor; one file is in memory at a time. None: one file.
        safe_serialization: ``model.safetensors``, streamed; False: ``pytorch_model.bin``, by ``torch.save``. With several
            files there is an index beside them, as transformers has it.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: frozen parameters are to be left out.
        StorageError: the directory cannot take the safetensors.
    """
    # 1 << 62: no limit, so one file.
    output, limit = Path(output_dir), parse_bytes(max_shard_size) if max_shard_size is not None else 1 << 62
    lazy = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True)
    if safe_serialization:
        export_checkpoint(Checkpoint.open(checkpoint_dir, tag), output, limit, dtype=torch.float32)
        return
    make_directory(output)
    tied: dict[LazyTensor, list[str]] = {}  # tied names go into the same file, and count once
    for fqn, tensor in lazy.items():
        tied.setdefault(tensor, []).append(fqn)
    shards = [[fqn for tensor in shard for fqn in tied[tensor]] for shard in cut(tied, limit, _num_bytes)]
    names = [f"pytorch_model-{number:05}-of-{len(shards):05}.bin" for number in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else ["pytorch_model.bin"]
    for name, shard in zip(names, shards, strict=True):
        # torch.save needs all tensors of a file in memory at once.
        with open(output / name, "wb", opener=opener) as file:
            torch.save(_read({fqn: lazy[fqn] for fqn in shard}), file)
    if len(names) > 1:
        found = {fqn: name for name, shard in zip(names, shards, strict=True) for fqn in shard}
        index = {"metadata": {"total_size": sum(map(_num_bytes, tied))}, "weight_map": found}
        with open(output / "pytorch_model.bin.index.json", "w", opener=opener) as text:
            text.write(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_script(directory: Path) -> None:
    """Write ``zero_to_fp32.py``, which writes these weights of the checkpoints in its directory, as DeepSpeed's does."""
    try:
        make_directory(directory)
        with open(directory / "zero_to_fp32.py", "w", opener=opener) as file:
            file.write(_SCRIPT)
    except OSError as error:  # the checkpoint itself is complete
        logger.warning("zero_to_fp32.py was not written (%s). infinity export does the same", error)


def main() -> None:
    """The command line of that script."""
    parser = argparse.ArgumentParser(description="writes the fp32 weights of a checkpoint as pytorch_model.bin")
    parser.add_argument("checkpoint_dir", help="directory of the checkpoints")
    parser.add_argument("output_dir", help="directory of the files; made if it is missing")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of a file")
    parser.add_argument("--safe_serialization", action="store_true", help="write model.safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint; by default the newest")
    convert_zero_checkpoint_to_fp32_state_dict(**vars(parser.parse_args()))


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Write a small file for ``torch.load``, from which Lightning reads the ZeRO stage. Returns its path in a list.

    Args:
        checkpoint_dir: folder of the checkpoint itself, with the tag.

    Raises:
        CheckpointError: it is not a checkpoint of this engine, or damaged.
    """
    Checkpoint(Path(checkpoint_dir))
    return [_written("optimizer", {"optimizer_state_dict": {"zero_stage": 3}})]


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Write a small file for ``torch.load`` with the checkpoint's ``client_state``. Returns its path.

    Arguments and errors as in `get_optim_files`. The file is removed at the end of the process.
    """
    return _written("model", Checkpoint(Path(checkpoint_dir)).training_state()["client_state"] or {})


_SCRIPT = '''#!/usr/bin/env python
"""Writes the fp32 weights of a checkpoint: python zero_to_fp32.py . OUTPUT_DIRECTORY"""

from infinity.deepspeed.contents.fp32_weights import main

main()
'''


def _written(name: str, content: dict[str, Any]) -> str:
    with tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".pt", dir=_scratch().name, delete=False) as file:
        torch.save(content, file)
    return file.name


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    # Cached, so that it is removed at the end of the process, and not before.
    return tempfile.TemporaryDirectory(prefix="infinity-")


def _read(lazy: dict[str, LazyTensor]) -> dict[str, torch.Tensor]:
    """Read all tensors. A tied weight is read once."""
    tensors = {each: each.contiguous() for each in dict.fromkeys(lazy.values())}
    return {fqn: tensors[each] for fqn, each in lazy.items()}


def _num_bytes(tensor: LazyTensor) -> int:
    return tensor.shape.numel() * tensor.dtype.itemsize
