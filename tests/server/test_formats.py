"""Answers of a format that the request asks for, through the openai package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from transformers import GenerationConfig

from hpu_duo.sampling.field_error import FieldError
from hpu_duo.sampling.guidance import GrammarState
from hpu_duo.server.planning.strict import closed
from tests.engine.tiny import make_tiny
from tests.server.conftest import TinyChat
from tests.server.live import Live, live

EOS = 2
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 3}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


class Person(BaseModel):
    """A schema as users of the openai package write it."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=4)
    mood: Literal["good", "bad"]


@contextmanager
def served(tmp_path_factory: pytest.TempPathFactory, **settings: Any) -> Iterator[Live]:
    tiny = make_tiny(tmp_path_factory.mktemp("ending"), {EOS: "<eos>"})
    GenerationConfig(pad_token_id=0, eos_token_id=EOS).save_pretrained(tiny.path)
    with live(TinyChat(tiny).load(max_model_len=200), **settings) as running:
        yield running


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


@pytest.mark.parametrize("body", FORMATS, ids=str)
@pytest.mark.parametrize("stream", [False, True])
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


def test_a_chosen_function_is_called_once(server: Live) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    done = server.client().chat.completions.create(**ASKED, tools=[CLOCK, WEATHER], tool_choice=choice)
    [call] = done.choices[0].message.tool_calls or []
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")
    assert not done.choices[0].message.content


def test_a_call_is_made_where_one_is_required_in_streams_too(server: Live) -> None:
    asked = {**ASKED, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    parts = [part.choices[0] for part in server.client().chat.completions.create(**asked, stream=True)]
    calls = [call.function for part in parts for call in part.delta.tool_calls or []]
    assert "".join(call.name or "" for call in calls if call) == "weather"
    arguments = json.loads("".join(call.arguments or "" for call in calls if call))
    assert arguments.keys() == {"city", "unit"}
    assert parts[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"extra_body": {"response_format": {"type": "grammar", "grammar": "start: /a/"}}},
            "response_format",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_calls_that_cannot_be_forced_are_refused(server: Live, changes: dict[str, Any], param: str) -> None:
    asked = {**ASKED, "tools": [WEATHER], **changes}
    with pytest.raises(openai.BadRequestError) as error:
        server.client().chat.completions.create(
            **{name: each for name, each in asked.items() if each is not None}
        )
    assert error.value.param == param


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
def test_with_a_format_the_answer_keeps_to_it_or_is_a_call(
    parser: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    city = {"$ref": "#/$defs/city"}
    parameters = {"properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    tool = {"name": "at", "parameters": {**parameters, "$defs": {"city": {"enum": ["Rome", "Oslo"]}}}}
    tools = [{"type": "function", "function": tool}]
    mood = {"type": "object", "properties": {"mood": {"enum": ["good"]}}, "required": ["mood"]}
    mood["additionalProperties"] = False
    answer = {"type": "json_schema", "json_schema": {"name": "p", "schema": mood}}
    with served(tmp_path_factory, tool_call_parser=parser) as server:
        create = server.client().chat.completions.create
        plain = create(**ASKED, n=24, tools=tools, extra_body={"response_format": answer})  # type: ignore[call-overload]
        messages = [choice.message for choice in plain.choices if choice.finish_reason != "length"]
    called = [call for message in messages for call in message.tool_calls or ()]
    assert called
    assert all(json.loads(call.function.arguments)["city"] in ("Rome", "Oslo") for call in called)
    told = [message.content for message in messages if not message.tool_calls]
    assert told
    assert all(json.loads(content) == {"mood": "good"} for content in told)


@pytest.mark.parametrize("stream", [False, True])
def test_the_markup_of_a_forced_call_that_is_cut_is_no_content(server: Live, stream: bool) -> None:
    create = server.client().chat.completions.create
    for most in (1, 11, 20):
        asked = {**ASKED, "tools": [WEATHER], "tool_choice": "required", "max_tokens": most}
        if stream:
            parts = [part.choices[0] for part in create(**asked, stream=True)]
            assert not any(part.delta.content for part in parts)
            assert parts[-1].finish_reason == "length"
        else:
            [choice] = create(**asked).choices
            assert (choice.message.content or "", choice.finish_reason) == ("", "length")


def test_a_model_without_a_format_of_calls_writes_forced_ones(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with served(tmp_path_factory, tool_call_parser="none") as server:
        asked = {**ASKED, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
        [choice] = server.client().chat.completions.create(**asked).choices
    [call] = choice.message.tool_calls or []
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")


def test_strict_schemas_are_closed(server: Live, http: httpx.Client) -> None:
    assert closed({"properties": {"a": {"type": "object"}, "b": {"items": {"properties": {}}}}}, "f") == {
        "additionalProperties": False,
        "properties": {
            "a": {"type": "object", "additionalProperties": False},
            "b": {"items": {"properties": {}, "additionalProperties": False}},
        },
    }
    parts = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    assert closed(parts, "f") == parts
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {}}}}
    asked = {**ASKED, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = server.client().chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {}
    schema = {"type": "object", "properties": {}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    done = server.client().chat.completions.create(**ASKED, response_format=wanted)  # type: ignore[call-overload]
    assert json.loads(done.choices[0].message.content or "") == {}
    schema["additionalProperties"] = True
    refused = http.post("/v1/chat/completions", json={**ASKED, "response_format": wanted})
    assert refused.json()["error"]["param"] == "response_format"


def test_a_schema_that_stands_for_nothing_but_itself_is_refused_in_a_sentence(http: httpx.Client) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    response = http.post("/v1/chat/completions", json={**ASKED, "response_format": wanted})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert "stands for nothing but itself" in error["message"]
    itself = {"$ref": "#/$defs/a"}
    schema = {"type": "object", "properties": {"a": itself}, "required": ["a"], "$defs": {"a": itself}}
    response = http.post("/v1/chat/completions", json={**ASKED, "guided_json": schema})
    assert "stands for nothing but itself" in response.json()["error"]["message"]


def test_a_format_is_served_beside_tools_that_are_not_to_be_called(server: Live) -> None:
    done = server.client().chat.completions.create(
        **ASKED,
        tools=[WEATHER],
        tool_choice="none",
        extra_body={"response_format": {"type": "regex", "regex": CODE}},
    )
    assert re.fullmatch(CODE, done.choices[0].message.content or "")
