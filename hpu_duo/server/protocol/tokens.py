"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from hpu_duo.server.protocol.chat import Documents, Messages, Tools, Variables
from hpu_duo.server.protocol.generation import Fields, Name, TokenIds


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
