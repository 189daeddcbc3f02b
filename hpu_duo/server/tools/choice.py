"""The parser that belongs to a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from hpu_duo.server.tools.hermes import OPEN, HermesParser
from hpu_duo.server.tools.llama import TAG, LlamaParser
from hpu_duo.server.tools.pieces import ToolParser

PARSERS: Mapping[str, Callable[[Collection[str] | None], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
}
"""By the names that vLLM's ``--tool-call-parser`` has for these formats."""


def _detect_parser(chat_template: str | None) -> str | None:
    """The parser for the calls that a chat template shows; None when it shows none that is known."""
    if chat_template is None or "tools" not in chat_template:
        return None
    if OPEN in chat_template:
        return "hermes"
    if TAG in chat_template or '"parameters":' in chat_template:
        return "llama3_json"
    return None


def resolve_parser(name: str, chat_template: str | None = None) -> str | None:
    """The parser that a setting comes to; None for none.

    Args:
        name: ``auto``, ``none`` or one of ``PARSERS``.
        chat_template: what ``auto`` goes by.

    Raises:
        ValueError: another name.
    """
    if name == "none":
        return None
    if name == "auto":
        return _detect_parser(chat_template)
    if name not in PARSERS:
        raise ValueError(f"expected a tool call parser of auto, none, {', '.join(PARSERS)}, got {name!r}")
    return name


def make_parser(name: str, functions: Collection[str] | None = None) -> ToolParser:
    """A parser for one answer, by its name in ``PARSERS``.

    Args:
        functions: names that may be called; None for any.
    """
    return PARSERS[name](functions)
