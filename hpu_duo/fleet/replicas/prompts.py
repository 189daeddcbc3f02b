"""Prompts of calls, as routers compare them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from hpu_duo.fleet.routing import RoutedRequest

_SHORT = 16 * 2**10
"""Bodies of up to so many bytes are read at once: a thread would take longer to be asked."""
_MOST_CHARACTERS = 2**20
"""Of a prompt that routers compare: a longer one would hold the event loop."""


@dataclass(frozen=True)
class RoutedCall:
    """A call, as far as the front process reads it.

    Attributes:
        request: for the router.
        is_streamed: whether the answer is asked for as events.
    """

    request: RoutedRequest
    is_streamed: bool


def read_call(call_id: str, body: bytes, key_name: str | None = None) -> RoutedCall:
    """Read what routing goes by: the prompt's characters, or its token ids where it has them.

    Messages are compared as the text of their JSON, so conversations that begin alike are alike. Of several
    prompts the first one counts. A body that is no JSON object has no prompt; the replica says what is wrong.

    Args:
        key_name: of the caller's API key, where callers with different ones share no prefix.
    """
    try:
        fields = from_json(body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return RoutedCall(RoutedRequest.of_text(call_id, ""), False)
    user, salt = fields.get("user") or fields.get("safety_identifier"), fields.get("cache_salt")
    user = user if isinstance(user, str) else None
    salt = salt if isinstance(salt, str) else None
    namespace = salt if key_name is None else (key_name, salt)
    is_streamed = fields.get("stream") is True
    prompt: Any = fields.get("messages", fields.get("prompt"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str) and "messages" not in fields:
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(_is_token(each) for each in prompt):
        request = RoutedRequest.of_tokens(call_id, prompt, user, namespace)
    else:
        text = prompt if isinstance(prompt, str) else _text_of(fields, prompt)
        request = RoutedRequest.of_text(call_id, text[:_MOST_CHARACTERS], user, namespace)
    return RoutedCall(request, is_streamed)


async def read_beside(call_id: str, body: bytes, key_name: str | None = None) -> RoutedCall:
    """Read a call as ``read_call`` does, a long one beside the event loop."""
    if len(body) <= _SHORT:
        return read_call(call_id, body, key_name)
    return await asyncio.to_thread(read_call, call_id, body, key_name)


def _text_of(fields: dict[str, Any], prompt: Any) -> str:
    """Messages as text; tools come before them, as templates have it."""
    tools = fields.get("tools")
    return "".join(to_json(each).decode() for each in (tools, prompt) if each)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
