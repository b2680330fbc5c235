"""The engine's checkpoint inside a directory of a library's.

Knows the engine's calls; must not know the libraries.
"""

from __future__ import annotations

from pathlib import Path

from infinity.engine.engine import Engine

_FOLDER = "infinity"


def checkpoint_in(directory: str | Path, index: int = 0) -> Path:
    """Where the checkpoint of the so-many-th engine lies in a directory of a library's."""
    return Path(directory) / (f"{_FOLDER}_{index}" if index else _FOLDER)


def save_engine(engine: Engine, directory: str | Path, index: int = 0) -> None:
    """Write the engine's checkpoint (weights, main weights, optimizer states) into a directory of a library's.

    Raises:
        StorageError: the directory cannot take it.
    """
    path = checkpoint_in(directory, index)
    engine.save_checkpoint(path.parent, tag=path.name, save_latest=False)


def load_engine(engine: Engine, directory: str | Path, index: int = 0, *, only_module: bool = False) -> None:
    """Go on from what `save_engine` wrote; random generators and positions of loaders are the library's business.

    Raises:
        CheckpointError, UnsupportedModelError, ValueError: as ``engine.load_checkpoint``.
    """
    path = checkpoint_in(directory, index)
    engine.load_checkpoint(
        path.parent, tag=path.name, load_module_only=only_module, load_random_states=False, load_data_position=False
    )
