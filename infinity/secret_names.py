"""Which settings and environment variables hold secrets, by their names."""

from __future__ import annotations

import re

# `key` counts only where no letter precedes it: "monkey" is no secret. Plurals count as well.
_SECRET = re.compile(r"(token|secret|password|passwd|passphrase|credentials?|auth|(?<![a-z])key|api_?key)s?$")
# user:password@ in front of a host, as in a proxy's URL.
_CREDENTIALS = re.compile(r"://[^/\s@]*:[^/\s@]*@")


def is_secret(name: str, value: object = "") -> bool:
    """Whether a value must not be shown: by its name (``HF_TOKEN``, ``api_key``), or as a URL with a password in it."""
    return _SECRET.search(name.lower()) is not None or _CREDENTIALS.search(str(value)) is not None
