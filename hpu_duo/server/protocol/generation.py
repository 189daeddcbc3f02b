"""Fields that completions and chats share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticKnownError

from hpu_duo.server.protocol.bounds import (
    MAX_GUIDED_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_NAME,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Text = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(max_length=MAX_NAME)]


Bias = Annotated[float, Field(ge=-100, le=100)]


def _of_few(given: object) -> object:
    """Refuse a map with too many entries before it is read: it would have an error for each of them."""
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
        """Bytes of the body that this was read from; 0 where it was not read from one."""
        return self._num_bytes

    def set_size(self, num_bytes: int) -> None:
        """Take note of the size of the body."""
        self._num_bytes = num_bytes


class StreamOptions(Fields):
    """Things that a stream tells besides text; unknown fields are kept, for ``refuse_unserved``.

    Attributes:
        include_usage: end with the numbers of tokens.
        continuous_usage_stats: tell them in every chunk.
    """

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Fields):
    """Fields that completions and chats have in common.

    None, and null in JSON, is the same as leaving a field out. Attributes that are not the OpenAI API's are
    those of vLLM. Unknown fields are kept, for ``refuse_unserved``.
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
    user: Name | None = Field(None, description="Who asks; for logs and for scheduling among users.")
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
        None, description="Keep only so many tokens of the prompt; -1 for as many as fit beside max_tokens."
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
        """Answers to each prompt."""
        return 1 if self.n is None else self.n
