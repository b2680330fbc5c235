"""Sizes, counts and flags as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

Parse = Callable[[object], Any]
_READ: dict[Parse, list[tuple[object, object]]] = {
    parse_bytes: [
        *[("2GB", 2_000_000_000), ("2GiB", 2 << 30), ("384MB", 384_000_000), ("384 mib", 384 << 20)],
        *[("1.5g", 1_500_000_000), ("1TiB", 1 << 40), ("16KB", 16_000), ("4096", 4096), ("1e9", 10**9)],
        *[("1e3 MB", 10**9), ("1_000_000 B", 10**6), (" 7 kB ", 7000), (1e9, 10**9), (123, 123)],
    ],
    parse_count: [
        *[(4, 4), (4.0, 4), (1e9, 10**9), ("16", 16), ("5e8", 5 * 10**8), (-1, -1)],
        *[(np.int64(4), 4), (np.float32(4), 4), (2**63 - 1, 2**63 - 1)],
    ],
    parse_rounded: [(0.9 * 1234**2, round(0.9 * 1234**2))],
    parse_number: [("1e-4", 1e-4)],
    parse_flag: [
        *[(value, True) for value in (True, "true", "True", " on ", "yes", 1, 1.0)],
        *[(value, False) for value in (False, "false", "FALSE", "off", "no", 0)],
    ],
    parse_names: [("a", ("a",)), (["a", "b"], ("a", "b"))],
    is_auto: [("auto", True), (" AUTO ", True), ("automatic", False), (None, False)],
}
_REFUSED: list[tuple[Parse, str, list[object]]] = [
    (parse_bytes, "must be a", ["", "GB", "2 XB", "2GBs", "-1GB", "50%", "2,5GB", True, None, [1], float("nan")]),
    (parse_bytes, "must be a finite number", [float("inf"), 10**400, "1e400"]),
    (parse_bytes, "more than 0", [0, -5, "0GB", 0.2]),
    (parse_count, "must be a", [4.5, "4.5", "four", True, None, float("inf"), {}]),
    (parse_count, "less than 2", [2**63, 1e19, 10**400, "1e30"]),
    (parse_number, "must be a finite number", [10**400, "1e400"]),
    (parse_rounded, "must be a finite number", [10**400, "1e400"]),
    (parse_flag, "must be true or false", ["maybe", 2, None, [], "1.5"]),
    (parse_names, "a text or a list of texts", [3, ["a", 3], [""], {"a": 1}]),
]


@pytest.mark.parametrize("parse", _READ)
def test_what_is_read(parse: Parse) -> None:
    for value, expected in _READ[parse]:
        found = parse(value)
        assert (found, type(found)) == (expected, type(expected)), value


@pytest.mark.parametrize(("parse", "words", "values"), _REFUSED)
def test_what_is_refused(parse: Parse, words: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=words):
            parse(value)
