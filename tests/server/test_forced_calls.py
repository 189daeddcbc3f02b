"""Answers that are calls of tools, or a format beside them, through the openai package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from hpu_duo.sampling import StructuredOutputs
from hpu_duo.sampling.guidance import Grammars
from hpu_duo.server.planning.plan import closed
from hpu_duo.server.tools import calls_grammar
from tests.server.ending import ASKED, CLOCK, WEATHER, served
from tests.server.live import Live
from tests.tiers import further

_ITSELF = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
ENDLESS = {
    "type": "function",
    "function": {"name": "f", "parameters": {**_ITSELF, "$defs": {"a": _ITSELF}}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of a model with an end-of-text token."""
    with served(tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Live) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


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
            {"extra_body": {"structured_outputs": {"grammar": f"start: /a/\n// {'x' * (2**20 - 50)}"}}},
            "tools",
        ),
        ({"tools": [ENDLESS], "tool_choice": "required"}, "tools"),
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


@pytest.mark.parametrize("parser", ["hermes", *further("llama3_json")])
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
    choice = {
        "anyOf": [{"properties": {"a": {}}}, {"type": ["object", "null"]}],
        "$defs": {"d": {"properties": {}}},
    }
    assert closed(choice, "f") == {
        "anyOf": [
            {"properties": {"a": {}}, "additionalProperties": False},
            {"type": ["object", "null"], "additionalProperties": False},
        ],
        "$defs": {"d": {"properties": {}, "additionalProperties": False}},
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


def test_a_format_is_served_beside_tools_that_are_not_to_be_called(server: Live) -> None:
    done = server.client().chat.completions.create(
        **ASKED,
        tools=[WEATHER],
        tool_choice="none",
        extra_body={"response_format": {"type": "regex", "regex": "[A-Z]{2}"}},
    )
    assert re.fullmatch("[A-Z]{2}", done.choices[0].message.content or "")


def strict(city: str) -> dict[str, Any]:
    parameters = {"properties": {"city": {"enum": [city]}}, "required": ["city"]}
    return {"type": "function", "function": {"name": "at", "strict": True, "parameters": parameters}}


def test_strict_tools_are_kept_to_where_the_model_may_write_text(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with served(tmp_path_factory, tool_call_parser="llama3_json") as server:
        assert server.model.tokenizer is not None
        [brace] = server.model.tokenizer.encode("{", add_special_tokens=False)
        create: Any = server.client().chat.completions.create
        asked: dict[str, Any] = {**ASKED, "tools": [strict("Rome"), CLOCK], "parallel_tool_calls": False}
        text = create(**asked, logit_bias={str(brace): -100}, max_tokens=9).choices[0]
        assert text.message.content
        assert not text.message.tool_calls
        called = create(**asked, logit_bias={str(brace): 100}).choices[0].message
        [call] = called.tool_calls
        if call.function.name == "at":
            assert json.loads(call.function.arguments) == {"city": "Rome"}
        asked["tools"] = [strict("Rome")]
        [call] = create(**asked, logit_bias={str(brace): 100}).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("at", {"city": "Rome"})


CALL = '<tool_call>\n{"name": "at", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("parser", "text", "is_whole"),
    [
        ("hermes", "Hello <tool", True),
        ("hermes", f"I look: {CALL} and{CALL}", True),
        ("hermes", CALL.replace("Rome", "Bern"), False),
        ("hermes", "<tool_call> what", False),
        ("llama3_json", "Hello {", True),
        ("llama3_json", '{"name": "at", "parameters": {"city": "Rome"}}', True),
        ("llama3_json", '{"name": "at", "parameters": {"city": "Bern"}}', False),
        ("llama3_json", '{"a": 1}', False),
    ],
)
def test_text_is_free_and_calls_are_strict(server: Live, parser: str, text: str, is_whole: bool) -> None:
    at = strict("Rome")["function"]["parameters"]
    grammar = calls_grammar(parser, [("at", closed(at, "tools"))], is_one=False, is_free=True)
    tokenizer = server.model.tokenizer
    assert tokenizer is not None
    state = Grammars(tokenizer, len(tokenizer), [2]).start(StructuredOutputs(grammar=grammar))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert (state.num_accepted_of(tokens) == len(tokens)) is is_whole


@pytest.mark.parametrize(
    ("schema", "arguments", "is_whole"),
    [
        # References hold within a schema, wherever its ``$id`` says that it is.
        ({"$id": "http://a.test/s", "properties": {"a": {"$ref": "#/$defs/d"}}}, '{"a": 1}', True),
        ({"$id": "http://a.test/s", "properties": {"a": {"$ref": "#/$defs/d"}}}, '{"a": 2}', False),
        # Constants are values, and properties may have the names of keywords.
        ({"properties": {"a": {"const": {"$ref": "#/b"}}}}, '{"a": {"$ref": "#/b"}}', True),
        ({"properties": {"a": {"enum": [{"$ref": "#"}]}}}, '{"a": {"$ref": "#"}}', True),
        ({"properties": {"const": {"$ref": "#/$defs/d"}}}, '{"const": 1}', True),
        ({"properties": {"const": {"$ref": "#/$defs/d"}}}, '{"const": 2}', False),
    ],
)
def test_beside_a_format_schemas_of_arguments_mean_what_they_do_alone(
    schema: dict[str, Any], arguments: str, is_whole: bool
) -> None:
    schema |= {"$defs": {"d": {"const": 1}}, "additionalProperties": False}
    answer = StructuredOutputs(choice=["none"])
    grammar = calls_grammar("llama3_json", [("at", schema)], is_one=True, answer=answer)
    tokenizer = LLTokenizer("byte")
    tokens = tokenizer.tokenize_str(f'{{"name": "at", "parameters": {arguments}}}')
    assert (LLMatcher(tokenizer, grammar).try_consume_tokens(tokens) == len(tokens)) is is_whole


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
def test_beside_a_grammar_the_answer_keeps_to_it_or_is_a_call(
    parser: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    grammar = 'start: /[A-Z]{2}/ end\nend: "}" | "x"'
    with served(tmp_path_factory, tool_call_parser=parser) as server:
        create: Any = server.client().chat.completions.create
        more = {"structured_outputs": {"grammar": grammar}}
        done = create(**ASKED, n=16, tools=[strict("Rome")], parallel_tool_calls=False, extra_body=more)
    messages = [choice.message for choice in done.choices if choice.finish_reason != "length"]
    for message in messages:
        if message.tool_calls:
            assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Rome"}
        else:
            assert re.fullmatch("[A-Z]{2}[}x]", message.content)
    assert any(not message.tool_calls for message in messages)
