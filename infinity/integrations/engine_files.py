"""The engine's checkpoint inside a directory of a library's, and the durable run of which a library knows nothing.

Knows the engine's calls; must not know the libraries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.config import InfinityConfig, load_config
from infinity.engine.engine import Engine
from infinity.errors import StepError

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
        CheckpointError, ModelError, ValueError: as ``engine.load_checkpoint``.
    """
    path = checkpoint_in(directory, index)
    engine.load_checkpoint(
        path.parent, tag=path.name, load_module_only=only_module, load_random_states=False, load_data_position=False
    )


def has_resumed(engine: Engine) -> bool:
    """Whether the engine is in the midst of a durable run: `initialize` has gone on from a commit, or it has trained since."""
    return engine.config.infinity.durable is not None and engine.global_steps > 0


def refuse_to_begin(engine: Engine, call: str, *, loading: str) -> None:
    """Raise for a training that begins at step 0 of the library's, with an engine of which `has_resumed` is true.

    Args:
        call: what begins it, for the message.
        loading: how one of the library's checkpoints is loaded, for the cure.

    Raises:
        StepError: always.
    """
    raise StepError.order(
        call,
        f"the durable run is at step {engine.global_steps} already, and this training would begin at step 0, with the first "
        "batches and a new scheduler",
        cure=f"{loading}; or set infinity.durable to false; or, to begin anew, name another infinity.durable_path",
    )


def config_of(config: InfinityConfig, index: int) -> InfinityConfig:
    """That of the so-many-th engine of a script: what it keeps for itself lies beside that of the first."""
    if not index:
        return config
    infinity = config.infinity
    changes: dict[str, Any] = {}
    if infinity.run_log is not None:
        changes["infinity.run_log"] = f"{infinity.run_log}_{index}"
    if infinity.durable is not None:
        changes["infinity.durable_path"] = [f"{each.path}_{index}" for each in infinity.durable.directories]
    if infinity.timeline is not None:
        changes["infinity.timeline"] = str(infinity.timeline.with_stem(f"{infinity.timeline.stem}_{index}"))
    return load_config(dict(config), overrides=changes) if changes else config


def only_evaluating(config: InfinityConfig) -> InfinityConfig:
    """The config for an engine that trains nothing: without optimizer, and no durable run."""
    changes = {"optimizer": None, "scheduler": None, "infinity.durable": False}
    return load_config(dict(config), overrides=changes) if config.infinity.durable or config.optimizer else config
