"""Every error says what, where and what to do, keeps its facts as attributes, and survives pickling."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import swapper.errors
from infinity import errors

EXAMPLES: list[tuple[Exception, type[Exception], list[str]]] = [
    (
        errors.ConfigError.unknown_keys([("bf61.enabled", "bf16.enabled"), ("zzz", None)]),
        errors.ConfigError,
        ["'bf61.enabled'", "did you mean 'bf16.enabled'?", "'zzz'", "keys", "strict"],
    ),
    (
        errors.StorageError("/mnt/x", "does not exist", cure="Create it", key="a.nvme_path"),
        errors.ConfigError,
        ["'/mnt/x'", "a.nvme_path", "Create it"],
    ),
    (
        errors.BudgetTooSmallError(
            "infinity.host_memory_budget", budget_bytes=1 << 20, minimum_bytes=1 << 30, reason="Two units are needed"
        ),
        errors.ConfigError,
        ["1048576 bytes (1.0 MB)", "1073741824 bytes (1.1 GB)", "Two units", "infinity.host_memory_budget"],
    ),
    (errors.ModelError.in_two_groups("w", group_indices=[0, 2]), errors.ModelError, ["'w'", "0 and 2"]),
    (errors.OptimizerNotPageableError("LBFGS", "it needs a closure"), ValueError, ["LBFGS", "closure", "AdamW"]),
    (
        errors.AccessError.of_parameter("w", operation="torch.sum"),
        errors.AccessError,
        ["'w'", "torch.sum", "GatheredParameters"],
    ),
    (
        errors.StepError.partial_update(step=6, num_updated=2, num_units=9, problem="forward raised"),
        errors.StepError,
        ["step 6", "2 of 9", "forward raised", "infinity.update"],
    ),
    (
        errors.CheckpointError.of_weights("/y", "is cut off", cure="Copy it again"),
        ValueError,
        ["'/y'", "cut off", "Copy it again"],
    ),
    (errors.EngineClosedError.in_fork("forward"), RuntimeError, ["forward", "forked", "spawn"]),
    (
        errors.LibraryError.of_version("peft", found="0.1", least="0.14", extra="hf"),
        ImportError,
        ["peft is 0.1", "0.14 or newer", "pip install 'peft>=0.14'", "'hf'"],
    ),
    (
        errors.RankError("step 3", "another rank has ended", rank=1, cure="Look there"),
        RuntimeError,
        ["rank 1", "step 3", "another rank has ended", "Look there"],
    ),
    (
        errors.EngineBusyError("engine.flush()", "thread 'T' is inside", cure="Wait for it"),
        RuntimeError,
        ["engine.flush()", "'T'", "Wait for it"],
    ),
    (
        errors.OtherNumbersWarning.of_parameter("head.bias", "is fp64", cure="Keep it frozen"),
        UserWarning,
        ["'head.bias'", "is fp64. Keep it frozen"],
    ),
    (errors.NonFiniteLossWarning(step=7, loss=float("-inf")), UserWarning, ["step 7", "-inf"]),
]


@pytest.mark.parametrize(("error", "base", "words"), EXAMPLES, ids=lambda item: type(item).__name__)
def test_says_what_and_how_to_cure_and_survives_pickling(
    error: Exception, base: type[Exception], words: list[str]
) -> None:
    assert isinstance(error, base) and isinstance(error, errors.InfinityError | UserWarning)
    for word in words:
        assert word in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_class_is_here() -> None:
    defined = {
        cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, errors.InfinityError | Warning)
    }
    assert defined - {type(error) for error, _, _ in EXAMPLES} == {errors.InfinityError}


@pytest.mark.parametrize(("module", "base"), [(errors, errors.InfinityError), (swapper.errors, swapper.SwapperError)])
def test_the_tree_in_the_docstring_is_the_real_one(module: Any, base: type[Exception]) -> None:
    """One line per class, indented below its base."""
    drawn: dict[str, str] = {}
    trail: list[tuple[int, str]] = [(-1, "Exception")]
    for line in (inspect.getdoc(module) or "").splitlines():
        if match := re.fullmatch(r"([│├└─ ]*)(\w+Error)\b.*", line):
            depth, name = len(match[1]), match[2]
            trail = [each for each in trail if each[0] < depth]
            drawn[name] = trail[-1][1]
            trail.append((depth, name))
    classes = {cls for cls in vars(module).values() if inspect.isclass(cls) and issubclass(cls, base)}
    assert drawn == {cls.__name__: cls.__bases__[0].__name__ for cls in classes}
    assert module is errors or drawn.keys() <= {*swapper.__all__}


def test_facts_are_attributes() -> None:
    assert errors.ConfigError.unknown_keys([("a.b", "a.c")]).key == "a.b"
    assert errors.StorageError("/x", "is full", cure="Free some").directory == Path("/x")
    assert errors.ModelError.in_two_groups("w", group_indices=[0, 1]).fqn == "w"
    assert errors.StepError.uncommitted(Path("/x"), step=3, problem="it is full").step == 3


def test_long_values_are_cut() -> None:
    assert len(str(errors.ConfigError.value("k", list(range(1000)), "too long", cure="Cut it"))) < 250


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (999999, "999999 bytes"),
        (3686400, "3686400 bytes (3.7 MB)"),
        (5 << 40, "5497558138880 bytes (5.5 TB)"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert errors.format_bytes(num_bytes) == text


def test_a_minimum_that_is_copied_from_an_error_suffices() -> None:
    error = errors.BudgetTooSmallError("k", budget_bytes=10**6, minimum_bytes=3_640_000, reason="r")
    assert "at least 3640000 bytes (3.7 MB)" in str(error)
