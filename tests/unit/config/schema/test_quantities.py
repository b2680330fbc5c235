"""Sizes, counts and flags as people write them."""

from __future__ import annotations

import numpy as np
import pytest

from infinity.config.schema.quantities import (
    is_auto,
    parse_bytes,
    parse_count,
    parse_flag,
    parse_names,
    parse_number,
    parse_rounded,
)


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        ("2GB", 2_000_000_000),
        ("2GiB", 2 << 30),
        ("384MB", 384_000_000),
        ("384 mib", 384 << 20),
        ("1.5g", 1_500_000_000),
        ("1TiB", 1 << 40),
        ("16KB", 16_000),
        ("4096", 4096),
        ("1e9", 1_000_000_000),
        ("1e3 MB", 1_000_000_000),
        ("1_000_000 B", 1_000_000),
        (" 7 kB ", 7000),
        (1e9, 1_000_000_000),
        (123, 123),
    ],
)
def test_bytes(value: object, num_bytes: int) -> None:
    assert parse_bytes(value) == num_bytes


@pytest.mark.parametrize(
    "value", ["", "GB", "2 XB", "2GBs", "-1GB", "50%", "2,5GB", True, None, [1], float("inf"), float("nan")]
)
def test_not_a_size(value: object) -> None:
    with pytest.raises(ValueError, match="must be a"):
        parse_bytes(value)


@pytest.mark.parametrize("value", [0, -5, "0GB", 0.2])
def test_size_must_be_positive(value: object) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("value", "count"),
    [(4, 4), (4.0, 4), (1e9, 10**9), ("16", 16), ("5e8", 5 * 10**8), (-1, -1), (np.int64(4), 4), (np.float32(4), 4)],
)
def test_count(value: object, count: int) -> None:
    result = parse_count(value)
    assert result == count
    assert type(result) is int


@pytest.mark.parametrize("value", [4.5, "4.5", "four", True, None, float("inf"), {}])
def test_not_a_count(value: object) -> None:
    with pytest.raises(ValueError, match="must be a"):
        parse_count(value)


@pytest.mark.parametrize("value", [10**400, "1e400"])
def test_beyond_all_floats(value: object) -> None:
    for parse in (parse_number, parse_rounded, parse_bytes):
        with pytest.raises(ValueError, match="must be a finite number"):
            parse(value)


def test_large_counts_are_exact() -> None:
    assert parse_count(2**63 - 1) == 2**63 - 1


def test_elements_are_rounded() -> None:
    assert parse_rounded(0.9 * 1234**2) == round(0.9 * 1234**2)


def test_number_from_text() -> None:
    assert parse_number("1e-4") == 1e-4


@pytest.mark.parametrize("value", [True, "true", "True", " on ", "yes", 1, 1.0])
def test_true(value: object) -> None:
    assert parse_flag(value) is True


@pytest.mark.parametrize("value", [False, "false", "FALSE", "off", "no", 0])
def test_false(value: object) -> None:
    assert parse_flag(value) is False


@pytest.mark.parametrize("value", ["maybe", 2, None, [], "1.5"])
def test_not_a_flag(value: object) -> None:
    with pytest.raises(ValueError, match="must be true or false"):
        parse_flag(value)


def test_names() -> None:
    assert parse_names("a") == ("a",)
    assert parse_names(["a", "b"]) == ("a", "b")
    for value in (3, ["a", 3], [""], {"a": 1}):
        with pytest.raises(ValueError, match="a text or a list of texts"):
            parse_names(value)


def test_auto() -> None:
    assert is_auto("auto") and is_auto(" AUTO ")
    assert not is_auto("automatic") and not is_auto(None)
