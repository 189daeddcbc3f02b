"""Requests for structured outputs, checked before anything is compiled."""

import pickle
from typing import Any

import pytest

from hpu_duo.sampling import SamplingParams, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ü", None]}}}


def test_it_is_a_value() -> None:
    mine = StructuredOutputs(json=SCHEMA)
    assert mine == StructuredOutputs(json=SCHEMA) == pickle.loads(pickle.dumps(mine))
    assert len({mine, StructuredOutputs(json=SCHEMA), StructuredOutputs(json={"type": "object"})}) == 2
    params = SamplingParams(structured_outputs=mine)
    assert hash(params) == hash(SamplingParams(structured_outputs=mine))


def test_a_schema_keeps_the_order_of_its_keys() -> None:
    text = StructuredOutputs(json=SCHEMA).json
    assert isinstance(text, str)
    assert text.index('"b"') < text.index('"a"')
    assert StructuredOutputs(json=text).json == text


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"json": SCHEMA}, "json"),
        ({"json": "{}"}, "json"),
        ({"json_object": True}, "json_object"),
        ({"regex": "a+"}, "regex"),
        ({"choice": ["a", "b"]}, "choice"),
        ({"choice": iter(["a", "b"])}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
    ],
)
def test_one_field_is_set(given: dict[str, Any], field: str) -> None:
    assert StructuredOutputs(**given).field == field


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"regex": "a", "json_object": True}, "got json_object and regex"),
        ({"json": "{"}, "structured_outputs.json: expected a JSON schema, got no JSON"),
        ({"json": "[1]"}, r"structured_outputs.json: .*, an object, got \[1\]"),
        ({"json": {"a": {1}}}, "structured_outputs.json: expected values of JSON"),
        ({"json": True}, "structured_outputs.json: .*, an object, got True"),
        ({"json_object": "yes"}, "structured_outputs.json_object: expected true or false, got 'yes'"),
        ({"regex": ""}, "structured_outputs.regex: expected a text that is not empty, got ''"),
        ({"regex": 5}, "structured_outputs.regex: expected a text that is not empty, got 5"),
        ({"regex": "a" * (2**20 + 1)}, "structured_outputs.regex: expected at most 1048576 characters"),
        ({"choice": []}, "structured_outputs.choice: expected one or more strings"),
        ({"choice": "ab"}, "structured_outputs.choice: expected one or more strings"),
        ({"choice": ["a", ""]}, "structured_outputs.choice: expected one or more strings"),
        ({"choice": ["a", 1]}, "structured_outputs.choice: expected one or more strings"),
        ({"grammar": b"x"}, "structured_outputs.grammar: expected a text"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_its_field(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**given)


def test_other_fields_that_choose_tokens_are_refused_beside_it() -> None:
    structured = StructuredOutputs(regex="a")
    with pytest.raises(ValueError, match="structured_outputs: expected none with host_sampler"):
        SamplingParams(structured_outputs=structured, host_sampler=lambda index: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="structured_outputs: expected StructuredOutputs or None"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
