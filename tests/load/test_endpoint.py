"""Events of an endpoint: those with tokens, the last ones, and those with counts."""

import json
from typing import Any

import pytest

from hpu_duo.lab.load import Endpoint
from hpu_duo.lab.load.endpoint import Piece, StreamError

COMPLETIONS, CHAT = Endpoint.COMPLETIONS, Endpoint.CHAT


def completion(text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def chat(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


CALL = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"a'}}]}


@pytest.mark.parametrize(
    ("endpoint", "event", "expected"),
    [
        (COMPLETIONS, completion("a"), Piece("a", True, True)),
        (COMPLETIONS, completion("a", "length"), Piece("a", True, True, True)),
        # A token whose text is still open, half of a character say.
        (COMPLETIONS, completion(""), Piece("", True, True)),
        (COMPLETIONS, completion("", "stop"), Piece("", False, True, True)),
        (COMPLETIONS, completion(None, "stop"), Piece("", False, True, True)),
        (CHAT, chat({"role": "assistant", "content": ""}), Piece("", False, True)),
        (CHAT, chat({"role": "assistant", "content": "a"}), Piece("a", True, True)),
        (CHAT, chat({"content": "a"}), Piece("a", True, True)),
        (CHAT, chat({"content": ""}), Piece("", True, True)),
        (CHAT, chat({"reasoning_content": "hm"}), Piece("hm", True, True)),
        (CHAT, chat({"content": None, "reasoning": "hm"}), Piece("hm", True, True)),
        (CHAT, chat(CALL), Piece('f{"a', True, True)),
        (CHAT, chat({}, "tool_calls"), Piece("", False, True, True)),
        (CHAT, {"choices": []}, Piece()),
        (
            COMPLETIONS,
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
            Piece(num_prompt_tokens=3, num_output_tokens=4),
        ),
        (
            COMPLETIONS,
            {**completion("a"), "usage": {"prompt_tokens": 3, "completion_tokens": 1}},
            Piece("a", True, True, False, 3, 1),
        ),
        (COMPLETIONS, {**completion("a"), "usage": None}, Piece("a", True, True)),
    ],
)
def test_an_event_is_read(endpoint: Endpoint, event: dict[str, Any], expected: Piece) -> None:
    assert endpoint.read(json.dumps(event).encode()) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "out of blocks", "type": "server_error"}}', "^out of blocks$"),
        (b'{"error": "no"}', "^no$"),
        (b"{", "expected JSON in an event, got '{'"),
        (b"[1]", "expected a JSON object"),
        (b'{"choices": [1]}', "expected an event of /v1/chat/completions"),
        (b'{"choices": [{"delta": {"content": 5}}]}', "expected an event of"),
        (b'{"choices": {"a": 1}}', "expected an event of"),
    ],
)
def test_what_is_no_event_is_said(data: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        CHAT.read(data)


def test_bodies_ask_for_a_stream_with_counts() -> None:
    common = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    assert COMPLETIONS.body("m", [1, 2], 7, {"temperature": 0}) == {
        **common,
        "prompt": [1, 2],
        "max_tokens": 7,
    }
    assert CHAT.body("m", "hi", 7, {"temperature": 0}) == {
        **common,
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 7,
    }
    assert COMPLETIONS.body("m", "x", 7, {"max_tokens": 1})["max_tokens"] == 1


def test_endpoints_are_called_by_their_paths() -> None:
    assert Endpoint.parse("/v1/chat/completions") is CHAT
    with pytest.raises(ValueError, match=r"/v1/completions or /v1/chat/completions, got 'chat'"):
        Endpoint.parse("chat")
