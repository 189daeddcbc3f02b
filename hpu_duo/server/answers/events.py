"""Server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients pass over; it keeps a proxy from closing a connection on which nothing comes."""

DONE = b"data: [DONE]\n\n"


def as_json(value: Any) -> bytes:
    """Encode plain values; pydantic's encoder takes a fifth of the time of the standard library's."""
    return to_json(value)


def event(data: Any) -> bytes:
    """An event that carries a JSON value."""
    return b"data: %b\n\n" % as_json(data)


class EventFrame:
    """Events that carry one object each, whose first members are always the same and are written once.

    Args:
        first: these members; at least one.
    """

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._beginning = b"data: %b," % as_json(first)[:-1]

    def event(self, rest: Mapping[str, Any]) -> bytes:
        """An event with the other members; at least one."""
        return b"%b%b\n\n" % (self._beginning, as_json(rest)[1:])
