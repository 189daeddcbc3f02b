"""Requests to OpenAI's two text endpoints, and the events of their streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

DONE = b"[DONE]"


class StreamError(Exception):
    """An event of a stream that reports a failure, or cannot be read."""


@dataclass(frozen=True)
class Piece:
    """Content of one event.

    Attributes:
        text: of the first choice: content, reasoning or arguments of a tool call.
        is_token: whether a token came with it. A choice without text has one too, whose text is not complete
            yet, unless it only announces the role or the end.
        is_choice: whether it belongs to the answer at all, rather than to its usage.
        is_end: whether the first choice ends with it.
        num_prompt_tokens, num_output_tokens: the server's count, where the event has one.
    """

    text: str = ""
    is_token: bool = False
    is_choice: bool = False
    is_end: bool = False
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None


class Endpoint(Enum):
    """A text endpoint; the value is its path below the address of the server."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"

    @classmethod
    def parse(cls, path: str) -> Endpoint:
        """Return the endpoint of that path; ValueError with all paths for another one."""
        try:
            return cls(path)
        except ValueError:
            paths = " or ".join(each.value for each in cls)
            raise ValueError(f"expected an endpoint {paths}, got {path!r}") from None

    @property
    def takes_ids(self) -> bool:
        """Whether a prompt may be token ids."""
        return self is Endpoint.COMPLETIONS

    def body(
        self, model: str, prompt: str | list[int], num_output_tokens: int, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the JSON body of a request that streams.

        Args:
            extra: further fields, which take precedence.
        """
        fields: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self is Endpoint.COMPLETIONS:
            fields |= {"prompt": prompt, "max_tokens": num_output_tokens}
        else:
            fields["messages"] = [{"role": "user", "content": prompt}]
            fields["max_completion_tokens"] = num_output_tokens
        return {**fields, **extra}

    def read(self, data: bytes) -> Piece:
        """Read the data of one event, other than ``DONE``.

        Raises:
            StreamError: it is an error object, or no JSON of this endpoint.
        """
        try:
            event = json.loads(data)
        except ValueError:
            raise StreamError(f"expected JSON in an event, got {_shown(data)}") from None
        if not isinstance(event, dict):
            raise StreamError(f"expected a JSON object in an event, got {_shown(data)}")
        if event.get("error") is not None:
            raise StreamError(error_text(event["error"]))
        try:
            return self._piece(event)
        except (AttributeError, KeyError, TypeError, IndexError):
            raise StreamError(f"expected an event of {self.value}, got {_shown(data)}") from None

    def _piece(self, event: dict[str, Any]) -> Piece:
        usage = event.get("usage") or {}
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        choices = event.get("choices") or []
        if not choices:
            return Piece("", False, False, False, *counts)
        choice = choices[0]
        is_end = choice.get("finish_reason") is not None
        if self is Endpoint.COMPLETIONS:
            text, is_announcement = choice.get("text") or "", False
        else:
            delta = choice.get("delta") or {}
            text, is_announcement = _delta_text(delta), "role" in delta
        return Piece(text, bool(text) or not (is_end or is_announcement), True, is_end, *counts)


def error_text(error: object) -> str:
    """Return the message of an OpenAI error object, or the text of anything else."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error["message"]
    return str(error)


def _delta_text(delta: Mapping[str, Any]) -> str:
    texts = [delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning")]
    for call in delta.get("tool_calls") or []:
        function = call.get("function") or {}
        texts += [function.get("name"), function.get("arguments")]
    return "".join(text for text in texts if text)


def _shown(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace"))
