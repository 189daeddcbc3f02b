"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients pass over; it keeps a proxy from closing a connection on which nothing comes."""

DONE = b"data: [DONE]\n\n"

as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def event(data: Any) -> bytes:
    """An event that carries a JSON value."""
    return f"data: {as_json(data)}\n\n".encode()


class EventFrame:
    """Events that carry one object each, whose first members are always the same and are written once.

    Args:
        first: these members; at least one.
    """

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._beginning = f"data: {as_json(first)[:-1]},"

    def event(self, rest: Mapping[str, Any]) -> bytes:
        """An event with the other members; at least one."""
        return f"{self._beginning}{as_json(rest)[1:]}\n\n".encode()
