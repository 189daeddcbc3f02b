"""Server-sent events."""

from __future__ import annotations

import json
from typing import Any

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients pass over; it keeps a proxy from closing a connection on which nothing comes."""

DONE = b"data: [DONE]\n\n"

as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def event(data: Any) -> bytes:
    """An event that carries a JSON value."""
    return f"data: {as_json(data)}\n\n".encode()
