"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from hpu_duo.server.protocol.bounds import (
    MAX_CALLS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    MAX_VARIABLES,
)
from hpu_duo.server.protocol.generation import Fields, GenerationRequest, Name


class ContentPart(Fields):
    """A part of a message. Only text is served; other types are refused by their names."""

    type: Name
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """The text of the part, of whichever type; None if it has none."""
        return self.refusal if self.text is None else self.text


class FunctionCall(Fields):
    """The call of a function: its arguments are JSON in a text."""

    name: Name
    arguments: str | None = None


class ToolCall(Fields):
    """A call that the assistant made earlier."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Fields):
    """One message; what it has besides goes to the chat template as it is."""

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
    """A tool; only functions are known."""

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


class ChatRequest(GenerationRequest):
    """A conversation to continue.

    Attributes:
        max_completion_tokens, max_tokens: two names of one field, the second one deprecated.
        logprobs, top_logprobs: log-probabilities of each token, and of so many of the likeliest.
        chat_template_kwargs: further variables of the chat template.
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
