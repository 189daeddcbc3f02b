"""Errors of the OpenAI API, and unsupported fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpu_duo.server.protocol.requests import ChatMessage, Fields, GenerationRequest

_MOST_CHARACTERS = 2000
"""Most characters of a message, which may quote the request."""


class ApiError(Exception):
    """An error response.

    Args:
        status: of the HTTP response.
        message: what was expected and received.
        param: the invalid field of the request.
        kind: the error's ``type``.
        code: machine-readable reason.
        headers: of the HTTP response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[:_MOST_CHARACTERS]}..."
        super().__init__(message)
        self.status, self.message, self.param, self.kind, self.code = status, message, param, kind, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_value(param: str | None, message: str) -> ApiError:
    """A field has an invalid value."""
    return ApiError(400, message, param=param, code="invalid_value")


def too_long(param: str, message: str) -> ApiError:
    """Prompt and output together exceed the model's context length."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unsupported(param: str, message: str) -> ApiError:
    """A field is not supported."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unauthorized() -> ApiError:
    """No key, or an invalid one."""
    return ApiError(
        401,
        "expected an API key that this server knows in the header Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def unknown_model(asked: str, served: tuple[str, ...]) -> ApiError:
    """The call is for a model that is not served."""
    message = f"expected one of the models {', '.join(served)}, got {asked!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def too_busy(message: str, retry_after_s: int) -> ApiError:
    """The queue is full."""
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_after_s)},
    )


def unavailable(message: str, retry_after_s: int | None = None, *, code: str = "unavailable") -> ApiError:
    """Nothing is served now: starting, stopping, or out of memory."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, kind="service_unavailable_error", code=code, headers=headers)


def failed(message: str) -> ApiError:
    """An internal error."""
    return ApiError(500, message, kind="server_error", code="internal_error")


Refused = Mapping[str, tuple[tuple[Any, ...], str]]

REFUSED: Refused = {
    "prediction": ((), "predicted outputs are not served"),
    "store": ((False,), "answers are not stored"),
    "metadata": (({},), "metadata belongs to stored answers, and none are stored"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "verbosity": (("medium",), "say in a message how long an answer is to be"),
    "web_search_options": ((), "nothing is searched for"),
    "moderation": ((), "nothing is moderated"),
    "prompt_cache_retention": (("in_memory",), "the prefix cache keeps what it has room for"),
    "prompt_cache_options": (({}, {"mode": "implicit"}), "the prefix cache keeps what it has room for"),
    "best_of": ((), "best_of is not served; use n, and choose among the answers"),
    "suffix": (("",), "insertion before a suffix is not served"),
    "use_beam_search": ((False,), "beam search is not served"),
    "length_penalty": ((1, 1.0), "length_penalty belongs to beam search, which is not served"),
    "allowed_token_ids": ((), "allowed_token_ids is not served; use logit_bias"),
    "bad_words": (([],), "bad_words is not served; use logit_bias"),
    "logits_processors": (([],), "code of the caller is not run"),
    "prompt_logprobs": ((), "prompt_logprobs is not served; use echo with logprobs of /v1/completions"),
    "chat_template": ((), "a template of the caller is not run; the server has --chat-template"),
    "functions": (([],), "functions is deprecated and not served; use tools"),
    "function_call": (("none",), "function_call is deprecated and not served; use tool_choice"),
    "audio": ((), "audio is not served"),
    "modalities": ((["text"],), "only text is served"),
    "prompt_embeds": ((), "embeddings are not served as prompts"),
    "mm_processor_kwargs": (({},), "only text is served"),
    "spaces_between_special_tokens": ((True,), "texts are those of the tokenizer"),
    "logprob_token_ids": (([],), "logprob_token_ids is not served; use logprobs"),
    "repetition_detection": ((), "repetition_detection is not served; use repetition_penalty"),
    "thinking_token_budget": ((-1,), "thinking is not told apart"),
    "kv_transfer_params": (({},), "keys and values are not transferred"),
    "vllm_xargs": (({},), "there are no extensions"),
}
"""Fields by name: values without effect, besides None, and the message for others."""

_OF_STREAM_OPTIONS: Refused = {"include_obfuscation": ((False,), "events are not padded")}
_OF_MESSAGES: Refused = {
    "audio": ((), "audio is not served"),
    "function_call": ((), "function_call is deprecated and not served; use tool_calls"),
}


def refuse_unserved(request: GenerationRequest) -> None:
    """Reject unsupported fields of a request.

    Raises:
        ApiError: a field is unsupported; the message names it.
    """
    _refuse(request, REFUSED)
    if request.stream_options is not None:
        _refuse(request.stream_options, _OF_STREAM_OPTIONS, "stream_options", "stream_options.")


def refuse_unserved_of_message(message: ChatMessage, number: int) -> None:
    """Reject unsupported fields of a message.

    Args:
        number: index of the message in the call.

    Raises:
        ApiError: a field is unsupported; the message names it.
    """
    _refuse(message, _OF_MESSAGES, "messages", f"messages[{number}].")


def _refuse(given: Fields, refused: Refused, param: str | None = None, place: str = "") -> None:
    values = given.model_extra or {}
    for field in refused.keys() & values.keys():
        (neutral, reason), value = refused[field], values[field]
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            raise unsupported(param or field, f"{place}{field}: {reason}")
