"""Rules of sparse attention as users write them: ``sink_band:sink=4,band=1024|strided:stride=128``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from bias_builders import (
    BlockTable,
    Dilated,
    Fixed,
    Quest,
    Rule,
    RuleIntersection,
    RuleUnion,
    Strided,
    TopBlocks,
    Window,
)
from hpu_duo.option_spec import call_with_options


def band(width: int = 1024) -> Rule:
    """The last ``width`` tokens."""
    return Window(0, width).validate()


def sink_band(sink: int = 4, band: int = 1024) -> Rule:
    """The first ``sink`` tokens and the last ``band`` ones."""
    return Window(sink, band).validate()


def dilated(width: int = 512, dilation: int = 2) -> Rule:
    """Every ``dilation``-th of the last tokens, ``width`` of them."""
    return Dilated(width, dilation)


def strided(stride: int = 128) -> Rule:
    """The last ``stride`` tokens, and every ``stride``-th before them."""
    return Strided(stride)


def fixed(stride: int = 128, summary: int = 16) -> Rule:
    """The token's own run of ``stride`` positions, and the last ``summary`` positions of every run."""
    return Fixed(stride, summary)


def block_table(file: str = "", block: int = 128, head: int = 0) -> Rule:
    """Blocks of keys that each block of queries sees, from a table in a file.

    Args:
        file: of numpy (``.npy``): a square table of booleans, or one for each head, ``[heads, n, n]``.
        block: positions of a block.
        head: number of the table.
    """
    try:
        seen = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"expected file of a block_table to be an array of numpy, got {file!r}: {error}"
        ) from None
    if seen.dtype != np.bool_ or seen.ndim not in (2, 3):
        raise ValueError(
            f"{file}: expected booleans [n, n] or [heads, n, n], got {seen.dtype} {list(seen.shape)}"
        )
    tables = seen if seen.ndim == 3 else seen[None]
    if not 0 <= head < len(tables):
        raise ValueError(f"{file}: expected head of 0 to {len(tables) - 1}, got {head}")
    return BlockTable.of(block, tables[head])


ATTENTION_RULES: dict[str, Callable[..., Rule]] = {
    "band": band,
    "block_table": block_table,
    "dilated": dilated,
    "fixed": fixed,
    "sink_band": sink_band,
    "strided": strided,
}
"""Rules by name."""

FULL = "full"
"""Name of what is no rule: a head sees all tokens."""


def top_blocks(blocks: int = 32) -> TopBlocks:
    """Blocks of a prompt, ``blocks`` of them for each block of queries, that are estimated to matter most."""
    return TopBlocks(blocks)


def quest(pages: int = 64, every: int = 1) -> Quest:
    """Blocks that each decoded token reads, ``pages`` of them, chosen by bounds of their keys.

    Args:
        pages: blocks, the token's own included.
        every: tokens that use one choice.
    """
    return Quest(pages, every)


Choice: TypeAlias = TopBlocks | Quest
"""A choice of blocks by the text."""

CHOICES: dict[str, Callable[..., Choice]] = {"quest": quest, "top_blocks": top_blocks}
"""Choices of blocks by name: what a token sees depends on the text."""


def make_attention_rules(text: str) -> tuple[Rule | Choice | None, ...]:
    """Parse a rule for all heads, or one for each; None = all tokens.

    Args:
        text: a rule, as for ``make_attention_rule``, or a choice of blocks; or as many of these, or of
            ``full``, as a layer has KV heads, joined by ``;``.

    Raises:
        ValueError: see ``make_attention_rule``.
    """
    return tuple(_of_heads(part.replace(" ", "")) for part in text.split(";"))


def chooses_blocks(text: str) -> bool:
    """Whether any head of a text, as for ``make_attention_rules``, has a choice of blocks."""
    return any(isinstance(rule, Choice) for rule in make_attention_rules(text))


def _of_heads(text: str) -> Rule | Choice | None:
    if text == FULL:
        return None
    names = [part.partition(":")[0] for part in text.replace("&", "|").split("|")]
    if len(names) == 1:
        every: dict[str, Callable[..., Rule | Choice]] = {**ATTENTION_RULES, **CHOICES}
        return call_with_options("attention_rule", text, every)
    if not CHOICES.keys().isdisjoint(names):
        raise ValueError(f"expected {', '.join(CHOICES)} alone, since it goes by the text, got {text!r}")
    return make_attention_rule(text)


def make_attention_rule(text: str) -> Rule:
    """Parse a rule.

    Args:
        text: a name with options; several are joined by ``|`` (union) and, with higher precedence, by ``&``
            (intersection).

    Raises:
        ValueError: there is no rule of a name, or it has no such option or not with this value.
    """
    terms = [
        _joined(
            RuleIntersection, [call_with_options("attention_rule", each, ATTENTION_RULES) for each in term]
        )
        for term in (part.split("&") for part in text.replace(" ", "").split("|"))
    ]
    return _joined(RuleUnion, terms)


def _joined(join: Callable[[tuple[Rule, ...]], Rule], rules: list[Rule]) -> Rule:
    return rules[0] if len(rules) == 1 else join(tuple(rules))
