"""Calls between ``<tool_call>`` tags, as Hermes and Qwen models write them."""

from __future__ import annotations

from collections.abc import Collection

from hpu_duo.server.tools.json_call import JsonCall
from hpu_duo.server.tools.pieces import Content, Piece

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Finds ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or several times.

    White space before a call is no content. A closing tag may be missing.

    Source: the Hermes function calling format (NousResearch, 2024).

    Args:
        functions: names that may be called; None for any. What calls another one is content.
    """

    def __init__(self, functions: Collection[str] | None = None) -> None:
        self._functions = functions
        self._held = ""
        # What is content after all if the call under way turns out to be none.
        self._before = ""
        self._call: JsonCall | None = None
        self._closes = False
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """See ``ToolParser``."""
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """See ``ToolParser``."""
        held, call = self._held, self._call
        self._held, self._call = "", None
        if call is not None:
            held = "" if call.has_begun else self._before + call.text + held
        elif self._num_calls and (not held.strip() or (self._closes and CLOSE.startswith(held.lstrip()))):
            held = ""
        return [Content(held)] if held else []

    def _advance(self, pieces: list[Piece]) -> bool:
        """Settle some of the held text; False when more is needed."""
        if self._call is not None:
            return self._advance_call(self._call, pieces)
        if self._closes:
            return self._skip_close()
        before, tag, behind = self._held.partition(OPEN)
        if not tag:
            before = self._held[: len(self._held) - _overlap(self._held, OPEN)]
        shown = before.rstrip()
        if shown:
            pieces.append(Content(shown))
        if not tag:
            self._held = self._held[len(shown) :]
            return False
        self._before, self._held = before[len(shown) :] + tag, behind
        self._call = JsonCall(self._num_calls, self._functions)
        return True

    def _advance_call(self, call: JsonCall, pieces: list[Piece]) -> bool:
        found, self._held = call.push(self._held)
        pieces += found
        if call.is_broken and not call.has_begun:
            pieces.append(Content(self._before + call.text))
            self._call = None
        elif call.is_broken or call.is_done:
            self._call, self._closes = None, True
            self._num_calls += 1
        return bool(self._held)

    def _skip_close(self) -> bool:
        """Drop the closing tag, if there is one."""
        text = self._held.lstrip()
        if len(text) < len(CLOSE) and CLOSE.startswith(text):
            return False
        self._held = text.removeprefix(CLOSE)
        self._closes = False
        return bool(self._held)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest beginning of the tag that the text ends in."""
    longest = min(len(text), len(tag) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)
