"""Requests hold no more than they may, and what is long is worked on beside the event loop."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import httpx
import openai
import pytest

from hpu_duo.server import protocol as requests
from hpu_duo.server.http import middleware, routes
from hpu_duo.server.planning import chat as chat_planning
from hpu_duo.server.protocol import MAX_VALUES, ApiError, ValueCount
from tests.server.conftest import TinyChat
from tests.server.live import Live, live

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "user", "content": "hi"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
NAME = "x" * (requests.MAX_NAME + 1)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": ["hi"] * (requests.MAX_PROMPTS + 1)}, "prompt"),
        (TEXT, {"prompt": [[5]] * (requests.MAX_PROMPTS + 1)}, "prompt"),
        (TEXT, {"stop": ["a"] * (requests.MAX_STOPS + 1)}, "stop"),
        (TEXT, {"stop_token_ids": [5] * (requests.MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
        # Wrong values are not looked at: each of them would have an error of its own.
        (TEXT, {"logit_bias": {str(n): 1000 for n in range(requests.MAX_LOGIT_BIAS + 1)}}, "logit_bias"),
        (TEXT, {"logit_bias": {NAME: 1}}, "logit_bias"),
        (TEXT, {"guided_choice": ["a"] * (requests.MAX_GUIDED_CHOICES + 1)}, "guided_choice"),
        (TEXT, {"user": NAME}, "user"),
        (TEXT, {"model": NAME}, "model"),
        (CHAT, {"messages": TALK * (requests.MAX_MESSAGES + 1)}, "messages"),
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": ""}] * (requests.MAX_PARTS + 1)}
                ]
            },
            "messages",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * (requests.MAX_CALLS + 1)}]},
            "messages",
        ),
        (CHAT, {"messages": [{"role": NAME, "content": ""}]}, "messages"),
        (CHAT, {"tools": [tool("f")] * (requests.MAX_TOOLS + 1)}, "tools"),
        (CHAT, {"tools": [tool(NAME)]}, "tools"),
        (CHAT, {"documents": [{}] * (requests.MAX_DOCUMENTS + 1)}, "documents"),
        (
            CHAT,
            {"chat_template_kwargs": {f"v{n}": 1 for n in range(requests.MAX_VARIABLES + 1)}},
            "chat_template_kwargs",
        ),
        ("/tokenize", {"messages": TALK * (requests.MAX_MESSAGES + 1)}, "messages"),
    ],
)
def test_lists_maps_and_names_have_a_longest(
    server: Live, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {**({"prompt": "hi"} if path == TEXT else {"messages": TALK}), **fields}
    with server.http() as http:
        refused = http.post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert "at most" in error["message"]


def test_as_many_biases_as_may_be_are_served_and_a_wrong_one_is_named_once(server: Live) -> None:
    create = server.client().completions.create
    biases = {str(number): 1 for number in range(64)}
    assert create(model="tiny", prompt="hi", max_tokens=1, logit_bias=biases).choices
    with pytest.raises(openai.BadRequestError, match="less than or equal to 100") as refused:
        create(model="tiny", prompt="hi", logit_bias=dict.fromkeys(biases, 1000))
    assert refused.value.message.count("less than") == 1


def test_a_refusal_repeats_only_the_beginning_of_what_came(server: Live) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": "x" * 100_000}}
    talk: list[Any] = [*TALK, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError, match="expected JSON as arguments") as refused:
        server.client().chat.completions.create(model="tiny", messages=talk)
    assert len(refused.value.message) < 300
    long = ApiError(400, "x" * 100_000)
    assert len(long.message) < 2100
    assert long.message.endswith("...")


def test_a_body_of_too_many_values_is_refused_before_it_is_read(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "from_json", None)
    with server.http() as http:
        refused = http.post(TEXT, content=b'{"unknown": [' + b"{}," * MAX_VALUES + b"{}]}")
    assert refused.status_code == 413
    assert "1,048,576 JSON values" in refused.json()["error"]["message"]


def test_arguments_of_tool_calls_are_no_way_around_it(server: Live) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": json.dumps([0] * (MAX_VALUES * 6 // 10))}}
    talk: list[Any] = [*TALK, {"role": "assistant", "tool_calls": [call] * 2}]
    with pytest.raises(
        openai.BadRequestError, match=r"messages\[1\].tool_calls: expected .* at most 1,048,576 values"
    ):
        server.client().chat.completions.create(model="tiny", messages=talk)
    deep: list[Any] = [
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[" * 90}}]}
    ]
    with pytest.raises(openai.BadRequestError, match="expected JSON as arguments"):
        server.client().chat.completions.create(model="tiny", messages=deep)


def test_a_schema_as_text_may_nest_as_deep_as_it_likes(server: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="guided_json"):
        server.client().completions.create(
            model="tiny", prompt="hi", extra_body={"guided_json": "[" * 100_000}
        )


def _num_values(value: object) -> int:
    """Values in a JSON value but for one, and seven for each key."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + 7 * len(value) + sum(map(_num_values, value.values()))
    return 1 + max(0, len(value) - 1) + sum(map(_num_values, value)) if isinstance(value, list) else 0


def _any_value(draw: random.Random, depth: int = 4) -> Any:
    kind = draw.randrange(4 if depth else 2)
    if kind < 2:
        return "".join(draw.choice(',[{}]"\\é\n') for _ in range(draw.randrange(8))) if kind else 5
    parts = [_any_value(draw, depth - 1) for _ in range(draw.randrange(6))]
    return parts if kind == 2 else {f'",:[{number}\\': part for number, part in enumerate(parts)}


def test_values_are_counted_wherever_a_text_is_cut() -> None:
    draw = random.Random(0)
    for _ in range(300):
        value = _any_value(draw)
        text, count = json.dumps(value).encode(), ValueCount()
        place = 0
        while place < len(text):
            size = draw.randrange(1, 6)
            count.add(text[place : place + size])
            place += size
        assert count.num_values == _num_values(value), text


class Threads:
    """Names of the threads that a function is called in."""

    def __init__(self, function: Any) -> None:
        self._function, self.names = function, set[str]()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.names.add(threading.current_thread().name)
        return self._function(*arguments, **named)


def test_what_is_long_is_read_checked_and_written_beside_the_loop(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny.load()) as server, server.http() as http:
        server.service.engine.short_tokens = 32
        watched: list[Threads] = []

        def watch(owner: Any, name: str) -> None:
            watched.append(Threads(getattr(owner, name)))
            monkeypatch.setattr(owner, name, watched[-1])

        watch(middleware, "from_json")
        watch(routes, "as_json")
        watch(chat_planning, "_for_template")
        watch(server.model.engine, "check_request")
        ask(http)
        [loop] = {name for one in watched for name in one.names}
        ask(http, is_long=True)
        assert all(one.names - {loop} for one in watched)
        for one in watched:
            one.names.clear()
        ask(http, is_long=True)
        assert all(loop not in one.names for one in watched)


def ask(http: httpx.Client, is_long: bool = False) -> None:
    """Calls of each kind."""
    padding = {"ignored": "x" * 50_000 if is_long else ""}
    http.post("/detokenize", json={"tokens": [5] * (10_000 if is_long else 5), **padding}).raise_for_status()
    talk = [{"role": "user", "content": "x" * 40 if is_long else "hi"}]
    http.post(CHAT, json={"messages": talk, "max_tokens": 1, **padding}).raise_for_status()
    prompt = [5] * (40 if is_long else 5)
    http.post(TEXT, json={"prompt": prompt, "max_tokens": 1, **padding}).raise_for_status()
