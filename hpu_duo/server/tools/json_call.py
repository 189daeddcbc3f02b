"""A function call written as one JSON object, read character by character."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from hpu_duo.server.tools.pieces import CallArguments, CallBegun, Piece

ARGUMENTS = ("arguments", "parameters")
"""Members that hold the arguments; models have the one or the other."""


class _Place(Enum):
    """Places of the next character, outside of strings and of members' values."""

    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    DONE = auto()
    BROKEN = auto()


class JsonCall:
    """An object such as ``{"name": "f", "arguments": {"x": 1}}``.

    The name may come before or behind the arguments. Arguments that are an object are passed on as they come
    once the name is known; a text that holds JSON is passed on whole, and none at all are ``{}``.

    Args:
        number: of the call within the answer.
        functions: names that may be called; None for any.

    Attributes:
        text: all of it that has been read.
        has_begun: whether a piece of it has been returned.
    """

    def __init__(self, number: int, functions: Collection[str] | None = None) -> None:
        self.number, self._functions = number, functions
        self.text = ""
        self.has_begun = False
        self._place = _Place.START
        self._depth = 0
        self._is_string = self._is_escaped = False
        # Characters that have been read; where the member under way begins; characters that were returned.
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
        """Whether what came is no call of a function."""
        return self._place is _Place.BROKEN

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Take more text; returns what it settles, and what follows the object."""
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
        """A text that stands there as JSON; None if it is something else."""
        try:
            value = json.loads(self.text[start:end])
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def _pieces(self) -> list[Piece]:
        """Pieces that have been settled since the last time."""
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
        """More of the arguments under way, if they are an object, whose end is never white space."""
        is_object = self._place is _Place.VALUE and self._start >= 0 and self.text[self._start] == "{"
        if not is_object or self._key not in ARGUMENTS:
            return ""
        fresh = self.text[self._start + self._num_sent :]
        return fresh if self._is_string else fresh.rstrip()
