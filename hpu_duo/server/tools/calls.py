"""Parsers of tool calls in the formats of Hermes, Qwen and Llama models."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Content of a message."""

    text: str


class CallBegun(NamedTuple):
    """A function call, numbered from 0 within the answer."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """A further piece of the JSON text of a call's arguments."""

    number: int
    text: str


Piece = Content | CallBegun | CallArguments


class ToolParser(Protocol):
    """Parses the text of one answer incrementally; the result is independent of how the text is split.

    Text that turns out to be no call is content. The arguments of a call are the model's own JSON, character
    by character, so the pieces of a stream concatenate to the arguments of a whole answer.
    """

    def push(self, text: str) -> list[Piece]:
        """Parse more text; returns the completed pieces."""

    def finish(self) -> list[Piece]:
        """Return the rest of the text; to be called once, at the end."""


ARGUMENTS = ("arguments", "parameters")
"""Names of the member with the arguments; models use the one or the other."""


class _Place(Enum):
    """States of the parser, outside of strings and of members' values."""

    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    DONE = auto()
    BROKEN = auto()


class JsonCall:
    """An object such as ``{"name": "f", "arguments": {"x": 1}}``.

    The name may come before or after the arguments. Arguments that are an object are returned piece by piece
    once the name is known; a string of JSON is returned whole, and missing arguments are ``{}``.

    Args:
        number: of the call within the answer.
        functions: names that may be called; None for any.

    Attributes:
        text: all parsed text.
        has_begun: whether a piece of it was returned.
    """

    def __init__(self, number: int, functions: Collection[str] | None = None) -> None:
        self.number, self._functions = number, functions
        self.text = ""
        self.has_begun = False
        self._place = _Place.START
        self._depth = 0
        self._is_string = self._is_escaped = False
        # Characters parsed; start of the current member; characters returned.
        self._at = self._start = self._num_sent = 0
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the object is complete, and a call."""
        return self._place is _Place.DONE

    @property
    def is_broken(self) -> bool:
        """Whether the text is no function call."""
        return self._place is _Place.BROKEN

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Parse more text; returns the completed pieces, and the text after the object."""
        self.text += text
        while self._at < len(self.text) and not (self.is_done or self.is_broken):
            character = self.text[self._at]
            self._at += 1
            self._advance(character)
        rest, self.text = self.text[self._at :], self.text[: self._at]
        return self._pieces(), rest

    def _advance(self, character: str) -> None:
        if self._is_string:
            self._advance_string(character)
        elif character == '"':
            self._begin_string()
        elif character.isspace():
            pass
        elif self._place is _Place.VALUE:
            self._advance_value(character)
        else:
            self._advance_structure(character)

    def _advance_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = False
            if self._place is _Place.KEY:
                self._key = self._read(self._start, self._at) or ""
                self._place = _Place.COLON

    def _begin_string(self) -> None:
        if self._place is _Place.VALUE:
            self._begin_value()
        elif self._place is _Place.KEY:
            self._start = self._at - 1
        else:
            self._place = _Place.BROKEN
            return
        self._is_string = True

    def _advance_structure(self, character: str) -> None:
        match (self._place, character):
            case (_Place.START, "{"):
                self._place, self._depth = _Place.KEY, 1
            case (_Place.COLON, ":"):
                self._place, self._start = _Place.VALUE, -1
            case (_Place.KEY, "}"):
                self._end()
            case _:
                self._place = _Place.BROKEN

    def _advance_value(self, character: str) -> None:
        if self._depth == 1 and character in ",}":
            self._end_value()
            if self._place is not _Place.BROKEN:
                if character == ",":
                    self._place = _Place.KEY
                else:
                    self._end()
            return
        self._begin_value()
        if character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth < 1:
                self._place = _Place.BROKEN

    def _begin_value(self) -> None:
        if self._start < 0:
            self._start = self._at - 1

    def _end_value(self) -> None:
        if self._start < 0:
            self._place = _Place.BROKEN
            return
        start, end = self._start, self._at - 1
        if self._key == "name":
            self._name = self._read(start, end)
        elif self._key in ARGUMENTS:
            self._arguments = self.text[start:end].strip()
            if self._arguments.startswith('"'):
                self._arguments = self._read(start, end)
            elif self._arguments == "null":
                self._arguments = None
        if self._key == "name" and not self._is_function():
            self._place = _Place.BROKEN

    def _is_function(self) -> bool:
        return bool(self._name) and (self._functions is None or self._name in self._functions)

    def _end(self) -> None:
        self._place = _Place.DONE if self._name else _Place.BROKEN

    def _read(self, start: int, end: int) -> str | None:
        """The value of a JSON string; None if it is something else."""
        try:
            value = json.loads(self.text[start:end])
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def _pieces(self) -> list[Piece]:
        """Pieces completed since the last call."""
        if not self._name or self.is_broken:
            return []
        pieces: list[Piece] = []
        if not self.has_begun:
            self.has_begun = True
            pieces.append(CallBegun(self.number, self._name))
        arguments = self._settled_arguments()
        if arguments:
            pieces.append(CallArguments(self.number, arguments))
        return pieces

    def _settled_arguments(self) -> str:
        """JSON text of the arguments that has not been returned."""
        if self._arguments is not None:
            fresh = self._arguments[self._num_sent :]
        elif self.is_done:
            fresh = "{}"
        else:
            fresh = self._growing_arguments()
        self._num_sent += len(fresh)
        return fresh

    def _growing_arguments(self) -> str:
        """More of the current arguments, if they are an object, which never ends in white space."""
        is_object = self._place is _Place.VALUE and self._start >= 0 and self.text[self._start] == "{"
        if not is_object or self._key not in ARGUMENTS:
            return ""
        fresh = self.text[self._start + self._num_sent :]
        return fresh if self._is_string else fresh.rstrip()


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Finds ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or several times.

    White space before a call is no content. A closing tag may be missing.

    Source: the Hermes function calling format (NousResearch, 2024).

    Args:
        functions: names that may be called; None for any. Calls of others are content.
    """

    def __init__(self, functions: Collection[str] | None = None) -> None:
        self._functions = functions
        self._held = ""
        # Content if the current call turns out to be none.
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
        """Parse some of the buffered text; False if more is needed."""
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
    """Length of the longest prefix of the tag that the text ends with."""
    longest = min(len(text), len(tag) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)


TAG = "<|python_tag|>"
_SEPARATORS = " \n\t\r;,"


class LlamaParser:
    """Finds ``{"name": ..., "parameters": {...}}`` at the beginning of an answer, and further ones after it.

    The objects may be separated by semicolons, and the first may follow ``<|python_tag|>``. An answer that
    begins otherwise is content, and so is one with an object that is no call.

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
        """Parse some of the buffered text; False if more is needed."""
        if self._is_content:
            pieces.append(Content(self._held))
            self._held = ""
            return False
        if self._call is None and not self._begin():
            return self._is_content
        call = self._call
        assert call is not None, "expected a call"
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
        """Start a call if the buffered text is one; False if it is not, or not yet."""
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
