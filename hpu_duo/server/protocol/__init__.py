"""Requests and errors of the OpenAI API, with the additional fields of vLLM."""

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
