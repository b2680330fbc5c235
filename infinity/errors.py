"""Everything `infinity` raises on purpose.

    InfinityError
    ├── ConfigError (ValueError)               the JSON, or an argument that overrides it
    │   ├── ConfigSyntaxError                  the text is not JSON, or a key stands there twice
    │   ├── UnknownConfigKeyError              a key nobody knows; names the nearest one
    │   ├── ConfigValueError                   a known key with a value of the wrong type or range
    │   ├── UnsupportedConfigError             a DeepSpeed feature that would change the numbers, and that we lack
    │   ├── BatchSizeError                     the three batch sizes don't multiply
    │   ├── StorageError                       a directory that is missing, not writable or too small
    │   └── BudgetTooSmallError                a memory budget below the minimum
    ├── ModelError (ValueError)                the model cannot be taken as it is
    │   ├── UnsupportedModelError              e.g. scripted, or compiled as a whole
    │   ├── ParameterGroupError                a trainable parameter in two groups
    │   ├── UnpreparedParameterError           a parameter is to be trained in a way that `initialize` did not know of
    │   └── WeightsMismatchError               files hold other tensors than the model has
    ├── WeightFileError (ValueError)           a file with weights is missing, cut off or broken
    ├── CheckpointError (ValueError)           a checkpoint is damaged, or not what this version reads
    ├── OptimizerNotPageableError (ValueError) the optimizer mixes elements or needs a closure
    ├── StateWriteError (RuntimeError)         a write to a copy of an optimizer state, which would be lost
    ├── StaleDataError (RuntimeError)          a tensor was changed that had been assigned to .data
    ├── NotResidentError (RuntimeError)        something was read while its memory is elsewhere
    │   ├── ParameterNotResidentError
    │   └── GradientNotResidentError
    ├── StepError (RuntimeError)               the training loop and the engine disagree
    │   ├── StepOrderError                     a call at the wrong moment
    │   ├── LateGradientError                  a gradient came after its update began
    │   ├── ScheduleError                      a vertical step cannot go on, and units are updated already
    │   └── PartialUpdateError                 some units are updated, others are not
    ├── CommitError (RuntimeError)             a step of a durable run could not be committed
    ├── RunLogError (RuntimeError)             the log of a run cannot be read
    ├── RankError (RuntimeError)               several processes train together, and one is gone or elsewhere
    ├── EngineBusyError (RuntimeError)         another call is inside the engine
    ├── ForkedError (RuntimeError)             a forked child uses its parent's model
    ├── EngineClosedError (RuntimeError)       a call after `close()`
    ├── StandInError (ImportError)             `infinity` cannot stand in for `deepspeed` any more
    └── LibraryVersionError (ImportError)      an integration needs another version of its library

    NonFiniteLossWarning (UserWarning)         the loss is NaN or infinite, and training goes on
    SparseGradientWarning (UserWarning)        a gradient is sparse, and is made dense
    OtherNumbersWarning (UserWarning)          a dtype, or an order of elements in memory, is not kept as torch keeps it

Reads and writes that fail raise the errors of `swapper`, which name file, offset, bytes and errno.

Constructors take the facts and write the sentence, so that every place that raises says the same and programs can read
the facts from attributes. All of them survive pickling (DataLoader workers and launchers send exceptions between
processes).
"""

from __future__ import annotations

import copyreg
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def format_bytes(num_bytes: int) -> str:
    """Exact bytes with a readable size behind them: `402653184 bytes (384.0 MiB)`."""
    for size, name in _UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes} bytes ({num_bytes / size:.1f} {name})"
    return f"{num_bytes} bytes"


def listed(words: Collection[str], between: str = ", ", most: int = 4) -> str:
    """The first words, and how many there are besides."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return f"{between.join([*words][:most])}{more}"


def _reduced(error: Exception) -> tuple[Any, ...]:
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


class ConfigSyntaxError(ConfigError):
    """The configuration's text cannot be read."""

    def __init__(self, source: str, problem: str, *, cure: str, key: str | None = None) -> None:
        self.source = source
        super().__init__(f"{source}: {problem}. {cure}", key=key)


class UnknownConfigKeyError(ConfigError):
    """One or more keys that neither DeepSpeed nor this package knows.

    Args:
        unknown: pairs (dotted path, what to write instead, or None when nothing is near).
    """

    def __init__(self, unknown: Sequence[tuple[str, str | None]]) -> None:
        self.unknown = tuple(unknown)
        described = [
            f"'{path}'" + (f" (did you mean '{nearest}'?)" if nearest else "") for path, nearest in self.unknown
        ]
        noun = "key" if len(described) == 1 else "keys"
        super().__init__(
            f"unknown config {noun} {', '.join(described)}. Correct or remove the {noun}; "
            'with "infinity": {"strict": false} unknown keys are only warned about',
            key=self.unknown[0][0],
        )


class ConfigValueError(ConfigError):
    """A known key holds a value that it cannot have."""

    def __init__(self, key: str, value: object, problem: str, *, cure: str) -> None:
        self.value = value
        super().__init__(f"config key '{key}' = {_shorten(value)}: {problem}. {cure}", key=key)


class UnsupportedConfigError(ConfigError):
    """A feature of DeepSpeed that is switched on, changes the numbers, and does not exist here (yet)."""

    def __init__(self, key: str, value: object, reason: str, *, cure: str) -> None:
        self.value = value
        super().__init__(
            f"config key '{key}' = {_shorten(value)} is not supported: {reason}. "
            f"Ignoring it would change what is computed, so it is refused. {cure}",
            key=key,
        )


class BatchSizeError(ConfigError):
    """The batch sizes contradict each other, or none is given."""

    def __init__(self, problem: str, *, cure: str, key: str = "train_batch_size") -> None:
        super().__init__(f"{problem}. {cure}", key=key)


class StorageError(ConfigError):
    """A directory for scratch files cannot be used. Nothing is left in it."""

    def __init__(self, directory: Path | str, problem: str, *, cure: str, key: str | None = None) -> None:
        self.directory = Path(directory)
        named = f" (config key '{key}')" if key else ""
        super().__init__(f"directory '{directory}'{named} {problem}. {cure}", key=key)


class CommitError(InfinityError, RuntimeError):
    """A step of a durable run could not be committed. What was committed before is still there."""

    def __init__(self, directory: Path | str, *, step: int, problem: str, cure: str = "Correct that") -> None:
        """``cure``: what to do before the script is started again."""
        self.directory = Path(directory)
        self.step = step
        super().__init__(
            f"step {step} could not be committed to '{directory}': {problem}. {cure}, and start the script again: it goes on "
            "from the commit before"
        )


class BudgetTooSmallError(ConfigError):
    """A memory budget is below what the model needs at the least.

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
            f"{cure or f'Set it to at least {format_bytes(minimum_bytes)}'}",
            key=key,
        )


# ---------------------------------------------------------------------------------------------------------------- model


class ModelError(InfinityError, ValueError):
    """The model cannot be trained as it is. `fqn` is the parameter or module to blame, when there is one."""

    def __init__(self, message: str, *, fqn: str | None = None) -> None:
        self.fqn = fqn
        super().__init__(message)


class UnsupportedModelError(ModelError):
    """Something about the model that the engine cannot work with."""

    def __init__(self, what: str, *, cure: str, fqn: str | None = None) -> None:
        super().__init__(f"{what}. {cure}", fqn=fqn)


class ParameterGroupError(ModelError):
    """A trainable parameter is in two parameter groups, or twice in one."""

    def __init__(self, fqn: str, *, group_indices: Sequence[int], num_others: int = 0) -> None:
        self.group_indices = tuple(group_indices)
        others = f" (and {num_others} more)" if num_others else ""
        where = " and ".join(str(index) for index in self.group_indices)
        super().__init__(
            f"trainable parameter '{fqn}'{others} stands in parameter groups {where}. Put each parameter into one group only",
            fqn=fqn,
        )


class UnpreparedParameterError(ModelError):
    """A parameter is to be trained in a way for which no place was laid out in `initialize`."""

    def __init__(self, fqn: str, problem: str, *, cure: str) -> None:
        super().__init__(f"parameter '{fqn}' {problem}. {cure}", fqn=fqn)


# ------------------------------------------------------------------------------------------------------------ optimizer


class WeightsMismatchError(ModelError):
    """Files hold other tensors than the model has. Names are the model's where it has them, else the files'.

    Attributes:
        missing: names that the model has and the files have not.
        unexpected: names that the files have and the model has not.
        mismatched: name, shape in the files, shape in the model.
        of_another_kind: names of floating-point tensors of the model for which the files hold something else.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] = (),
        of_another_kind: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.path = Path(path)
        self.missing, self.unexpected, self.mismatched = tuple(missing), tuple(unexpected), tuple(mismatched)
        self.of_another_kind = tuple(of_another_kind)
        lines = [f"missing: {name} (ignore_missing_keys=True makes it anew)" for name in missing]
        lines += [f"not in the model: {name} (ignore_unexpected_keys=True leaves it out)" for name in unexpected]
        lines += [
            f"of another shape: {name} is {there}, the model's is {here} (ignore_mismatched_sizes=True makes it anew)"
            for name, there, here in mismatched
        ]
        lines += [f"not floating-point, or only with scales: {name} is {dtype}" for name, dtype in of_another_kind]
        lines += _on_prefixes(self.missing, self.unexpected)
        super().__init__(
            f"the weights in '{path}' are not the model's:\n  " + "\n  ".join(lines),
            fqn=[*missing, *(name for name, *_ in mismatched), *unexpected, *(name for name, _ in of_another_kind)][0],
        )


def _on_prefixes(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """What to do if all names in the files have one prefix (those of DDP or torch.compile), or lack one of the model's."""
    for longer, shorter, is_extra in ((unexpected, missing, True), (missing, unexpected, False)):
        found = (name.removesuffix(each) for each in shorter[:1] for name in longer if name.endswith(f".{each}"))
        for prefix in found:
            if all(name.startswith(prefix) for name in longer):
                pattern = "^" + prefix.replace(".", "\\.")
                mapping = {pattern: ""} if is_extra else {"^": prefix}
                lack = "all begin with" if is_extra else "lack"
                return [f"the names in the files {lack} '{prefix}': pass key_mapping={mapping!r}"]
    return []


class WeightFileError(InfinityError, ValueError):
    """A file with weights, or a directory of such files, cannot be read. `path` is the one to blame."""

    def __init__(self, path: Path | str, problem: str, *, cure: str) -> None:
        self.path = Path(path)
        super().__init__(f"'{path}' {problem}. {cure}")


class CheckpointError(InfinityError, ValueError):
    """A checkpoint cannot be read as it is. `path` is the file or directory to blame."""

    def __init__(self, path: Path | str, problem: str, *, cure: str = "Load another checkpoint") -> None:
        self.path = Path(path)
        super().__init__(f"checkpoint '{path}': {problem}. {cure}")


class OptimizerNotPageableError(InfinityError, ValueError):
    """The optimizer cannot be run parameter by parameter, so its state cannot leave memory."""

    def __init__(self, optimizer_name: str, reason: str, *, cure: str | None = None) -> None:
        self.optimizer_name = optimizer_name
        default = (
            "Take an optimizer that treats every parameter by itself, e.g. AdamW, SGD, Adagrad, RMSprop, Lion or Lamb"
        )
        super().__init__(f"optimizer {optimizer_name} cannot be paged: {reason}. {cure or default}")


class StateWriteError(InfinityError, RuntimeError):
    """An optimizer's state was written to in a way that would be lost."""

    def __init__(self, fqn: str, name: str, problem: str) -> None:
        self.fqn = fqn
        super().__init__(
            f"optimizer.state of '{fqn}', '{name}': {problem}. Assign what it is to be: "
            f"optimizer.state[parameter]['{name}'] = tensor; or use infinity.safe_set_full_optimizer_state or "
            "optimizer.load_state_dict"
        )


class StaleDataError(InfinityError, RuntimeError):
    """A tensor was changed after it had been assigned to a parameter's ``.data``."""

    def __init__(self, fqn: str) -> None:
        self.fqn = fqn
        super().__init__(
            f"'{fqn}': the tensor t of an assignment p.data = t was written to after it. The engine holds a copy of what t was "
            "then, so the weight would miss that. Write to p.data instead, or assign t once more"
        )


# ------------------------------------------------------------------------------------------------------------ residency


class NotResidentError(InfinityError, RuntimeError):
    """A tensor was touched while its values are not in memory. `fqn` names the parameter."""

    def __init__(self, message: str, *, fqn: str) -> None:
        self.fqn = fqn
        super().__init__(message)


class ParameterNotResidentError(NotResidentError):
    """A paged-out parameter was read or written outside forward and backward."""

    def __init__(self, fqn: str, *, operation: str | None = None, cure: str | None = None) -> None:
        self.operation = operation
        during = f" in {operation}" if operation else ""
        cure = cure or (
            "Use it inside `with infinity.GatheredParameters(parameter):`, one module after the other where not all fit, or "
            "copy its values with .detach().clone()"
        )
        super().__init__(f"parameter '{fqn}' was touched{during} while it is paged out. {cure}", fqn=fqn)


class GradientNotResidentError(NotResidentError):
    """A gradient was asked for that is spilled, or already used up by an update in backward."""

    def __init__(self, fqn: str, *, reason: str, cure: str) -> None:
        super().__init__(f"gradient of parameter '{fqn}' is not in memory: {reason}. {cure}", fqn=fqn)


# ----------------------------------------------------------------------------------------------------------------- step


class StepError(InfinityError, RuntimeError):
    """The training loop and the engine disagree about a step. `step` counts from 0, as `engine.global_steps` does."""

    def __init__(self, message: str, *, step: int | None = None) -> None:
        self.step = step
        super().__init__(message)


class StepOrderError(StepError):
    """A call at a moment when it makes no sense, e.g. `engine.step()` without a backward before it."""

    def __init__(self, call: str, problem: str, *, cure: str, step: int | None = None) -> None:
        self.call = call
        at = f" in step {step}" if step is not None else ""
        super().__init__(f"{call}{at}: {problem}. {cure}", step=step)


class LateGradientError(StepError):
    """A parameter got a gradient after the update that should have contained it began."""

    def __init__(self, fqn: str, *, unit: str, step: int) -> None:
        self.fqn = fqn
        self.unit = unit
        super().__init__(
            f"parameter '{fqn}' got a gradient after the update of its unit '{unit}' began in step {step}: the update "
            "lacks it. Set config key 'infinity.update' to \"step\" when a model is used several times before "
            "engine.step()",
            step=step,
        )


class ScheduleError(StepError):
    """A step that goes unit by unit over all micro-batches met something in backward that forbids it, too late to begin anew."""

    def __init__(self, reason: str, *, step: int) -> None:
        self.reason = reason
        super().__init__(
            f"step {step} cannot go on unit by unit over all micro-batches: {reason}. Earlier steps could, and some units "
            "have been updated already. Set config key 'infinity.schedule' to \"ordinary\"",
            step=step,
        )


class PartialUpdateError(StepError):
    """Some units hold the weights of the next step and others those of this one."""

    def __init__(self, *, step: int, num_updated: int, num_units: int, problem: str, cure: str = "") -> None:
        self.num_updated = num_updated
        self.num_units = num_units
        cure = cure or "To be able to skip steps, set config key 'infinity.update' to \"step\""
        super().__init__(
            f"step {step}: {problem}, after {num_updated} of {num_units} units had been updated in backward. The weights "
            f"are a mixture of two steps: load saved ones, or accept them with engine.reset(). {cure}",
            step=step,
        )


class SparseGradientWarning(UserWarning):
    """A gradient is sparse, and is made dense."""

    __reduce__ = _reduced

    def __init__(self, fqn: str) -> None:
        self.fqn = fqn
        super().__init__(
            f"the gradient of parameter '{fqn}' is sparse; it is used as a dense one, so that the last bits differ from torch's. "
            "Make the embedding with sparse=False"
        )


class OtherNumbersWarning(UserWarning):
    """Training goes on, with numbers that are not torch's: a dtype is cast, or a weight has other strides than in torch."""

    __reduce__ = _reduced

    def __init__(self, fqn: str, what: str, *, cure: str) -> None:
        self.fqn = fqn
        super().__init__(f"parameter '{fqn}' {what}. {cure}")


class NonFiniteLossWarning(UserWarning):
    """The loss is NaN or infinite, and training goes on."""

    __reduce__ = _reduced

    def __init__(self, *, step: int, loss: float) -> None:
        self.step = step
        self.loss = loss
        super().__init__(
            f"the loss of step {step} is {loss}. Look at this step's batch and at the learning rate; "
            "gradient_clipping does not help against NaN"
        )


# --------------------------------------------------------------------------------------------------------------- engine


class RunLogError(InfinityError, RuntimeError):
    """The log of a run is missing, or cannot be read."""

    def __init__(self, path: Path, problem: str, *, cure: str = "Read it with the version that wrote it") -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}. {cure}")


class RankError(InfinityError, RuntimeError):
    """Processes that train together cannot go on together: one has ended, did not come, or came with something else."""

    def __init__(self, what: str, problem: str, *, rank: int, cure: str) -> None:
        self.what = what
        self.rank = rank
        super().__init__(f"rank {rank}, {what}: {problem}. {cure}")


class EngineBusyError(InfinityError, RuntimeError):
    """A call comes while another one is inside the engine: one of another thread, or one that a signal handler came into."""

    def __init__(self, what: str, problem: str, *, cure: str) -> None:
        self.what = what
        super().__init__(f"{what} cannot be done now: {problem}. {cure}")


class EngineClosedError(InfinityError, RuntimeError):
    """A call to an engine after `close()`."""

    def __init__(self, call: str, *, is_exit: bool = False, is_by_library: bool = False) -> None:
        """``is_exit``: the interpreter ends, and has closed it. ``is_by_library``: `destroy` was called."""
        self.call = call
        told = "Call infinity.initialize again to train on"
        if is_by_library:
            told = (
                "For a second trainer.train(), or one after trainer.evaluate(), make another Trainer with trainer.model and "
                "new TrainingArguments: transformers has called engine.destroy(). After accelerator.free_memory(), pass "
                "model and optimizer to accelerator.prepare again; without a library, to infinity.initialize"
            )
        super().__init__(
            f"{call}: the interpreter ends, and the engine has ended before. Call atexit.register after "
            "infinity.initialize, and what it registers comes first; or save at the end of the script"
            if is_exit
            else f"{call}: the engine is closed. {told}; weights that were neither saved nor "
            "given back by engine.close(restore_weights=True) went with it"
        )


class ForkedError(InfinityError, RuntimeError):
    """A forked child uses the model that an engine of its parent holds."""

    def __init__(self, call: str) -> None:
        self.call = call
        super().__init__(
            f"{call}: this process was forked, and the weights belong to its parent. Copy what it needs before the fork, e.g. "
            "with model.state_dict() or copy.deepcopy, or start it with multiprocessing's 'spawn'"
        )


class StandInError(InfinityError, ImportError):
    """`infinity.as_deepspeed` comes too late: somebody has looked for `deepspeed` before."""

    def __init__(self, problem: str, earlier: str) -> None:
        self.problem = problem
        super().__init__(
            f"infinity.as_deepspeed: {problem}. Import infinity.as_deepspeed before {earlier}, as the first line of the "
            "script, or start the script with python -m infinity.as_deepspeed"
        )


class LibraryVersionError(InfinityError, ImportError):
    """A library that an integration is for is missing, too old, or newer than it was tested with."""

    def __init__(self, library: str, *, found: str | None, least: str, extra: str, below: str | None = None) -> None:
        self.library, self.found, self.least, self.below = library, found, least, below
        problem = "is not installed" if found is None else f"is {found} here"
        needed = f"{least} or newer" if below is None else f"a version from {least} to below {below}"
        versions = f">={least}" if below is None else f">={least},<{below}"
        super().__init__(
            f"{library} {problem}, and {needed} is needed. pip install '{library}{versions}', or this package with its "
            f"extra '{extra}'"
        )


def _shorten(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
