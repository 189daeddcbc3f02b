"""A validated call: its requests to the engine, its model, and the format of its answers."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpu_duo.sampling import FieldError, SamplingParams, StructuredOutputs
from hpu_duo.server.answers import Answer, Choice, CompletionAnswer
from hpu_duo.server.prompts import PromptEncoder, TextTooLongError, TokenTexts
from hpu_duo.server.protocol import (
    ApiError,
    GenerationRequest,
    bad_value,
    too_long,
    unknown_model,
    unsupported,
)
from hpu_duo.server.running import OutputStream, Submission

if TYPE_CHECKING:
    from hpu_duo.server.running import AsyncEngine


_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """Those of the OpenAI API, unless a checkpoint has others.

    ``do_sample`` of the checkpoint is ignored: the API's temperature is 1 either way.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, checkpoint: str | Path) -> SamplingDefaults:
        """Read generation_config.json, if there is one.

        The file itself is read, since transformers fills in its own defaults.
        """
        file = Path(checkpoint) / "generation_config.json"
        if not file.is_file():
            return cls()
        said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{name: said[name] for name in _NAMES if said.get(name) is not None})


@dataclass(frozen=True)
class Served:
    """A model and its names.

    Attributes:
        names: the first one is used for calls without a model.
        engine: of the model.
        encoder: of its tokenizer; None without one, so that prompts and answers are token ids.
        texts: of its tokens; None without a tokenizer.
        defaults: of sampling parameters.
        max_model_len: tokens of prompt and output together.
        max_choices: most choices of a call.
        max_logprobs: most top log-probabilities of each token; -1 for no limit.
        tool_parser: name of the parser for its tool calls; None without tool calls.
        created: when it was loaded, seconds since 1970.
    """

    names: tuple[str, ...]
    engine: AsyncEngine
    encoder: PromptEncoder | None
    texts: TokenTexts | None
    defaults: SamplingDefaults
    max_model_len: int
    max_choices: int
    max_logprobs: int
    tool_parser: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def name_for(self, asked: str | None) -> str:
        """Return the model name of an answer.

        Raises:
            ApiError: another model is requested.
        """
        if asked is None or asked == "":
            return self.names[0]
        if asked not in self.names:
            raise unknown_model(asked, self.names)
        return asked

    def needs_encoder(self, param: str) -> PromptEncoder:
        """Return the encoder.

        Raises:
            ApiError: there is none, and a field needs it.
        """
        if self.encoder is None:
            raise ApiError(
                400,
                f"{param}: the model has no tokenizer: expected token ids as the prompt of /v1/completions",
                param=param,
            )
        return self.encoder

    def cards(self) -> list[dict[str, Any]]:
        """The models as ``/v1/models`` lists them."""
        return [
            {
                "id": name,
                "object": "model",
                "created": self.created,
                "owned_by": "hpu-duo",
                "root": self.names[0],
                "parent": None,
                "max_model_len": self.max_model_len,
            }
            for name in self.names
        ]


@dataclass(frozen=True)
class Scoring:
    """Scoring of prompts: the log-probability of each token, given those before it.

    Tokens are decoded, ``decode_len`` per step, so probabilities are those of generation, from the same
    cache; see ``Engine.score``.

    Attributes:
        prompts: token ids of each.
        num_top: number of top log-probabilities of each token.
        answer: echoes the prompts.
        cache_salt: see ``SamplingParams``.
    """

    prompts: Sequence[Sequence[int]]
    num_top: int
    answer: CompletionAnswer
    cache_salt: str | None = None

    @property
    def submissions(self) -> list[Submission]:
        """Return the requests to submit, one for each prompt of more than a token."""
        name = uuid.uuid4().hex
        return [
            Submission(f"{name}-{index}", prompt[:1], self._forcing(prompt[1:]), index)
            for index, prompt in enumerate(self.prompts)
            if len(prompt) > 1
        ]

    async def read(self, stream: OutputStream) -> None:
        """Read all outputs of the submissions, and pass them to the answer.

        Raises:
            RequestFailedError: the engine failed.
        """
        scored = [Choice() for _ in self.prompts]
        while (batch := await stream.read()) is not None:
            for choice, output in batch:
                scored[choice].add(output)
        # The first token of a prompt has no log-probability.
        self.answer.score([[int(one[0]), *choice.logprobs] for one, choice in zip(self.prompts, scored)])

    def _forcing(self, tokens: Sequence[int]) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            logprobs=self.num_top,
            max_tokens=len(tokens),
            ignore_eos=True,
            forced_token_ids=tuple(tokens),
            decoded_prompt_tokens=1,
            cache_salt=self.cache_salt,
        )


@dataclass(frozen=True)
class Plan:
    """A validated call.

    Attributes:
        answer_id: the ``id`` of the answer.
        model: the requested name.
        prompts: token ids of each prompt.
        params: of all of them; None if nothing is to be generated.
        answer: collects the outputs.
        is_streamed: whether it is sent as events.
        user: of the call.
        cache_salt: see ``SamplingParams``.
        texts: returns the prompts as text, for logs with prompts.
        scoring: of the prompts, before generation; None if not requested.
    """

    answer_id: str
    model: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams | None
    answer: Answer
    is_streamed: bool
    user: str | None = None
    cache_salt: str | None = None
    texts: Callable[[], Sequence[str]] = tuple
    scoring: Scoring | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return 0 if self.params is None else self.params.n * len(self.prompts)

    @property
    def submissions(self) -> list[Submission]:
        """Return the requests to submit. Their ids are unique, even if the caller chose the answer's id."""
        params = self.params
        if params is None:
            return []
        params, name = replace(params, cache_salt=self.cache_salt), uuid.uuid4().hex
        return [
            Submission(f"{name}-{index}", prompt, params, index * params.n)
            for index, prompt in enumerate(self.prompts)
        ]


def new_answer_id(prefix: str, asked: str | None) -> str:
    """The ``id`` of an answer: that of the caller, or a new one."""
    return f"{prefix}-{uuid.uuid4().hex if asked is None else asked}"


_CLOSING = "additionalProperties"
_OF_SCHEMAS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
"""Keywords with which an object is not closed, since they define further members."""


def closed(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a schema with closed objects, as OpenAI requires for ``strict``.

    Schemas of ``allOf`` are unchanged: each of them defines some members of the same object.

    Args:
        field: of the request, for messages.

    Raises:
        ApiError: an object is explicitly open.
    """
    found = dict(schema)
    if found.get(_CLOSING) not in (None, False):
        raise bad_value(
            field, f"{field}: expected {_CLOSING} of false with strict, got {found[_CLOSING]!r:.60}"
        )
    is_object = "properties" in found or found.get("type") == "object" or "object" in _types(found)
    if is_object and not found.keys() & set(_COMBINED):
        found[_CLOSING] = False
    for name in _OF_SCHEMAS:
        if isinstance(inner := found.get(name), Mapping):
            found[name] = {key: _closed(each, field) for key, each in inner.items()}
    for name in _LISTS:
        if isinstance(several := found.get(name), list):
            found[name] = [_closed(each, field) for each in several]
    if "items" in found:
        found["items"] = _closed(found["items"], field)
    return found


def _closed(schema: Any, field: str) -> Any:
    return closed(schema, field) if isinstance(schema, Mapping) else schema


def _types(schema: Mapping[str, Any]) -> list[Any]:
    types = schema.get("type")
    return types if isinstance(types, list) else []


_RESPONSE_FORMAT, _STRUCTURED = "response_format", "structured_outputs"
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older fields, and their names in ``StructuredOutputs``."""

_SHORT_BYTES = 2**14
"""Schemas of shorter requests are read in the event loop."""

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


async def format_of(request: GenerationRequest, served: Served) -> StructuredOutputs | None:
    """Return the compiled format of a request; None if it has none.

    Raises:
        ApiError: it cannot be served; the error names its field.
    """
    is_short = request.num_bytes <= _SHORT_BYTES
    found = _asked(request) if is_short else await asyncio.to_thread(_asked, request)
    if not found:
        return None
    if len(found) > 1:
        fields = list(found)
        raise bad_value(fields[1], f"{fields[1]}: expected no {fields[0]} with it")
    [(field, given)] = found.items()
    try:
        wanted = await asyncio.to_thread(partial(StructuredOutputs, **given))
    except FieldError as error:
        raise bad_value(field, f"{field}: {error.reason}") from error
    await compile_format(served, wanted, field)
    return wanted


async def compile_format(served: Served, wanted: StructuredOutputs, field: str) -> None:
    """Compile a format for the model, in a thread.

    Args:
        field: its name in the request.

    Raises:
        ApiError: it cannot be compiled.
    """
    try:
        await asyncio.to_thread(served.engine.prepare, SamplingParams(structured_outputs=wanted))
    except FieldError as error:
        raise bad_value(field, f"{field}: {error.reason}") from error


def _asked(request: GenerationRequest) -> dict[str, dict[str, Any]]:
    """Yield fields with a format, with arguments of ``StructuredOutputs``."""
    found: dict[str, dict[str, Any]] = {}
    if request.response_format is not None:
        given = _of_response_format(request.response_format)
        if given is not None:
            found[_RESPONSE_FORMAT] = given
    if request.structured_outputs:
        found[_STRUCTURED] = _of_structured_outputs(request.structured_outputs)
    for guided, name in _GUIDED.items():
        value = getattr(request, guided)
        if value is not None:
            found[guided] = {name: value}
    return found


def _of_response_format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments of ``StructuredOutputs``; None for plain text."""
    kind = given.get("type")
    read = _FORMATS.get(kind) if isinstance(kind, str) else None
    if read is None:
        kinds = ", ".join(_FORMATS)
        raise bad_value(
            _RESPONSE_FORMAT, f"{_RESPONSE_FORMAT}: expected type to be one of {kinds}, got {kind!r:.60}"
        )
    return read(given)


def _json_schema(given: Mapping[str, Any]) -> dict[str, Any]:
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise bad_value(
            _RESPONSE_FORMAT,
            f"{_RESPONSE_FORMAT}: expected an object in json_schema.schema, got {schema!r:.60}",
        )
    is_strict = isinstance(inner, Mapping) and inner.get("strict") is True
    return {"json": closed(schema, _RESPONSE_FORMAT) if is_strict else schema}


def _same(name: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def read(given: Mapping[str, Any]) -> dict[str, Any]:
        if given.get(name) is None:
            raise bad_value(_RESPONSE_FORMAT, f"{_RESPONSE_FORMAT}: expected {name} with type {name!r}")
        return {name: given[name]}

    return read


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]] = {
    "text": lambda given: None,
    "json_object": lambda given: {"json_object": True},
    "json_schema": _json_schema,
    "regex": _same("regex"),
    "choice": _same("choice"),
    "grammar": _same("grammar"),
}


def _of_structured_outputs(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(name for name in given.keys() - set(_KINDS) if given[name] not in (None, False))
    if unknown:
        raise unsupported(
            _STRUCTURED, f"{_STRUCTURED}: expected one of {', '.join(_KINDS)}, got {', '.join(unknown)}"
        )
    return {name: given[name] for name in _KINDS if given.get(name) not in (None, False)}


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
    prediction: Sequence[int] = (),
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        max_tokens: None = as many as fit.
        logprobs, structured: see ``SamplingParams``.
        prediction: tokens of the predicted output.
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
            prediction_token_ids=prediction,
            speculate=_speculate(request),
            **given,
        )
    except FieldError as error:
        raise refusal(error, names) from error
    if params.stop:
        served.needs_encoder("stop")
    return params


def _speculate(request: GenerationRequest) -> bool | int:
    """Whether drafts are verified, or the most of a step."""
    given = request.vllm_xargs or {}
    if unknown := given.keys() - {"speculate"}:
        raise bad_value("vllm_xargs", f"vllm_xargs: expected speculate, got {min(unknown)!r:.60}")
    found = given.get("speculate", True)
    if not isinstance(found, int) or found < 0:
        raise bad_value(
            "vllm_xargs", f"vllm_xargs: expected speculate to be a bool or an integer >= 0, got {found!r:.60}"
        )
    return found


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
        ApiError: it is invalid; the message names the field.
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
        ApiError: it is invalid; the message names the field.
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
