"""The text of a model taken apart: content, and calls of tools."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the user."""

    text: str


class CallBegun(NamedTuple):
    """A call of a function, numbered from 0 within the answer."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of the JSON text of a call's arguments."""

    number: int
    text: str


Piece = Content | CallBegun | CallArguments


class ToolParser(Protocol):
    """Takes the text of one answer apart; how the text is cut into pushes does not change the result.

    Text that is no call after all is content. The arguments of a call are the model's own JSON, character by
    character, so what a stream gives joins to what a whole answer has.
    """

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns what it settles."""

    def finish(self) -> list[Piece]:
        """Return the text not returned yet; call it once, at the end."""
