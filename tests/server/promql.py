"""Expressions of PromQL, taken apart by the parser of Prometheus' Rust library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

promql = pytest.importorskip("promql_parser", reason="needs the package promql-parser, of the extra dev")


@dataclass(frozen=True)
class Selector:
    """A metric that an expression reads.

    Attributes:
        name: of its samples, suffixes such as ``_bucket`` included.
        labels: that it filters by.
    """

    name: str
    labels: frozenset[str]


@dataclass(frozen=True)
class Expression:
    """An expression: the metrics that it reads, and the labels that it groups by."""

    selectors: tuple[Selector, ...]
    groups: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Take an expression apart.

        Raises:
            ValueError: it is no PromQL.
        """
        nodes = list(_nodes(promql.parse(text)))
        return cls(
            tuple(
                Selector(node.name, frozenset(matcher.name for matcher in node.matchers.matchers))
                for node in nodes
                if isinstance(node, promql.VectorSelector)
            ),
            frozenset(
                label
                for node in nodes
                if isinstance(node, promql.AggregateExpr) and node.modifier is not None
                for label in node.modifier.labels
            ),
        )


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("args", "expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, name, None)
        for one in child if isinstance(child, list) else [child]:
            if one is not None:
                yield from _nodes(one)
