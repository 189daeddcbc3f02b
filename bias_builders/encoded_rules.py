"""Rules encoded as integers, for operators and kernels.

Prefix notation: a code, then its numbers, or the number of rules and these, or the number of rows of a table
and these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, product
from typing import TypeAlias

from bias_builders.block_tables import BlockTable
from bias_builders.rules import Behind, Dilated, Fixed, Rule, RuleIntersection, RuleUnion, Strided, Window

WINDOW, DILATED, STRIDED, FIXED, _UNION, _INTERSECTION, _TABLE, BEHIND = range(1, 9)
"""Codes of rules."""

Leaf: TypeAlias = tuple[int, int, int]
"""Code and two numbers of a rule that is no union or intersection; the second may be unused."""


def encode_rule(rule: Rule | None) -> tuple[int, ...]:
    """Write a rule as integers; nothing for None."""
    match rule:
        case None:
            return ()
        case RuleUnion(rules) | RuleIntersection(rules):
            code = _UNION if isinstance(rule, RuleUnion) else _INTERSECTION
            return code, len(rules), *(number for each in rules for number in encode_rule(each))
        case BlockTable(block, rows):
            return _TABLE, len(rows), block, *(number for row in rows for number in (len(row), *row))
        case _:
            return _leaf(rule)


def decode_rule(numbers: Sequence[int]) -> Rule | None:
    """Decode the result of ``encode_rule``."""
    return _decoded(tuple(numbers)) if numbers else None


@lru_cache(256)
def _decoded(numbers: tuple[int, ...]) -> Rule:
    return _read(iter(numbers))


def rule_terms(rule: Rule) -> tuple[tuple[Leaf, ...], ...]:
    """Write a rule as a union of intersections of leaves, for kernels that evaluate it without a stack.

    Raises:
        ValueError: the rule has a table.
    """
    match rule:
        case RuleUnion(rules):
            return tuple(term for each in rules for term in rule_terms(each))
        case RuleIntersection(rules):
            choices = product(*(rule_terms(each) for each in rules))
            return tuple(tuple(leaf for term in terms for leaf in term) for terms in choices)
        case _:
            return ((_leaf(rule),),)


def _leaf(rule: Rule) -> Leaf:
    match rule:
        case Window(sink, recent):
            return WINDOW, sink, recent
        case Dilated(width, dilation):
            return DILATED, width, dilation
        case Strided(stride):
            return STRIDED, stride, 0
        case Fixed(stride, summary):
            return FIXED, stride, summary
        case Behind(hidden):
            return BEHIND, hidden, 0
        case _:
            raise ValueError(f"expected a rule in closed form, got {rule.key[0]}")


def _read(numbers: Iterator[int]) -> Rule:
    code, first = next(numbers), next(numbers)
    if code in (_UNION, _INTERSECTION):
        rules = tuple(_read(numbers) for _ in range(first))
        return RuleUnion(rules) if code == _UNION else RuleIntersection(rules)
    second = next(numbers)
    if code == _TABLE:
        rows = (tuple(islice(numbers, next(numbers))) for _ in range(first))
        return BlockTable(second, tuple(rows))
    if code == WINDOW:
        return Window(first, second)
    if code == DILATED:
        return Dilated(first, second)
    if code == BEHIND:
        return Behind(first)
    return Strided(first) if code == STRIDED else Fixed(first, second)
