"""Wrong values get OpenAI's error body with the field's name, and unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion

from hpu_duo.server.protocol import REFUSED, ChatRequest, CompletionRequest, GenerationRequest
from tests.server.live import Live

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def http(server: Live) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    [error] = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


WRONG_TEXTS = {
    "prompt": [None, "", [], 5, [[]], ["a", 5], [5, "a"], [-1], [10**6], [2**31], "x" * 200, [[1.5]], {}],
    "max_tokens": [-1, 1.5, "5.5", 10**9],
    "n": [0, -1, "-2", 10**6],
    "temperature": [-0.1, "hot", 1e300, "inf", "nan"],
    "top_p": [0, 1.1, -1],
    "top_k": [-2, 0.5],
    "min_p": [-0.1, 1.1],
    "frequency_penalty": [-2.1, 2.1],
    "presence_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 1e9],
    "logit_bias": [{"a": 1}, {"1": 101}, {"1": "x"}, {"-1": 1}, {"1000000": 1}, [1]],
    "seed": ["x", 1.5, 2**70],
    "stop": [5, [5], "", [""], {"a": 1}],
    "stop_token_ids": [[-1], ["a"], [10**6]],
    "min_tokens": [-1, 3],
    "logprobs": [-1, 10**6],
    "stream": ["often", 2],
    "stream_options": [{"include_usage": True}, 5, {"include_obfuscation": True}],
    "echo": ["often"],
    "model": [5],
    "user": [5],
    "priority": [1],
    "best_of": [2],
    "suffix": ["x"],
    "use_beam_search": [True],
    "allowed_token_ids": [[1]],
    "bad_words": [["x"]],
    "truncate_prompt_tokens": [0],
    "cache_salt": [""],
}
WRONG_CHATS = {
    "messages": [
        *(None, [], "hi", [5], [{}], [{"role": "user", "content": 5}], [{"content": "hi"}]),
        [{"role": "assistant", "audio": {"id": "a"}}],
        [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
    ],
    "max_completion_tokens": [0, -1, 10**9],
    "top_logprobs": [2, -1],
    "tools": [[5], [{"type": "web"}], [{"type": "function"}], {}],
    "tool_choice": ["sometimes", "required", "auto_", {"type": "function", "function": {"name": "f"}}],
    "chat_template": ["{{ messages }}"],
    "chat_template_kwargs": [{"tokenize": True}, {"messages": []}, [1]],
    "functions": [[{"name": "f"}]],
    "modalities": [["audio"]],
    "documents": ["x"],
    "prediction": ["hi", {"type": "content"}, {"type": "diff", "content": "hi"}],
    "vllm_xargs": [{"speculate": -1}, {"speculate": "no"}, {"lookup": 3}],
    "store": [True],
    "metadata": [{"a": "b"}],
    "service_tier": ["flex"],
    "verbosity": ["low"],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in WRONG_TEXTS.items() for v in values])
def test_a_wrong_value_of_a_completion_is_refused_by_its_name(
    http: httpx.Client, field: str, value: object
) -> None:
    response = http.post("/v1/completions", json={**TEXT, field: value})
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert field in error["message"] or field == "model"


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in WRONG_CHATS.items() for v in values])
def test_a_wrong_value_of_a_chat_is_refused_by_its_name(
    http: httpx.Client, field: str, value: object
) -> None:
    response = http.post("/v1/chat/completions", json={**CHAT, field: value})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, field)


def test_null_is_the_same_as_nothing_and_unknown_fields_are_ignored(http: httpx.Client) -> None:
    plain = http.post("/v1/completions", json={**TEXT, "temperature": 0}).json()
    nulls = dict.fromkeys([*WRONG_TEXTS.keys() - {"prompt", "max_tokens", "temperature"}, "never_heard_of"])
    padded = http.post("/v1/completions", json={**nulls, **TEXT, "temperature": 0, "foo": {"bar": [1]}})
    assert padded.status_code == 200
    assert padded.json()["choices"] == plain["choices"]
    chat_nulls = dict.fromkeys(WRONG_CHATS.keys() - {"messages"})
    assert http.post("/v1/chat/completions", json={**chat_nulls, **CHAT}).status_code == 200


def test_numbers_are_taken_as_vllm_takes_them(http: httpx.Client) -> None:
    plain = {"prompt": [5, 6], "max_tokens": 5, "temperature": 0.7, "seed": 3, "stop_token_ids": [9]}
    lax = {
        "prompt": [5.0, 6],
        "max_tokens": 5.0,
        "temperature": "0.7",
        "seed": "3",
        "stop_token_ids": ["9"],
    }
    texts = [http.post("/v1/completions", json=each).json()["choices"][0]["text"] for each in (plain, lax)]
    assert texts[0] == texts[1]
    chat = {**CHAT, "max_tokens": "2", "top_p": "1", "n": 2.0}
    assert len(http.post("/v1/chat/completions", json=chat).json()["choices"]) == 2


@pytest.mark.parametrize(
    ("documented", "served"),
    [(OpenAICompletion, CompletionRequest), (OpenAIChat, ChatRequest)],
    ids=["completion", "chat"],
)
def test_every_field_that_openai_documents_is_served_or_refused_by_name(
    documented: type, served: type[GenerationRequest]
) -> None:
    assert not set(documented.__annotations__) - set(served.model_fields) - REFUSED.keys()


def test_refusals_of_the_assistant_are_its_words(server: Live, http: httpx.Client) -> None:
    conversations = [
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": None, "refusal": "no", "audio": None, "function_call": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    counts = [
        http.post("/tokenize", json={"messages": [*CHAT["messages"], each]}).json()["tokens"]
        for each in conversations
    ]
    assert counts[0] == counts[1] == counts[2]


def test_values_that_ask_for_nothing_are_served(http: httpx.Client) -> None:
    neutral = {
        "best_of": None,
        "suffix": "",
        "use_beam_search": False,
        "length_penalty": 1,
        "response_format": {"type": "text"},
        "priority": 0,
        "logprobs": None,
    }
    assert http.post("/v1/completions", json={**TEXT, **neutral}).status_code == 200
    chat = {
        "modalities": ["text"],
        "store": False,
        "metadata": {},
        "service_tier": "auto",
        "verbosity": "medium",
        "prompt_cache_key": "key",
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "function_call": "none",
        "functions": [],
        "tool_choice": "none",
        "tools": [TOOL],
    }
    assert http.post("/v1/chat/completions", json={**CHAT, **chat}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"a":' * 30_000,
        b"\0",
    ],
)
def test_what_is_no_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_a_body_of_another_type_is_refused(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=b"prompt=hi", headers={"content-type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in error_of(response)["message"]


def test_prompts_that_leave_no_room_are_refused_with_both_lengths(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "x" * 90, "max_tokens": 7})
    error = error_of(response)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    # litellm knows the error by these words, and langchain-openai by the code as a part of the message.
    assert "this model's maximum context length is 96 tokens" in error["message"]
    assert error["code"] in error["message"]
    assert "90" in error["message"]
    longer = http.post("/v1/completions", json={"prompt": "x" * 96, "max_tokens": 1})
    assert error_of(longer)["param"] == "prompt"
    assert http.post("/v1/completions", json={"prompt": "x" * 90, "max_tokens": 6}).status_code == 200
    kept = http.post(
        "/v1/completions", json={"prompt": "x" * 200, "truncate_prompt_tokens": 5, "max_tokens": 7}
    )
    assert kept.json()["usage"]["prompt_tokens"] == 5


def test_paths_and_methods_that_do_not_exist_have_the_same_body(http: httpx.Client) -> None:
    for response, status in (
        (http.get("/v2/nothing"), 404),
        (http.get("/v1/completions"), 405),
        (http.put("/health"), 405),
    ):
        assert response.status_code == status
        assert response.request.url.path in error_of(response)["message"]
        assert response.request.method in error_of(response)["message"]


def test_probes_may_ask_without_a_body(http: httpx.Client) -> None:
    for path in ("/live", "/health", "/ready"):
        response = http.head(path)
        assert (response.status_code, response.content) == (200, b"")


def test_more_prompts_than_choices_are_refused_as_prompts(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": ["hi"] * 300, "max_tokens": 1})
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
    response = http.post("/v1/completions", json={"prompt": ["hi"] * 200, "n": 2, "max_tokens": 1})
    assert (response.status_code, error_of(response)["param"]) == (400, "n")


def test_the_client_raises_its_own_error_with_the_parameter(server: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        server.client().completions.create(model="tiny", prompt="hi", temperature=-1)
    assert refused.value.param == "temperature"


def test_a_template_that_refuses_is_the_callers_error(server: Live, http: httpx.Client) -> None:
    broken = {**CHAT, "continue_final_message": True}
    response = http.post("/v1/chat/completions", json=broken)
    assert response.status_code == 400
    assert error_of(response)["param"] == "continue_final_message"


def test_pictures_are_refused_by_their_place(http: httpx.Client) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    response = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400
    assert "messages[0]" in error_of(response)["message"]
    assert "image_url" in error_of(response)["message"]
