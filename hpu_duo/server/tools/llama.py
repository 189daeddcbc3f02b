"""Calls that are the whole answer, as Llama 3 models write them."""

from __future__ import annotations

from collections.abc import Collection

from hpu_duo.server.tools.json_call import JsonCall
from hpu_duo.server.tools.pieces import Content, Piece

TAG = "<|python_tag|>"
_SEPARATORS = " \n\t\r;,"


class LlamaParser:
    """Finds ``{"name": ..., "parameters": {...}}`` at the beginning of an answer, and more of them behind it.

    The objects may be separated by semicolons, and the first may follow ``<|python_tag|>``. An answer that
    begins otherwise is content, and so is one whose object is no call.

    Source: the prompt format of Llama 3.1 and 3.2 (Meta, 2024).

    Args:
        functions: names that may be called; None for any. JSON with another name is content.
    """

    def __init__(self, functions: Collection[str] | None = None) -> None:
        self._functions = functions
        self._held = ""
        self._call: JsonCall | None = None
        self._num_calls = 0
        self._is_content = False

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
        if call is not None and not call.has_begun:
            held = call.text + held
        elif self._num_calls and not self._is_content and not held.strip(_SEPARATORS):
            held = ""
        return [Content(held)] if held else []

    def _advance(self, pieces: list[Piece]) -> bool:
        """Settle some of the held text; False when more is needed."""
        if self._is_content:
            pieces.append(Content(self._held))
            self._held = ""
            return False
        if self._call is None and not self._begin():
            return self._is_content
        call = self._call
        assert call is not None, "a call has begun"
        found, rest = call.push(self._held)
        pieces += found
        self._held = rest
        if call.is_broken:
            self._call = None
            if call.has_begun:
                self._num_calls += 1
            else:
                pieces.append(Content(call.text))
            self._is_content = True
        elif call.is_done:
            self._call = None
            self._num_calls += 1
        return bool(self._held)

    def _begin(self) -> bool:
        """Begin a call if the held text does; False if it does not, or not yet."""
        separators = _SEPARATORS if self._num_calls else " \n\t\r"
        text = self._held.lstrip(separators)
        if not text or (len(text) < len(TAG) and TAG.startswith(text)):
            return False
        text = text.removeprefix(TAG).lstrip(separators)
        if not text:
            return False
        if not text.startswith("{"):
            self._is_content = True
            return False
        self._held = text
        self._call = JsonCall(self._num_calls, self._functions)
        return True
