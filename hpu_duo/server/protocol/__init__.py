"""Requests and errors as the OpenAI API writes them, with the fields that users of vLLM send besides."""

from hpu_duo.server.protocol.chat import ChatMessage, ChatRequest, FunctionTool, ToolChoice
from hpu_duo.server.protocol.completions import CompletionRequest
from hpu_duo.server.protocol.errors import ApiError
from hpu_duo.server.protocol.tokens import DetokenizeRequest, TokenizeRequest

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
