"""Parsers of numbers, sizes and flags in config files.

Each accepts any JSON value, and raises `ValueError` with a message that continues the key's name ("must be ...").
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import PurePath

_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*")
# "k" and "kb" are 1000 and "kib" is 1024, as drives are sold and as SI and IEC define them: "2GB" is 2e9 bytes.
_FACTORS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}{suffix}": 1000**power for power, prefix in enumerate("kmgt", 1) for suffix in ("", "b")},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_number(value: object) -> float:
    """Parse a finite number, also from a text such as "1e-4", which YAML front ends produce."""
    # Python's bool is an int: `true` would be the number 1.
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise ValueError("must be a number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError("must be a number") from None
    except OverflowError:  # an integer beyond all floats
        raise ValueError("must be a finite number") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


def parse_count(value: object) -> int:
    """Parse a whole number. 4.0 and 1e9 are whole, 4.5 is not."""
    # Integers are not converted to floats: above 2^53 they would lose their last digits.
    number = int(value) if not isinstance(value, bool) and isinstance(value, Integral) else parse_number(value)
    if number != int(number):
        raise ValueError("must be a whole number")
    if abs(number) >= 1 << 63:
        raise ValueError("must be less than 2^63")
    return int(number)


def parse_rounded(value: object) -> int:
    """Parse a number of elements, rounded: tools compute values such as 0.9 * hidden_size**2."""
    return round(parse_number(value))


def parse_bytes(value: object) -> int:
    """Parse a positive number of bytes, also from a text such as "2GB" (2e9), "2GiB" (2 * 2**30), "384 MB" or "1.5g"."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        factor = _FACTORS.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ValueError('must be a size such as "2GB" (2e9 bytes), "2GiB" (2 * 2**30 bytes) or a number of bytes')
        num_bytes = round(parse_number(match[1].replace("_", "")) * factor)
    else:
        num_bytes = parse_rounded(value)
    if num_bytes <= 0:
        raise ValueError("must be more than 0 bytes")
    return num_bytes


def parse_flag(value: object) -> bool:
    """Parse a flag, also from 0, 1 or a text such as "true", which DeepSpeed's tuning tool writes."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _FLAGS:
        return _FLAGS[value.strip().lower()]
    if isinstance(value, Real) and value in (0, 1):
        return bool(value)
    raise ValueError("must be true or false")


def parse_names(value: object) -> tuple[str, ...]:
    """Parse a text (or path), or a list of them, to a tuple."""
    # A single name needs no brackets.
    values = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str | PurePath) and str(item) for item in values):
        raise ValueError("must be a text or a list of texts")
    return tuple(map(str, values))


FROZEN_DTYPES = ("bf16", "int8", "nf4", "fp8_e4m3")


def parse_frozen_dtype(value: object) -> str | tuple[tuple[str, str], ...] | None:
    """Parse one of `FROZEN_DTYPES`, or an object from patterns of names to them, which becomes pairs."""
    if value is None or is_auto(value):
        return None
    if isinstance(value, str):
        return _frozen_dtype(value)
    # Pairs are this function's own result: a validated block may be validated again.
    if isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        value = dict(value)
    if not isinstance(value, Mapping) or not all(isinstance(pattern, str) and pattern for pattern in value):
        raise ValueError(f'must be one of {", ".join(FROZEN_DTYPES)}, or an object such as {{"*.mlp.*": "nf4"}}')
    return tuple((pattern, _frozen_dtype(name)) for pattern, name in value.items())


def _frozen_dtype(value: object) -> str:
    name = parse_choice(value)
    if name not in FROZEN_DTYPES:
        raise ValueError(f"must be one of {', '.join(FROZEN_DTYPES)}, not {value!r}")
    return str(name)


def parse_path(value: object) -> str:
    """Parse a text (or path) that can name a file."""
    if not isinstance(value, str | PurePath) or not str(value):
        raise ValueError("must be the path of a file")
    # A JSON escape can spell half of a surrogate pair ("\ud800"), which no file name can encode.
    # The other halves stand for bytes of names that are not UTF-8 (os.fsdecode).
    if re.search(r"[\0\ud800-\udc7f\udd00-\udfff]", str(value)):
        raise ValueError("has a character that paths cannot have")
    return str(value)


def parse_choice(value: object) -> object:
    """Convert a text to lower case. The type of the field lists the choices."""
    return value.strip().lower() if isinstance(value, str) else value


def is_auto(value: object) -> bool:
    """Whether the value is "auto"."""
    return isinstance(value, str) and value.strip().lower() == "auto"
