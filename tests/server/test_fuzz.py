"""Whatever is sent, the answer is one of the API's, and nothing is held afterwards."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpu_duo.server.protocol import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.server.live import HOST, Live, wait_until

REQUESTS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6]},
}

NUMBERS = st.integers(-3, 12) | st.sampled_from([96, 2**31, -(2**63), 10**30]) | st.floats(-3, 3)
TEXTS = st.text(max_size=6) | st.sampled_from(
    ["auto", "required", "system", "text", "f", "\0", "<tool_call>"]
)
KEYS = st.sampled_from(["role", "content", "type", "function", "name", "arguments", "text", "0", "95", "96"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A valid body with some fields that may hold anything."""
    known = sorted({*REQUESTS[path].model_fields, *REFUSED})
    fields = draw(st.lists(st.sampled_from(known), max_size=4))
    return {**VALID[path], **{field: draw(ANYTHING) for field in fields}}


CALLS = st.sampled_from(sorted(REQUESTS)).flatmap(lambda path: st.tuples(st.just(path), bodies(path)))


@pytest.fixture(scope="module")
def http(server: Live) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def check(response: httpx.Response) -> None:
    """An answer, events or an error, as the API has them."""
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        for line in response.text.splitlines():
            assert (
                not line or line == "data: [DONE]" or "error" not in json.loads(line.removeprefix("data: "))
            )
    else:
        assert response.json()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CALLS)
def test_any_values_of_any_fields_are_answered_or_refused(
    server: Live, http: httpx.Client, call: tuple[str, dict[str, Any]]
) -> None:
    path, body = call
    check(http.post(path, content=json.dumps(body), headers={"content-type": "application/json"}))
    assert server.service.stage.value == "ready"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(REQUESTS)), st.binary(max_size=60))
def test_any_bytes_are_refused(http: httpx.Client, path: str, data: bytes) -> None:
    response = http.post(path, content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=200), st.booleans())
def test_what_is_no_http_harms_nobody(server: Live, http: httpx.Client, data: bytes, has_head: bool) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 500\r\n\r\n" if has_head else b""
    with socket.create_connection((HOST, server.port)) as connection:
        connection.sendall(head + data)
    assert http.get("/health").status_code == 200


def test_nothing_is_held_after_all_this(server: Live) -> None:
    wait_until(server.holds_nothing)
