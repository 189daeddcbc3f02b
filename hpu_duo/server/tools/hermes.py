"""Calls between ``<tool_call>`` tags, as Hermes and Qwen models write them."""

from __future__ import annotations

from hpu_duo.server.tools.json_call import JsonCall
from hpu_duo.server.tools.pieces import Content, Piece

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Finds ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or several times.

    Source: the Hermes function calling format (NousResearch, 2024).
    """

    def __init__(self) -> None:
        self._held = ""
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
            held = "" if call.has_begun else OPEN + call.text + held
        elif self._num_calls and not held.strip():
            held = ""
        elif self._closes and CLOSE.startswith(held.lstrip()):
            held = ""
        return [Content(held)] if held else []

    def _advance(self, pieces: list[Piece]) -> bool:
        """Settle some of the held text; False when more is needed."""
        if self._call is not None:
            return self._advance_call(self._call, pieces)
        if self._closes:
            return self._skip_close()
        before, tag, behind = self._held.partition(OPEN)
        if tag:
            self._call, self._held = JsonCall(self._num_calls), behind
            self._tell(before.rstrip(), pieces)
            return True
        num_held = _overlap(self._held, OPEN)
        kept = self._held[: len(self._held) - num_held]
        # White space may stand before a call, and is shown only when it does not.
        shown = kept.rstrip()
        self._tell(shown, pieces)
        self._held = self._held[len(shown) :]
        return False

    def _advance_call(self, call: JsonCall, pieces: list[Piece]) -> bool:
        found, rest = call.push(self._held)
        pieces += found
        self._held = rest
        if call.is_broken:
            self._call = None
            if call.has_begun:
                self._num_calls += 1
                self._closes = True
            else:
                pieces.append(Content(OPEN + call.text))
        elif call.is_done:
            self._call, self._closes = None, True
            self._num_calls += 1
        return bool(self._held)

    def _skip_close(self) -> bool:
        """Drop the closing tag; a model may leave it out."""
        text = self._held.lstrip()
        if len(text) < len(CLOSE) and CLOSE.startswith(text):
            return False
        self._held = text.removeprefix(CLOSE)
        self._closes = False
        return bool(self._held)

    @staticmethod
    def _tell(text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Content(text))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest beginning of the tag that the text ends in."""
    longest = min(len(text), len(tag) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)
