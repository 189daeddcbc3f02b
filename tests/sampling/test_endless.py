"""Schemas that only endless JSON keeps to are told from those that refer to themselves and can end."""

from __future__ import annotations

from typing import Any

import pytest

from hpu_duo.sampling.params import is_endless

A, B, NULL = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b~1"}, {"type": "null"}


def node(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (A, NULL, True),
        (node(next=A), NULL, True),
        (node(next=B), node(next=A), True),
        (node(next=B), {"anyOf": [A, NULL]}, False),
        (node(next=B), {"oneOf": [A, node(x=A)]}, True),
        ({"allOf": [NULL, B]}, node(next=B), True),
        ({**node(next=A), "required": []}, NULL, False),
        ({**node(next=A), "enum": [{}]}, NULL, False),
        ({"type": "array", "items": A}, NULL, False),
        ({"type": "array", "items": A, "minItems": 1}, NULL, True),
        ({"type": ["array", "null"], "items": A, "minItems": 1}, NULL, False),
        ({"type": "array", "prefixItems": [NULL, A], "minItems": 1}, NULL, False),
        ({"type": "array", "prefixItems": [NULL, A], "minItems": 2}, NULL, True),
        (node(next={"$ref": "#"}), NULL, True),
        (node(next={"$ref": "#/nowhere"}), NULL, False),
        ({"type": "object", "properties": 5, "required": "x"}, NULL, False),
        ({"type": "object", "required": ["x"], "additionalProperties": A}, NULL, True),
        ({"type": "object", "required": ["x"], "patternProperties": {"^x": A}}, NULL, True),
        ({"type": "object", "required": ["x"], "patternProperties": {"(": A, "^y": A}}, NULL, False),
        (node(next={"$ref": "#anchor"}), NULL, False),
    ],
)
def test_what_is_required_decides(a: object, b: object, expected: bool) -> None:
    assert is_endless({**node(first=A), "$defs": {"a": a, "b/": b}}) is expected


def test_a_chain_that_is_too_long_to_follow_is_left_to_the_compiler() -> None:
    chain = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(50_000)}
    assert not is_endless({"$ref": "#/$defs/0", "$defs": chain})
