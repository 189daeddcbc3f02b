"""Sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpu_duo.sampling import FieldError, SamplingParams, StructuredOutputs
from hpu_duo.server.planning.plan import Served
from hpu_duo.server.prompts import TextTooLongError
from hpu_duo.server.protocol.errors import bad_value, too_long
from hpu_duo.server.protocol.requests import GenerationRequest

_SAME = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "seed", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "priority", "user"),
)
"""Fields with the names and defaults of ``SamplingParams``."""

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def params_of(
    request: GenerationRequest,
    served: Served,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputs | None = None,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        max_tokens: None = as many as fit.
        logprobs, structured: see ``SamplingParams``.
        names: names in the request of fields of ``SamplingParams`` that differ.

    Raises:
        ApiError: a value is out of range.
    """
    if logprobs is not None and 0 <= served.max_logprobs < logprobs:
        field = (names or {}).get("logprobs", "logprobs")
        raise bad_value(
            field, f"{field}: expected at most {served.max_logprobs} (--max-logprobs), got {logprobs}"
        )
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    for name in _DEFAULTED:
        value = getattr(request, name)
        given[name] = getattr(served.defaults, name) if value is None else value
    try:
        params = SamplingParams(
            n=request.num_samples,
            stop=request.stops,
            max_tokens=max_tokens,
            logprobs=logprobs,
            structured_outputs=structured,
            **given,
        )
    except FieldError as error:
        raise refusal(error, names) from error
    if params.stop:
        served.needs_encoder("stop")
    return params


def refusal(error: FieldError, names: Mapping[str, str] | None = None) -> Exception:
    """Convert an engine error of a field."""
    field, bracket, key = error.field.partition("[")
    field = (names or {}).get(field, field)
    return bad_value(field, f"{field}{bracket}{key}: {error.reason}")


def truncated(
    request: GenerationRequest, prompt: Sequence[int], max_tokens: int | None, served: Served
) -> Sequence[int]:
    """Return the truncated prompt of a request: its last tokens, or its first ones.

    Args:
        max_tokens: number of tokens that have to fit after it; None = at least one.

    Raises:
        ApiError: none would remain.
    """
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == 0:
        name = "truncate_prompt_tokens"
        raise bad_value(name, f"{name}: expected 1 or more tokens to keep, or -1 for as many as fit, got 0")
    if keep == -1:
        keep = max(1, served.max_model_len - (1 if max_tokens is None else max_tokens))
    return prompt[:keep] if request.truncated_side == "right" else prompt[-keep:]


def check_length(param: str, num_tokens: int, max_param: str, max_tokens: int | None, served: Served) -> None:
    """Reject prompts that are too long, with the wording of the OpenAI API that clients recognise.

    Args:
        param, num_tokens: field of the prompt, and its number of tokens.
        max_param, max_tokens: field of the number of tokens to generate, and its value.

    Raises:
        ApiError: it is too long; the message has both lengths.
    """
    most = served.max_model_len
    if not num_tokens:
        raise bad_value(param, f"{param}: expected at least one token, got an empty prompt")
    if num_tokens + (max_tokens or 0) > most or (max_tokens is None and num_tokens >= most):
        asked = "at least 1" if max_tokens is None else str(max_tokens)
        culprit = param if num_tokens >= most else max_param
        raise too_long(
            culprit,
            f"{culprit}: this model's maximum context length is {most} tokens of prompt and output together, "
            f"got {num_tokens} in the prompt and {asked} to generate (context_length_exceeded)",
        )


@contextmanager
def checked_text(param: str, served: Served) -> Iterator[None]:
    """Context manager that converts the error of a text that is too long to encode.

    Raises:
        ApiError: naming the field.
    """
    try:
        yield
    except TextTooLongError as error:
        raise too_long(
            param,
            f"{param}: this model's maximum context length is {served.max_model_len} tokens of prompt and "
            f"output together, at most {error.most} characters, got {error.num_characters} characters in the "
            "prompt (context_length_exceeded)",
        ) from error


def check_options(request: GenerationRequest, num_choices: int, served: Served) -> None:
    """Reject options that need another one, and too many choices.

    Raises:
        ApiError: naming the field.
    """
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "stream_options: expected stream=true with it")
    if num_choices > served.max_choices:
        param = "n" if request.num_samples > 1 else "prompt"
        raise bad_value(
            param, f"{param}: expected at most {served.max_choices} choices of one call, got {num_choices}"
        )


def stream_flags(request: GenerationRequest, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the options of ``Answer`` of a request.

    Args:
        prompts: token ids of each.
    """
    options = request.stream_options
    return {
        "tells_usage": bool(options and options.include_usage),
        "tells_usage_always": bool(options and options.continuous_usage_stats),
        "returned_prompts": prompts if request.return_token_ids else None,
    }
