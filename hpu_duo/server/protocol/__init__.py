"""Requests and errors as the OpenAI API writes them, with the fields that users of vLLM send besides."""

from hpu_duo.server.protocol.errors import ApiError
from hpu_duo.server.protocol.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FunctionTool,
    TokenizeRequest,
    ToolChoice,
)

__all__ = [
    "ApiError",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "FunctionTool",
    "TokenizeRequest",
    "ToolChoice",
]
