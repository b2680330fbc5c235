"""JSON that no checkpoint of ours holds: it is refused, whatever it claims."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infinity.numerics.plain_data import UNREADABLE, from_json

_HOSTILE: dict[str, dict[str, Any]] = {
    "a tensor that is larger than its bytes": {"__is__": "tensor", "dtype": "float32", "shape": [4000], "value": ""},
    "a negative shape": {"__is__": "tensor", "dtype": "uint8", "shape": [-1], "value": "AAAA"},
    "no dtype": {"__is__": "tensor", "dtype": "load", "shape": [1], "value": "AAAA"},
    "text that is none": {"__is__": "array", "dtype": "<U1", "shape": [1], "value": "/////w=="},
    "many empty texts": {"__is__": "array", "dtype": "<U0", "shape": [(1 << 63) - 1], "value": ""},
    "no type": {"__is__": "object", "value": 7},
    "bytes before the file": {"__is__": "bytes", "at": -7, "bytes": 7},
    "a list as a key": {"__is__": "dict", "value": [[[1], 2]]},
}


@pytest.mark.parametrize("case", _HOSTILE)
def test_what_is_no_plain_data_is_refused(case: str) -> None:
    with pytest.raises(UNREADABLE):
        from_json(json.dumps(_HOSTILE[case]), bytes(7))
