"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from hpu_duo.server.protocol.chat import ChatMessage, FunctionTool
from hpu_duo.server.protocol.generation import Fields, TokenId


class TokenizeRequest(Fields):
    """A text or a conversation, one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[FunctionTool] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]
