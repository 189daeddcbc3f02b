"""Tools: the template shows them, and what the model writes comes back as calls, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from hpu_duo.server.planning import chat
from tests.server.conftest import TinyChat
from tests.server.live import Live, live

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [WEATHER, *({"type": "function", "function": {"name": name}} for name in "fg")],
    "stop": ["~"],
}
ONE = 'Hm.<tool_call>{"name":"f","arguments":{"x":"y"}}~'
TWO = '<tool_call>{"name":"f","arguments":{}}\n<tool_call>{"name":"g"}~'


@pytest.fixture
def server(tiny: TinyChat) -> Iterator[Live]:
    with live(tiny.load(max_model_len=160)) as running:
        yield running


@pytest.fixture
def writes(server: Live, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the model write a given text."""
    params_of = chat.params_of

    def let(text: str) -> None:
        assert server.model.tokenizer is not None
        tokens = tuple(server.model.tokenizer(text)["input_ids"])
        monkeypatch.setattr(
            chat,
            "params_of",
            lambda *given, **named: replace(params_of(*given, **named), forced_token_ids=tokens),
        )

    return let


def test_the_template_sees_the_tools(server: Live) -> None:
    client = server.client()
    with_tools = client.chat.completions.create(**ASKED, max_tokens=1).usage
    without = client.chat.completions.create(**ASKED, tool_choice="none", max_tokens=1).usage
    assert with_tools is not None
    assert without is not None
    assert with_tools.prompt_tokens - without.prompt_tokens == len("[<tool_call>3]")


def test_a_call_is_a_call_and_what_stands_before_it_is_content(server: Live, writes: Any) -> None:
    writes(ONE)
    [choice] = server.client().chat.completions.create(**ASKED).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Hm."
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "f", '{"x":"y"}')


def streamed(parts: list[ChatCompletionChunk]) -> tuple[str, list[list[str]], str | None]:
    """Content, calls as id, name and arguments, and the finish reason."""
    content, calls, reason = "", list[list[str]](), None
    for part in parts:
        ChatCompletionChunk.model_validate(part.to_dict(), strict=True)
        [choice] = part.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for one in choice.delta.tool_calls or ():
            assert one.function is not None
            if one.index == len(calls):
                assert one.type == "function"
                calls.append([one.id or "", one.function.name or "", ""])
            calls[one.index][2] += one.function.arguments or ""
    return content, calls, reason


@pytest.mark.parametrize("text", [ONE, TWO, "no calls~"])
def test_a_stream_has_the_same_calls_as_the_whole(server: Live, writes: Any, text: str) -> None:
    writes(text)
    client = server.client()
    [choice] = client.chat.completions.create(**ASKED).choices
    parts = list(client.chat.completions.create(**ASKED, stream=True))
    content, calls, reason = streamed(parts)
    assert (content or None, reason) == (choice.message.content or None, choice.finish_reason)
    whole = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    assert [(name, arguments) for _, name, arguments in calls] == whole
    assert len({call_id for call_id, _, _ in calls}) == len(calls)
    assert parts[0].choices[0].delta.role == "assistant"


def test_pieces_of_arguments_add_up(server: Live, writes: Any) -> None:
    writes(ONE)
    pieces = [
        one.function.arguments
        for part in server.client().chat.completions.create(**ASKED, stream=True)
        for one in part.choices[0].delta.tool_calls or ()
        if one.function is not None and one.function.arguments
    ]
    # One piece a token, or fewer: what waits for a reader who lags behind is sent together.
    assert "".join(pieces) == '{"x":"y"}'


def test_only_the_first_call_is_left_when_only_one_is_wanted(server: Live, writes: Any) -> None:
    writes(TWO)
    [choice] = server.client().chat.completions.create(**ASKED, parallel_tool_calls=False).choices
    assert choice.message.tool_calls is not None
    assert [call.function.name for call in choice.message.tool_calls] == ["f"]


def test_earlier_calls_and_their_results_go_to_the_template(server: Live) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    done = server.client().chat.completions.create(**{**ASKED, "messages": messages}, max_tokens=1)
    assert done.usage is not None
    assert done.usage.prompt_tokens == len("[<tool_call>1]u:hi;a:;t:5;a:")
    broken = {**call, "function": {"name": "f", "arguments": "{"}}
    messages[1] = {**messages[1], "tool_calls": [broken]}
    with pytest.raises(openai.BadRequestError, match="JSON"):
        server.client().chat.completions.create(**{**ASKED, "messages": messages})


def test_a_model_without_tool_calls_says_so(tiny: TinyChat) -> None:
    with (
        live(tiny.load(), tool_call_parser="none") as server,
        pytest.raises(openai.BadRequestError, match="tools"),
    ):
        server.client().chat.completions.create(**ASKED)
