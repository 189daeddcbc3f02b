"""JSON schemas that no finite JSON keeps to, since what they require refers to itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

ENDLESS = "expected a schema that finite JSON keeps to, got one whose required parts never end"
"""The refusal of such a schema."""

_MOST_PASSES = 16


def is_endless(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is met by endless JSON alone: an output would go on until it is cut.

    A schema for which that takes long to tell counts as one that is not.
    """
    reader = _Reader(schema)
    try:
        for _ in range(_MOST_PASSES):
            num_finite = len(reader.finite)
            reader.seen.clear()
            if reader.is_finite(schema):
                return False
            if len(reader.finite) == num_finite:
                return True
    except RecursionError:
        pass
    return False


class _Reader:
    """Finds out what finite JSON can keep to; references count as endless until they are known not to be.

    Attributes:
        finite: references that finite JSON keeps to.
        seen: references that were followed in this pass.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self.finite: set[str] = set()
        self.seen: set[str] = set()

    def is_finite(self, schema: object) -> bool:
        if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._is_reference_finite(reference):
            return False
        if not all(map(self.is_finite, _list(schema.get("allOf")))):
            return False
        for several in (_list(schema.get("anyOf")), _list(schema.get("oneOf"))):
            if several and not any(map(self.is_finite, several)):
                return False
        kinds = schema.get("type")
        if kinds is None:
            return True
        return any(self._is_kind_finite(kind, schema) for kind in (_list(kinds) or [kinds]))

    def _is_reference_finite(self, reference: str) -> bool:
        if reference in self.finite:
            return True
        if reference in self.seen:
            return False
        self.seen.add(reference)
        is_finite = self.is_finite(self._target(reference))
        if is_finite:
            self.finite.add(reference)
        return is_finite

    def _target(self, reference: str) -> object:
        """The schema that a reference stands for; None where there is none, which the compiler tells."""
        found: object = self._root if reference == "#" or reference.startswith("#/") else None
        for part in reference.lstrip("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def _is_kind_finite(self, kind: object, schema: Mapping[str, Any]) -> bool:
        if kind == "object":
            required = (name for name in _list(schema.get("required")) if isinstance(name, str))
            return all(self.is_finite(each) for name in required for each in _of_member(schema, name))
        least = schema.get("minItems")
        if kind != "array" or not isinstance(least, int) or least < 1:
            return True
        first = _list(schema.get("prefixItems"))
        return all(map(self.is_finite, first[:least])) and (
            least <= len(first) or self.is_finite(schema.get("items"))
        )


def _of_member(schema: Mapping[str, Any], name: str) -> list[Any]:
    """The schemas that a member of an object has to meet."""
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(named, Mapping) and name in named:
        return [named[name]]
    found = []
    for pattern, each in patterns.items() if isinstance(patterns, Mapping) else ():
        with suppress(re.error):  # the compiler tells
            found += [each] if re.search(pattern, name) else []
    return found or [schema.get("additionalProperties")]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
