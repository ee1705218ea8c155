"""Canonical JSON: one value, one byte string. What is hashed or signed goes through here."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8, and never NaN or infinity (ValueError).

    For every JSON value v: canonical_json(json.loads(canonical_json(v))) == canonical_json(v).
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
