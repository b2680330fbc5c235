"""Everything `infinity` raises on purpose.

    InfinityError
    ├── ConfigError (ValueError)               the JSON, or an argument that overrides it
    │   ├── StorageError                       a directory that is missing, not writable or too small
    │   └── BudgetTooSmallError                a memory budget below the minimum
    ├── ModelError (ValueError)                the model, or its parameter groups, cannot be taken as they are
    ├── OptimizerNotPageableError (ValueError) the optimizer mixes elements or needs a closure
    ├── CheckpointError (ValueError)           a checkpoint, weights or the log of a run cannot be read
    ├── AccessError (RuntimeError)             a weight, gradient or state was read or written in an unsupported way
    ├── StepError (RuntimeError)               the training loop and the engine disagree, or a step cannot be committed
    ├── RankError (RuntimeError)               several processes train together, and one is gone or elsewhere
    ├── EngineBusyError (RuntimeError)         another call is inside the engine
    ├── EngineClosedError (RuntimeError)       a call after `close()`, or in a forked child
    └── LibraryError (ImportError)             another version of a library is needed, or it was imported too early

    NonFiniteLossWarning (UserWarning)         the loss is NaN or infinite, and training continues
    OtherNumbersWarning (UserWarning)          a dtype, a layout or a sparse gradient is not kept as torch keeps it

Reads and writes that fail raise the errors of `swapper`, which name file, offset, bytes and errno.

There is one class for each thing that you can do about an error. Constructors and class methods take the facts and
write the message, so messages are worded in this file only.
"""

from __future__ import annotations

import copyreg
import math
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal


def format_bytes(num_bytes: int, *, is_least: bool = False) -> str:
    """Exact bytes with a readable size behind them: `402653184 bytes (402.7 MB)`.

    ``is_least``: round it up, as a user copies it into a config. 3640000 bytes are 3.7 MB at least.
    """
    return f"{num_bytes} bytes ({size(num_bytes, is_least=is_least)})" if num_bytes >= 1e6 else f"{num_bytes} bytes"


def size(num_bytes: float, *, is_least: bool = False) -> str:
    """Bytes for people, in decimal units as drives are sold: `23.4 GB`. Memory of 64 GiB is 68.7 GB."""
    for factor, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= factor:
            tenths = num_bytes / factor * 10
            return f"{(math.ceil(tenths) if is_least else tenths) / 10:,.1f} {name}"
    return f"{num_bytes:,.0f} bytes"


def listed(words: Collection[str], between: str = ", ", most: int = 4) -> str:
    """The first words, and how many there are besides."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return f"{between.join([*words][:most])}{more}"


def _reduced(error: Exception) -> tuple[Any, ...]:
    # DataLoader workers and launchers pickle exceptions, to send them between processes.
    # BaseException would call the constructor with the finished message in place of the facts.
    return copyreg.__newobj__, (type(error), *error.args), error.__dict__  # type: ignore[attr-defined]


class InfinityError(Exception):
    """Base of all errors of this package."""

    __reduce__ = _reduced


# --------------------------------------------------------------------------------------------------------------- config


class ConfigError(InfinityError, ValueError):
    """The configuration cannot be used. `key` is the dotted path when one key is to blame."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        self.key = key
        super().__init__(message)

    @classmethod
    def in_text(cls, source: str, problem: str, *, cure: str, key: str | None = None) -> ConfigError:
        """The configuration's text cannot be read."""
        return cls(f"{source}: {problem}. {cure}", key=key)

    @classmethod
    def unknown_keys(cls, unknown: Sequence[tuple[str, str | None]]) -> ConfigError:
        """One or more keys that neither DeepSpeed nor this package knows.

        Args:
            unknown: pairs (dotted path, what to write instead, or None when nothing is near).
        """
        described = [f"'{path}'{_hint(path, nearest) if nearest else ''}" for path, nearest in unknown]
        noun = "key" if len(described) == 1 else "keys"
        return cls(
            f"unknown config {noun} {', '.join(described)}. Correct or remove the {noun}; "
            'with "infinity": {"strict": false} unknown keys are only warned about',
            key=unknown[0][0],
        )

    @classmethod
    def value(cls, key: str, value: object, problem: str, *, cure: str) -> ConfigError:
        """A known key holds a value that it cannot have."""
        return cls(f"config key '{key}' = {_shorten(value)}: {problem}. {cure}", key=key)

    @classmethod
    def unsupported(cls, key: str, value: object, reason: str, *, cure: str) -> ConfigError:
        """A feature of DeepSpeed that is switched on, changes the numbers, and does not exist here (yet)."""
        return cls(
            f"config key '{key}' = {_shorten(value)} is not supported: {reason}. "
            f"Ignoring it would change what is computed, so it is refused. {cure}",
            key=key,
        )

    @classmethod
    def of_batch(cls, problem: str, *, cure: str, key: str = "train_batch_size") -> ConfigError:
        """The batch sizes contradict each other, or none is given."""
        return cls(f"{problem}. {cure}", key=key)


class StorageError(ConfigError):
    """A directory for scratch files cannot be used. Nothing is left in it."""

    def __init__(self, directory: Path | str, problem: str, *, cure: str, key: str | None = None) -> None:
        self.directory = Path(directory)
        named = f" (config key '{key}')" if key else ""
        super().__init__(f"directory '{directory}'{named} {problem}. {cure}", key=key)


class BudgetTooSmallError(ConfigError):
    """A memory budget is below the minimum that the model needs.

    Args:
        cure: what to do; by default, to set the budget to the minimum.
    """

    def __init__(
        self, key: str, *, budget_bytes: int, minimum_bytes: int, reason: str, cure: str | None = None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        super().__init__(
            f"config key '{key}': the budget of {format_bytes(budget_bytes)} is too small. {reason}. "
            f"{cure or f'Set it to at least {format_bytes(minimum_bytes, is_least=True)}'}",
            key=key,
        )


# ---------------------------------------------------------------------------------------------------------------- model


class ModelError(InfinityError, ValueError):
    """The model cannot be trained as it is. `fqn` is the parameter or module to blame, when there is one."""

    def __init__(self, problem: str, *, cure: str | None = None, fqn: str | None = None) -> None:
        self.fqn = fqn
        super().__init__(f"{problem}. {cure}" if cure else problem)

    @classmethod
    def in_two_groups(cls, fqn: str, *, group_indices: Sequence[int], num_others: int = 0) -> ModelError:
        """A trainable parameter is in two parameter groups, or twice in one."""
        others = f" (and {num_others} more)" if num_others else ""
        where = " and ".join(map(str, group_indices))
        problem = f"trainable parameter '{fqn}'{others} is in parameter groups {where}"
        return cls(problem, cure="Put each parameter into one group only", fqn=fqn)

    @classmethod
    def unprepared(cls, fqn: str, problem: str, *, cure: str) -> ModelError:
        """A parameter is to be trained in a way for which no place was laid out in `initialize`."""
        return cls(f"parameter '{fqn}' {problem}", cure=cure, fqn=fqn)


# ---------------------------------------------------------------------------------------------- files and the optimizer


class CheckpointError(InfinityError, ValueError):
    """A checkpoint, a file with weights or the log of a run cannot be read. `path` is the file or directory to blame.

    Args:
        what: what was to be read there.
    """

    def __init__(
        self,
        path: Path | str,
        problem: str,
        *,
        cure: str = "Load another checkpoint",
        what: Literal["checkpoint", "weights", "log"] = "checkpoint",
    ) -> None:
        self.path = Path(path)
        place = {"checkpoint": f"checkpoint '{path}':", "weights": f"'{path}'", "log": f"{path}:"}[what]
        super().__init__(f"{place} {problem}. {cure}")

    @classmethod
    def of_weights(cls, path: Path | str, problem: str, *, cure: str) -> CheckpointError:
        """A file with weights, or a directory of such files, cannot be read."""
        return cls(path, problem, cure=cure, what="weights")

    @classmethod
    def of_log(
        cls, path: Path, problem: str, *, cure: str = "Read it with the version that wrote it"
    ) -> CheckpointError:
        """The log of a run is missing, or cannot be read."""
        return cls(path, problem, cure=cure, what="log")


class OptimizerNotPageableError(InfinityError, ValueError):
    """The optimizer cannot be run parameter by parameter, so its state cannot leave memory."""

    def __init__(self, optimizer_name: str, reason: str, *, cure: str | None = None) -> None:
        self.optimizer_name = optimizer_name
        default = (
            "Take an optimizer that treats every parameter by itself, e.g. AdamW, SGD, Adagrad, RMSprop, Lion or Lamb"
        )
        super().__init__(f"optimizer {optimizer_name} cannot be paged: {reason}. {cure or default}")


# --------------------------------------------------------------------------------------------------------------- access


class AccessError(InfinityError, RuntimeError):
    """A weight, a gradient or an optimizer state was read or written in a way that cannot work. `fqn` names the parameter."""

    def __init__(self, message: str, *, fqn: str) -> None:
        self.fqn = fqn
        super().__init__(message)

    @classmethod
    def of_parameter(cls, fqn: str, *, operation: str | None = None, cure: str | None = None) -> AccessError:
        """A paged-out parameter was read or written outside forward and backward."""
        during = f" in {operation}" if operation else ""
        cure = cure or (
            "Use it inside `with infinity.GatheredParameters(parameter):`, one module after the other if not all "
            "fit, or copy its values with .detach().clone()"
        )
        return cls(f"parameter '{fqn}' was used{during} while its values are not in memory. {cure}", fqn=fqn)

    @classmethod
    def of_gradient(cls, fqn: str, *, reason: str, cure: str) -> AccessError:
        """A gradient was asked for that is spilled, or already used up by an update in backward."""
        return cls(f"gradient of parameter '{fqn}' is not in memory: {reason}. {cure}", fqn=fqn)

    @classmethod
    def of_state(cls, fqn: str, name: str, problem: str) -> AccessError:
        """An optimizer's state was written to in a way that would be lost."""
        return cls(
            f"optimizer.state of '{fqn}', '{name}': {problem}. Assign the new value: "
            f"optimizer.state[parameter]['{name}'] = tensor; or use infinity.safe_set_full_optimizer_state or "
            "optimizer.load_state_dict",
            fqn=fqn,
        )

    @classmethod
    def of_data(cls, fqn: str) -> AccessError:
        """A tensor was changed after it had been assigned to a parameter's ``.data``."""
        return cls(
            f"'{fqn}': the tensor t was written to after the assignment p.data = t. The engine copied t when it was "
            "assigned, so the weight would miss this write. Write to p.data instead, or assign t again",
            fqn=fqn,
        )


# ----------------------------------------------------------------------------------------------------------------- step


class StepError(InfinityError, RuntimeError):
    """A step cannot be made or continued. `step` counts from 0, as `engine.global_steps` does."""

    def __init__(self, message: str, *, step: int | None = None) -> None:
        self.step = step
        super().__init__(message)

    @classmethod
    def order(cls, call: str, problem: str, *, cure: str, step: int | None = None) -> StepError:
        """A call at a moment when it makes no sense, e.g. `engine.step()` without a backward before it."""
        at = f" in step {step}" if step is not None else ""
        return cls(f"{call}{at}: {problem}. {cure}", step=step)

    @classmethod
    def late_gradient(cls, fqn: str, *, unit: str, step: int) -> StepError:
        """A parameter got a gradient after the update that should have contained it began."""
        return cls(
            f"parameter '{fqn}' got a gradient after the update of its unit '{unit}' began in step {step}: the "
            "update lacks it. Set config key 'infinity.update' to \"step\" if the model is used several times before "
            "engine.step()",
            step=step,
        )

    @classmethod
    def not_vertical(cls, reason: str, *, step: int) -> StepError:
        """A step that goes unit by unit over all micro-batches met something in backward that forbids it."""
        return cls(
            f"step {step} cannot go on unit by unit over all micro-batches: {reason}. Earlier steps could, and some "
            "units are already updated. Set config key 'infinity.schedule' to \"ordinary\"",
            step=step,
        )

    @classmethod
    def partial_update(cls, *, step: int, num_updated: int, num_units: int, problem: str, cure: str = "") -> StepError:
        """Some units hold the weights of the next step and others those of this one."""
        cure = cure or "To be able to skip steps, set config key 'infinity.update' to \"step\""
        return cls(
            f"step {step}: {problem}, after {num_updated} of {num_units} units had been updated in backward. The "
            "weights are a mixture of two steps: load a checkpoint, or accept the mixture with engine.reset(). "
            f"{cure}",
            step=step,
        )

    @classmethod
    def uncommitted(cls, directory: Path, *, step: int, problem: str, cure: str = "Correct that") -> StepError:
        """A step of a durable run could not be committed. What was committed before is still there.

        ``cure``: what to do before the script is started again.
        """
        return cls(
            f"step {step} could not be committed to '{directory}': {problem}. {cure}, and start the script again: it "
            "resumes from the commit before",
            step=step,
        )


class OtherNumbersWarning(UserWarning):
    """Training continues with numbers that differ from torch's: a dtype is cast, a weight has other strides than in
    torch, or a sparse gradient is made dense."""

    __reduce__ = _reduced

    def __init__(self, message: str, *, fqn: str) -> None:
        self.fqn = fqn
        super().__init__(message)

    @classmethod
    def of_parameter(cls, fqn: str, what: str, *, cure: str) -> OtherNumbersWarning:
        """A parameter is not kept as torch keeps it."""
        return cls(f"parameter '{fqn}' {what}. {cure}", fqn=fqn)

    @classmethod
    def of_sparse_gradient(cls, fqn: str) -> OtherNumbersWarning:
        """A gradient is sparse, and is made dense."""
        return cls(
            f"the gradient of parameter '{fqn}' is sparse; it is made dense, so the last bits differ from torch's. "
            "Make the embedding with sparse=False",
            fqn=fqn,
        )


class NonFiniteLossWarning(UserWarning):
    """The loss is NaN or infinite. Training continues."""

    __reduce__ = _reduced

    def __init__(self, *, step: int, loss: float) -> None:
        self.step = step
        self.loss = loss
        super().__init__(
            f"the loss of step {step} is {loss}. Look at this step's batch and at the learning rate; "
            "gradient_clipping does not help against NaN"
        )


# --------------------------------------------------------------------------------------------------------------- engine


class RankError(InfinityError, RuntimeError):
    """Processes that train together cannot continue: one has ended, did not reach a call, or made another call."""

    def __init__(self, what: str, problem: str, *, rank: int, cure: str) -> None:
        self.what = what
        self.rank = rank
        super().__init__(f"rank {rank}, {what}: {problem}. {cure}")


class EngineBusyError(InfinityError, RuntimeError):
    """A call was made while another one is inside the engine: by another thread, or by a signal handler that
    interrupted it."""

    def __init__(self, what: str, problem: str, *, cure: str) -> None:
        self.what = what
        super().__init__(f"{what} cannot be done now: {problem}. {cure}")


class EngineClosedError(InfinityError, RuntimeError):
    """A call to a closed engine, or in a forked child to the engine of its parent."""

    @classmethod
    def after_close(cls, call: str, *, is_by_library: bool = False) -> EngineClosedError:
        """``is_by_library``: `destroy` was called."""
        # transformers and accelerate call destroy() after training, so the script that comes here never closed an
        # engine.
        told = "Call infinity.initialize again to continue"
        if is_by_library:
            told = (
                "For a second trainer.train(), or one after trainer.evaluate(), make another Trainer with trainer.model and "
                "new TrainingArguments: transformers has called engine.destroy(). After accelerator.free_memory(), pass "
                "model and optimizer to accelerator.prepare again; without a library, to infinity.initialize"
            )
        return cls(
            f"{call}: the engine is closed. {told}; weights that were neither saved nor restored by "
            "engine.close(restore_weights=True) are lost"
        )

    @classmethod
    def at_exit(cls, call: str) -> EngineClosedError:
        """The interpreter ends, and has closed it."""
        return cls(
            f"{call}: the interpreter is shutting down and has closed the engine. Call atexit.register after "
            "infinity.initialize, so that your function runs before the engine closes; or save at the end of the "
            "script"
        )

    @classmethod
    def in_fork(cls, call: str) -> EngineClosedError:
        """A forked child uses the model that an engine of its parent holds."""
        return cls(
            f"{call}: this process was forked, and the weights belong to its parent. Copy the weights that the child "
            "needs before the fork, with model.state_dict() or copy.deepcopy, or start it with multiprocessing's "
            "'spawn'"
        )


class LibraryError(InfinityError, ImportError):
    """A library is missing, too old, newer than what was tested, or was imported too early."""

    @classmethod
    def of_version(
        cls, library: str, *, found: str | None, least: str, extra: str, below: str | None = None
    ) -> LibraryError:
        """A library that an integration is for is missing, too old, or newer than it was tested with."""
        problem = "is not installed" if found is None else f"is {found} here"
        needed = f"{least} or newer" if below is None else f"a version from {least} to below {below}"
        versions = f">={least}" if below is None else f">={least},<{below}"
        return cls(
            f"{library} {problem}, and {needed} is needed. pip install '{library}{versions}', or this package with its "
            f"extra '{extra}'"
        )

    @classmethod
    def imported_before(cls, problem: str, earlier: str) -> LibraryError:
        """`infinity.as_deepspeed` comes too late: somebody has looked for `deepspeed` before."""
        return cls(
            f"infinity.as_deepspeed: {problem}. Import infinity.as_deepspeed before {earlier}, as the first line of the "
            "script, or start the script with python -m infinity.as_deepspeed"
        )


def _shorten(value: object, limit: int = 120) -> str:
    # A config value may be a whole nested dict, and the message has to stay readable.
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _hint(path: str, nearest: str) -> str:
    # A key of the top level that stands in a block. Dotted paths say by themselves where they are.
    where = " at the top level" if "." in path and "." not in nearest else ""
    return f" (did you mean '{nearest}'{where}?)"


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to ``name`` in any case of letters, or None."""
    lowered = {key.lower(): key for key in known}
    matches = get_close_matches(name.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[matches[0]] if matches else None
