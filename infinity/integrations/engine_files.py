"""The engine's checkpoint inside a library's checkpoint directory, and durable runs below a library's training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.config import InfinityConfig, load_config
from infinity.engine.engine import Engine
from infinity.errors import StepError

_FOLDER = "infinity"


def checkpoint_in(directory: str | Path, index: int = 0) -> Path:
    """Path of the checkpoint of a script's engine number ``index``: ``infinity``, ``infinity_1``, ..."""
    return Path(directory) / (f"{_FOLDER}_{index}" if index else _FOLDER)


def has_checkpoint(directory: str | Path, index: int = 0) -> bool:
    """Whether a library's directory has the checkpoint of that engine."""
    return checkpoint_in(directory, index).exists()


def save_engine(engine: Engine, directory: str | Path, index: int = 0) -> None:
    """Write the engine's checkpoint into a directory of a library's.

    Raises:
        StorageError: the directory cannot be written to or is full.
    """
    path = checkpoint_in(directory, index)
    engine.save_checkpoint(path.parent, tag=path.name, save_latest=False)


def load_engine(engine: Engine, directory: str | Path, index: int = 0, *, only_module: bool = False) -> None:
    """Load what `save_engine` wrote, without random states and data positions: libraries restore those themselves.

    Raises:
        CheckpointError, ModelError, ValueError: as ``engine.load_checkpoint``.
    """
    path = checkpoint_in(directory, index)
    engine.load_checkpoint(
        path.parent, tag=path.name, load_module_only=only_module, load_random_states=False, load_data_position=False
    )


def has_resumed(engine: Engine) -> bool:
    """Whether the engine has a durable run that is past step 0."""
    return engine.config.infinity.durable is not None and engine.global_steps > 0


def refuse_to_begin(engine: Engine, call: str, *, loading: str) -> None:
    """Raise if a library begins at step 0 with an engine that `has_resumed`.

    Args:
        call: the call that begins the training, for the message.
        loading: how to load a checkpoint of the library's, for the cure.

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
    """The config of engine number ``index``: run log, durable run and timeline get paths of their own."""
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
    """The config for an engine that only evaluates: without optimizer, scheduler and durable run."""
    changes = {"optimizer": None, "scheduler": None, "infinity.durable": False}
    return load_config(dict(config), overrides=changes) if config.infinity.durable or config.optimizer else config
