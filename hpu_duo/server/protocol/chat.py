"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from hpu_duo.server.protocol.generation import Fields, GenerationRequest


class ContentPart(Fields):
    """A part of a message. Only text is served; other types are refused by their names."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """The text of the part, of whichever type; None if it has none."""
        return self.refusal if self.text is None else self.text


class FunctionCall(Fields):
    """The call of a function: its arguments are JSON in a text."""

    name: str
    arguments: str | None = None


class ToolCall(Fields):
    """A call that the assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Fields):
    """One message; what it has besides goes to the chat template as it is."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionSchema(Fields):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Fields):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: FunctionSchema


class FunctionName(Fields):
    """The name of a function."""

    name: str


class ToolChoice(Fields):
    """One function that has to be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerationRequest):
    """A conversation to continue.

    Attributes:
        max_completion_tokens, max_tokens: two names of one field, the second one deprecated.
        logprobs, top_logprobs: log-probabilities of each token, and of so many of the likeliest.
        chat_template_kwargs: further variables of the chat template.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    echo: bool | None = Field(None, description="Begin with the last message, if it is the assistant's.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
