"""Tool calls in the text of a model, found as the text comes."""

from hpu_duo.server.tools.choice import PARSERS, make_parser, resolve_parser
from hpu_duo.server.tools.forced import calls_grammar
from hpu_duo.server.tools.hermes import HermesParser
from hpu_duo.server.tools.llama import LlamaParser
from hpu_duo.server.tools.pieces import CallArguments, CallBegun, Content, Piece, ToolParser

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
