"""Incremental parsers of tool calls in the text of a model."""

from hpu_duo.server.tools.calls import (
    CallArguments,
    CallBegun,
    Content,
    HermesParser,
    LlamaParser,
    Piece,
    ToolParser,
)
from hpu_duo.server.tools.forced import PARSERS, calls_grammar, make_parser, resolve_parser

__all__ = [
    "PARSERS",
    "CallArguments",
    "CallBegun",
    "Content",
    "HermesParser",
    "LlamaParser",
    "Piece",
    "ToolParser",
    "calls_grammar",
    "make_parser",
    "resolve_parser",
]
