"""Answers of a format that the request asks for, through the openai package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from hpu_duo.sampling.guidance import GrammarState
from hpu_duo.sampling.params import FieldError
from tests.server.ending import ASKED, served
from tests.server.live import Live
from tests.tiers import crossed


class Person(BaseModel):
    """A schema as users of the openai package write it."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=4)
    mood: Literal["good", "bad"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of a model with an end-of-text token."""
    with served(tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Live) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def test_a_class_of_the_caller_is_parsed(server: Live) -> None:
    done = server.client().chat.completions.parse(**ASKED, response_format=Person)
    assert isinstance(done.choices[0].message.parsed, Person)
    assert done.choices[0].finish_reason == "stop"


def test_json_objects_come_from_both_endpoints(server: Live) -> None:
    chat = server.client().chat.completions.create(
        **ASKED, response_format={"type": "json_object"}, temperature=0
    )
    text = server.client().completions.create(
        model="tiny",
        prompt="hi",
        max_tokens=60,
        temperature=0,
        extra_body={"response_format": {"type": "json_object"}},
    )
    for choice, content in (
        (chat.choices[0], chat.choices[0].message.content),
        (text.choices[0], text.choices[0].text),
    ):
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(content or ""), dict)
        else:
            assert (content or "").startswith("{")


CODE = "[A-Z]{2}-[0-9]{3}"
FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "regex", "regex": CODE}},
    {"response_format": {"type": "choice", "choice": ["AB-123", "CD-456"]}},
    {"response_format": {"type": "grammar", "grammar": f"start: /{CODE}/"}},
    {"structured_outputs": {"regex": CODE}},
    {"structured_outputs": {"choice": ["AB-123", "CD-456"], "json": None, "json_object": False}},
    {"structured_outputs": {"grammar": f"start: /{CODE}/"}},
    {"guided_regex": CODE},
    {"guided_choice": ["AB-123", "CD-456"]},
    {"guided_grammar": f"start: /{CODE}/"},
]


@pytest.mark.parametrize(
    ("stream", "body"),
    crossed([False, True], {str(body): body for body in FORMATS}),
)
def test_patterns_are_kept_under_every_name(server: Live, body: dict[str, Any], stream: bool) -> None:
    client = server.client()
    if stream:
        parts = list(client.chat.completions.create(**ASKED, extra_body=body, stream=True, n=2))
        choices = [choice for part in parts for choice in part.choices]
        texts = [
            "".join(each.delta.content or "" for each in choices if each.index == index) for index in (0, 1)
        ]
    else:
        done = client.chat.completions.create(**ASKED, extra_body=body, n=2)
        texts = [choice.message.content or "" for choice in done.choices]
    assert all(re.fullmatch(CODE, text) for text in texts)


def test_guided_json_is_a_schema(http: httpx.Client) -> None:
    schema = Person.model_json_schema()
    for given in (schema, json.dumps(schema)):
        done = http.post("/v1/chat/completions", json={**ASKED, "guided_json": given}).json()
        Person.model_validate_json(done["choices"][0]["message"]["content"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {"response_format": {"type": "yaml"}},
            "response_format",
            "one of text, json_object, json_schema, regex",
        ),
        ({"response_format": {}}, "response_format", "got None"),
        ({"response_format": "json"}, "response_format", "dictionary"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "an object in json_schema.schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "y"}},
                }
            },
            "response_format",
            "Invalid type: y",
        ),
        ({"response_format": {"type": "regex"}}, "response_format", "expected regex with type 'regex'"),
        ({"response_format": {"type": "regex", "regex": "["}}, "response_format", "regex"),
        ({"response_format": {"type": "choice", "choice": []}}, "response_format", "one or more strings"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "got structural_tag"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "true or false"),
        ({"guided_regex": 5}, "guided_regex", "string"),
        ({"guided_json": "{"}, "guided_json", "got no JSON"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "not empty"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "expected no guided_regex with it"),
    ],
)
def test_what_is_no_format_is_refused_by_its_field(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    response = http.post(path, json={**ASKED, "prompt": "hi", "max_tokens": 4, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_more_choices_than_the_library_follows_are_refused_by_their_field(http: httpx.Client) -> None:
    choices = [f"a{number}" for number in range(1025)]
    asked = {"prompt": "hi", "max_tokens": 9}
    refused = http.post("/v1/completions", json={**asked, "structured_outputs": {"choice": choices}})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "structured_outputs"), error
    assert "at most 1024 choices, got 1025" in error["message"]
    served = http.post("/v1/completions", json={**asked, "guided_choice": choices[:-1]})
    assert served.json()["choices"][0]["text"] in choices


def test_a_format_that_fails_later_is_the_callers_error(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: GrammarState, token: int) -> None:
        raise FieldError("structured_outputs.regex", "too large to go on with")

    monkeypatch.setattr(GrammarState, "accept", fail)
    response = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, "guided_regex": "[ab]{9}"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "structured_outputs.regex"), error
    assert error["message"] == "structured_outputs.regex: too large to go on with"


def test_a_schema_that_is_too_deep_or_too_long_is_refused_by_its_field(http: httpx.Client) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(90):
        deep = {"type": "object", "properties": {"a": deep}}
    described = {"name": "x", "strict": True, "schema": deep}
    wanted = {"type": "json_schema", "json_schema": described}
    response = http.post("/v1/chat/completions", json={**ASKED, "response_format": wanted})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format"), error
    assert "recursion limit" in error["message"]
    long = {"name": "f", "parameters": {"properties": {}, "description": "x" * 2**20}}
    tools = [{"type": "function", "function": long}]
    response = http.post("/v1/chat/completions", json={**ASKED, "tools": tools, "tool_choice": "required"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools"), error
    assert "at most 1048576 characters" in error["message"]


def test_a_schema_that_stands_for_nothing_but_itself_is_refused_in_a_sentence(http: httpx.Client) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    response = http.post("/v1/chat/completions", json={**ASKED, "response_format": wanted})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert "refers to itself only" in error["message"]
    itself = {"$ref": "#/$defs/a"}
    schema = {"type": "object", "properties": {"a": itself}, "required": ["a"], "$defs": {"a": itself}}
    response = http.post("/v1/chat/completions", json={**ASKED, "guided_json": schema})
    assert "required parts never end" in response.json()["error"]["message"]


class Node(BaseModel):
    """A schema that refers to itself below its root, and ends."""

    model_config = ConfigDict(extra="forbid")

    value: Literal[1]
    next: Node | None


class Chain(BaseModel):
    """A list of nodes."""

    model_config = ConfigDict(extra="forbid")

    first: Node


def test_a_schema_that_refers_to_itself_below_its_root_is_served_if_it_can_end(server: Live) -> None:
    described: Any = {"name": "x", "strict": True, "schema": Chain.model_json_schema()}
    wanted: Any = {"type": "json_schema", "json_schema": described}
    create: Any = server.client().chat.completions.create
    done = create(**ASKED, n=16, response_format=wanted)
    texts = [choice.message.content for choice in done.choices if choice.finish_reason == "stop"]
    assert texts
    assert all(Chain.model_validate_json(text) for text in texts)
    required = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}
    array = {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}
    for endless in (required, array):
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
        described["schema"] = {**schema, "$defs": {"n": endless}}
        with pytest.raises(openai.BadRequestError, match="required parts never end") as refused:
            create(**ASKED, response_format=wanted)
        assert refused.value.param == "response_format"
