"""Bounds of what a request may hold, checked before anything is copied, rendered or encoded.

Texts of prompts and messages are bounded by the model's length instead (``PromptEncoder.max_characters``),
token ids by the body's values.
"""

from __future__ import annotations

import re

MAX_VALUES = 2**20
"""JSON values of a body: numbers, strings, lists and objects, however they nest, and for each key seven more,
since a key takes as long to read as eight numbers."""
MAX_PROMPTS = 2**14
MAX_MESSAGES = 2**13
MAX_PARTS = 2**13
"""Parts of one message's content."""
MAX_CALLS = 1024
"""Tool calls of one message."""
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024
MAX_VARIABLES = 64
"""Variables of the chat template."""
MAX_STOPS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_GUIDED_CHOICES = 1024
MAX_NAME = 512
"""Characters of a name: of models, users, roles, functions and calls."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)', re.DOTALL)
"""A JSON string, or the beginning of one that the piece does not end."""


class ValueCount:
    """Counts the values of a JSON text that comes in pieces, a piece at a time; nothing is kept of them.

    It counts commas, opening brackets and colons outside of strings, so it is at most one too low, and too
    high only where the text is no JSON.

    Attributes:
        num_values: so far.
    """

    def __init__(self) -> None:
        self.num_values = 0
        self._open = b""

    def add(self, piece: bytes) -> int:
        """Take a piece in; returns ``num_values``."""
        rest = _STRING.sub(rb'"\1', self._open + piece)
        self._open = b""
        if rest.count(b'"') % 2:
            rest, _, escape = rest.rpartition(b'"')
            self._open = b'"' + escape
        self.num_values += rest.count(b",") + rest.count(b"[") + rest.count(b"{") + 7 * rest.count(b":")
        return self.num_values
