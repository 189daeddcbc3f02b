"""Rules as a user writes them, and as reports show them."""

from __future__ import annotations

from hashlib import sha256

from bias_builders.block_tables import BlockTable
from bias_builders.rules import Behind, Dilated, Fixed, Rule, RuleIntersection, RuleUnion, Strided, Window


def describe_rule(rule: Rule) -> str:
    """Write a rule as text, distinct for distinct rules: ``sink_band:sink=4,band=64|strided:stride=128``."""
    match rule:
        case Window(0, recent):
            return f"band:width={recent}"
        case Window(sink, recent):
            return f"sink_band:sink={sink},band={recent}"
        case Dilated(width, dilation):
            return f"dilated:width={width},dilation={dilation}"
        case Strided(stride):
            return f"strided:stride={stride}"
        case Fixed(stride, summary):
            return f"fixed:stride={stride},summary={summary}"
        case Behind(hidden):
            return f"behind:hidden={hidden}"
        case RuleUnion(rules):
            return "|".join(_inner(each) for each in rules)
        case RuleIntersection(rules):
            return "&".join(_inner(each) for each in rules)
        case BlockTable(block, rows):
            return f"block_table:block={block},rows={sha256(repr(rows).encode()).hexdigest()[:12]}"
        case _:
            return repr(rule.key)


def _inner(rule: Rule) -> str:
    text = describe_rule(rule)
    return f"({text})" if isinstance(rule, RuleUnion | RuleIntersection) else text
