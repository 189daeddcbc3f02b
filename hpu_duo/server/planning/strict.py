"""Schemas that are strict: objects have the members that they name and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpu_duo.server.protocol.errors import bad_value

_CLOSING = "additionalProperties"
_OF_SCHEMAS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
"""Members beside which an object is not closed, since others name more of its members."""


def closed(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a schema whose objects are closed, as OpenAI wants of ``strict`` ones.

    Schemas of ``allOf`` stay as they are: each of them names some members of the same object.

    Args:
        field: of the request, for messages.

    Raises:
        ApiError: an object is open by its own words.
    """
    found = dict(schema)
    if found.get(_CLOSING) not in (None, False):
        raise bad_value(
            field, f"{field}: expected {_CLOSING} of false with strict, got {found[_CLOSING]!r:.60}"
        )
    is_object = "properties" in found or found.get("type") == "object" or "object" in _types(found)
    if is_object and not found.keys() & set(_COMBINED):
        found[_CLOSING] = False
    for name in _OF_SCHEMAS:
        if isinstance(inner := found.get(name), Mapping):
            found[name] = {key: _closed(each, field) for key, each in inner.items()}
    for name in _LISTS:
        if isinstance(several := found.get(name), list):
            found[name] = [_closed(each, field) for each in several]
    if "items" in found:
        found["items"] = _closed(found["items"], field)
    return found


def _closed(schema: Any, field: str) -> Any:
    return closed(schema, field) if isinstance(schema, Mapping) else schema


def _types(schema: Mapping[str, Any]) -> list[Any]:
    types = schema.get("type")
    return types if isinstance(types, list) else []
