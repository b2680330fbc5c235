"""The batch-size triangle: DeepSpeed's rules where they are defined, errors where it would round silently."""

from __future__ import annotations

from typing import Any

import pytest

from infinity.config import load_config
from infinity.config.batch import ACCUMULATION, MICRO, TRAIN
from infinity.errors import ConfigError


def sizes(world_size: int = 1, **given: Any) -> tuple[int | None, int | None, int]:
    keys = {"train": TRAIN, "micro": MICRO, "accumulation": ACCUMULATION}
    config = load_config({keys[name]: value for name, value in given.items()}, world_size=world_size)
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train": 24, "micro": 2, "accumulation": 3, "world_size": 4}, (24, 2, 3)),
        ({"train": 24, "micro": 2, "world_size": 4}, (24, 2, 3)),
        ({"train": 24, "accumulation": 3, "world_size": 4}, (24, 2, 3)),
        ({"micro": 2, "accumulation": 3, "world_size": 4}, (24, 2, 3)),
        ({"train": 8, "world_size": 4}, (8, 2, 1)),
        ({"micro": 2, "world_size": 4}, (8, 2, 1)),
        ({"train": 8.0, "micro": "2"}, (8, 2, 4)),
    ],
)
def test_missing_ones_follow(given: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert sizes(**given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train": "auto", "micro": "auto", "accumulation": "auto"}, (None, None, 1)),
        ({"train": "auto", "micro": "auto", "accumulation": 4}, (None, None, 4)),
        ({"micro": "auto"}, (None, None, 1)),
        ({"train": "auto", "micro": 2, "accumulation": "auto"}, (2, 2, 1)),
        ({"train": "auto", "micro": 2, "accumulation": 8}, (16, 2, 8)),
        ({"train": 16, "micro": "auto", "accumulation": "auto"}, (16, 16, 1)),
        ({"train": 16, "micro": 4, "accumulation": "auto"}, (16, 4, 4)),
        ({"train": 16, "micro": "auto", "accumulation": 4}, (16, 4, 4)),
    ],
)
def test_auto(given: dict[str, Any], expected: tuple[int | None, int | None, int]) -> None:
    assert sizes(**given) == expected


@pytest.mark.parametrize("given", [{}, {"accumulation": 3}, {"accumulation": "auto"}])
def test_nothing_given(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f'names no batch size.*{MICRO}.*"auto"'):
        sizes(**given)


def test_sizes_that_do_not_multiply() -> None:
    with pytest.raises(
        ConfigError, match=r"train_batch_size = 25 is not .* = 2 \* 3 \* 4 = 24. Set train_batch_size to 24"
    ):
        sizes(train=25, micro=2, accumulation=3, world_size=4)


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=rf"25 cannot be divided by {MICRO} \* processes = 2 \* 4 = 8. .*to 24 or 32"):
        sizes(train=25, micro=2, world_size=4)
    with pytest.raises(ConfigError, match=rf"7 cannot be divided by {ACCUMULATION} \* processes = 4 \* 2 = 8. .*to 8"):
        sizes(train=7, accumulation=4, world_size=2)
    with pytest.raises(ConfigError, match="3 cannot be divided"):
        sizes(train=3, world_size=2)


@pytest.mark.parametrize("key", [TRAIN, MICRO, ACCUMULATION])
@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True])
def test_impossible_sizes(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' = {value!r}: must be"):
        load_config({MICRO: 1, **{key: value}})


def test_decisions_say_who_decided() -> None:
    decisions = {key: (value, by) for key, value, by in load_config({TRAIN: 8, MICRO: "auto"}).decisions}
    assert decisions[TRAIN] == (8, "config")
    assert decisions[MICRO] == (8, '"auto", from the other batch sizes')
    assert decisions[ACCUMULATION] == (1, "from the other batch sizes")
    open_decisions = {key: (value, by) for key, value, by in load_config({MICRO: "auto"}).decisions}
    assert open_decisions[MICRO] == ("of the data loader", '"auto"')
