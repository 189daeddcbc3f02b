"""Requests and errors of the OpenAI API, with the additional fields of vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr, Tag
from pydantic_core import PydanticKnownError

MAX_VALUES = 2**20
"""Most JSON values of a body: numbers, strings, lists and objects, nested ones included. A key counts as
eight, by its time to parse."""
MAX_PROMPTS = 2**14
MAX_MESSAGES = 2**13
MAX_PARTS = 2**13
"""Most parts of one message's content."""
MAX_CALLS = 1024
"""Most tool calls of one message."""
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024
MAX_VARIABLES = 64
"""Most variables of the chat template."""
MAX_STOPS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_GUIDED_CHOICES = 1024
MAX_NAME = 512
"""Most characters of a name: of models, users, roles, functions and calls."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)', re.DOTALL)
"""A JSON string, or the beginning of one that the chunk does not end."""


class ValueCount:
    """Counts the values of a JSON text, chunk by chunk.

    It counts commas, opening brackets and colons outside of strings, so it is at most one too low, and too
    high only where the text is no JSON.

    Attributes:
        num_values: so far.
    """

    def __init__(self) -> None:
        self.num_values = 0
        self._open = b""

    def add(self, piece: bytes) -> int:
        """Count a chunk; returns ``num_values``."""
        rest = _STRING.sub(rb'"\1', self._open + piece)
        self._open = b""
        if rest.count(b'"') % 2:
            rest, _, escape = rest.rpartition(b'"')
            self._open = b'"' + escape
        self.num_values += rest.count(b",") + rest.count(b"[") + rest.count(b"{") + 7 * rest.count(b":")
        return self.num_values


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Text = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(max_length=MAX_NAME)]


Bias = Annotated[float, Field(ge=-100, le=100)]


def _of_few(given: object) -> object:
    """Reject a map with too many entries before validation, which would report an error for each of them."""
    if isinstance(given, dict) and len(given) > MAX_LOGIT_BIAS:
        sizes = {"field_type": "Dictionary", "max_length": MAX_LOGIT_BIAS, "actual_length": len(given)}
        raise PydanticKnownError("too_long", sizes)
    return given


class Fields(BaseModel):
    """A JSON object, read in pydantic's lax mode: ``"0.7"`` is a number and ``5.0`` an integer.

    Unknown fields are ignored.
    """

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore", protected_namespaces=())

    _num_bytes: int = PrivateAttr(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the body that this was parsed from; 0 if there is none."""
        return self._num_bytes

    def set_size(self, num_bytes: int) -> None:
        """Set the size of the body."""
        self._num_bytes = num_bytes


class StreamOptions(Fields):
    """Options of a stream; unknown fields are stored, for ``refuse_unserved``.

    Attributes:
        include_usage: end with the usage.
        continuous_usage_stats: have it in every chunk.
    """

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Fields):
    """Fields that completions and chats have in common.

    None, and null in JSON, is the same as omitting a field. Attributes that are not the OpenAI API's are
    those of vLLM. Unknown fields are stored, for ``refuse_unserved``.
    """

    model_config = ConfigDict(extra="allow")

    model: Name | None = Field(None, description="One of /v1/models; left out, the one that is served.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[Name, Bias], BeforeValidator(_of_few)] | None = None
    user: Name | None = Field(None, description="User of the request, for logs and fair scheduling.")
    safety_identifier: Name | None = Field(None, description="The same, where user is left out.")
    prompt_cache_key: Name | None = Field(
        None, description="Has no effect: the prefix cache compares prompts themselves."
    )

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        description="Keep only this number of tokens of the prompt; -1 for as many as fit with max_tokens.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where a prompt is truncated: left (by default) keeps its last tokens."
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = Field(
        None, description="Lower values are served earlier; needs --scheduling-policy priority."
    )
    request_id: Annotated[str, Field(max_length=256)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None

    vllm_xargs: dict[str, Any] | None = Field(
        None, description="speculate: false for no drafts, or the most drafts of a step."
    )
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_GUIDED_CHOICES)] | None = None
    guided_grammar: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def truncated_side(self) -> Literal["left", "right"] | None:
        """The side on which a long prompt loses tokens; None if it is not to be truncated."""
        return None if self.truncate_prompt_tokens is None else self.truncation_side or "left"

    @property
    def num_samples(self) -> int:
        """Number of choices of each prompt."""
        return 1 if self.n is None else self.n


class ContentPart(Fields):
    """A part of a message. Only text is supported."""

    type: Name
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """The text of the part; None if it has none."""
        return self.refusal if self.text is None else self.text


class FunctionCall(Fields):
    """The call of a function: its arguments are JSON in a text."""

    name: Name
    arguments: str | None = None


class ToolCall(Fields):
    """An earlier tool call of the assistant."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Fields):
    """One message; additional fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Name
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    refusal: str | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Name | None = None


class FunctionSchema(Fields):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[Name, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Fields):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionSchema


class FunctionName(Fields):
    """The name of a function."""

    name: Name


class ToolChoice(Fields):
    """One function that has to be called."""

    type: Literal["function"]
    function: FunctionName


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]
Documents = Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)]
Variables = Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)]


class Prediction(Fields):
    """A text that the answer is expected to follow."""

    type: Literal["content"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)]

    @property
    def text(self) -> str:
        """The text of all parts.

        Raises:
            ApiError: a part is no text.
        """
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.type != "text" or part.text is None:
                got = f"{part.type!r} {'without' if part.text is None else 'with'} a text"
                raise unsupported(
                    "prediction", f"prediction.content: expected parts of type 'text' with a text, got {got}"
                )
        return "".join(part.text or "" for part in self.content)


class ChatRequest(GenerationRequest):
    """A conversation to continue.

    Attributes:
        max_completion_tokens, max_tokens: two names of one field, the second one deprecated.
        logprobs, top_logprobs: log-probabilities of each token, and the number of top ones.
        chat_template_kwargs: further variables of the chat template.
        prediction: a text to draft the answer from.
    """

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    echo: bool | None = Field(None, description="Begin with the last message, if it is the assistant's.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: Documents | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Name | None = None
    prediction: Prediction | None = None


def _kind_of_prompt(prompt: object) -> str:
    """Classify a prompt by its first element, so that it is validated once and not as each kind in turn."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "tokens"


_Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("lists")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(GenerationRequest):
    """Prompts to continue.

    Attributes:
        prompt: a text, token ids, or several of either.
        echo: begin each answer with its prompt.
        logprobs: log-probabilities of each token, and the number of top ones.
    """

    prompt: _Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if is_one else prompt


class TokenizeRequest(Fields):
    """A text or a conversation, one of them."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    documents: Documents | None = None
    chat_template_kwargs: Variables | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """Token ids."""

    model: Name | None = None
    tokens: TokenIds


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
    "prediction": ((), "predicted outputs are served for chats only"),
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
