"""Rules of sparse attention in closed form, and their union and intersection.

``Window`` is the band, with or without sinks. All arguments are validated on construction.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

from bias_builders.rules import Array, Rule, Tile


def _check(name: str, value: int, least: int = 1) -> None:
    if value < least:
        raise ValueError(f"expected {name} >= {least}, got {value}")


def _has_multiple(nearest: Array, farthest: Array, step: int) -> Array:
    """Whether ``[nearest, farthest]`` contains a multiple of ``step``."""
    return (nearest + step - 1) // step * step <= farthest


@dataclass(frozen=True)
class Dilated:
    """Every ``dilation``-th of the last tokens, ``width`` of them, the token itself included.

    Source: dilated sliding windows of Longformer (arXiv:2004.05150).
    """

    width: int
    dilation: int

    def __post_init__(self) -> None:
        _check("width", self.width)
        _check("dilation", self.dilation)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See ``Rule``."""
        return "dilated", self.width, self.dilation

    @property
    def sink(self) -> int:
        """None: all visibility is by distance."""
        return 0

    @property
    def _farthest(self) -> int:
        return (self.width - 1) * self.dilation

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """A multiple of ``dilation`` back, and near enough."""
        distance = query_position - key_position
        return (distance >= 0) & (distance <= self._farthest) & (distance % self.dilation == 0)

    def may_see(self, tile: Tile) -> Array:
        """Exact."""
        near, far = tile.nearest, tile.farthest
        first = (near + self.dilation - 1) // self.dilation * self.dilation
        return tile.has_past & (first <= far) & (first <= self._farthest)

    def sees_all(self, tile: Tile) -> Array:
        """Exact: one distance, or no dilation."""
        near, far = tile.nearest, tile.farthest
        is_regular = (near == far) & (near % self.dilation == 0) if self.dilation > 1 else near <= far
        return tile.is_past & is_regular & (far <= self._farthest)

    def reaches(self, nearest: int, farthest: int) -> bool:
        """See ``Rule``."""
        return bool(_has_multiple(nearest, min(farthest, self._farthest), self.dilation))


@dataclass(frozen=True)
class Strided:
    """The last ``stride`` tokens, and every ``stride``-th before them.

    Source: the strided pattern of Sparse Transformer (arXiv:1904.10509), both of its heads in one.
    """

    stride: int

    def __post_init__(self) -> None:
        _check("stride", self.stride)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See ``Rule``."""
        return "strided", self.stride

    @property
    def sink(self) -> int:
        """None: all visibility is by distance."""
        return 0

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """Near enough, or a multiple of ``stride`` back."""
        distance = query_position - key_position
        return (distance >= 0) & ((distance < self.stride) | (distance % self.stride == 0))

    def may_see(self, tile: Tile) -> Array:
        """Exact."""
        near, far = tile.nearest, tile.farthest
        return tile.has_past & ((near < self.stride) | _has_multiple(near, far, self.stride))

    def sees_all(self, tile: Tile) -> Array:
        """Exact: all are near, or there is one distance."""
        near, far = tile.nearest, tile.farthest
        is_one = (near == far) & (near % self.stride == 0)
        return tile.is_past & ((far <= self.stride) | is_one | (self.stride == 1))

    def reaches(self, nearest: int, farthest: int) -> bool:
        """See ``Rule``."""
        return nearest < self.stride or bool(_has_multiple(nearest, farthest, self.stride))


@dataclass(frozen=True)
class Fixed:
    """The token's own run of ``stride`` positions, and the last ``summary`` positions of every run before.

    Source: the fixed pattern of Sparse Transformer (arXiv:1904.10509), both of its heads in one.
    """

    stride: int
    summary: int

    def __post_init__(self) -> None:
        _check("stride", self.stride)
        _check("summary", self.summary)
        if self.summary > self.stride:
            raise ValueError(f"expected summary of at most stride={self.stride}, got {self.summary}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See ``Rule``."""
        return "fixed", self.stride, self.summary

    @property
    def sink(self) -> int:
        """None."""
        return 0

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """In the same run, or at the end of a run."""
        same = query_position // self.stride == key_position // self.stride
        is_summary = key_position % self.stride >= self.stride - self.summary
        return (key_position <= query_position) & (same | is_summary)

    def may_see(self, tile: Tile) -> Array:
        """By the runs that queries and keys have in common, and by the first end of a run."""
        before = self.stride - self.summary
        offset = tile.first_key % self.stride
        first_summary = tile.first_key + (before - offset) * (offset < before)
        has_summary = (first_summary <= tile.last_key) & (first_summary <= tile.last_query)
        return tile.has_past & (has_summary | self._share_run(tile))

    def _share_run(self, tile: Tile) -> Array:
        first_query, last_query, first_key, last_key = (x // self.stride for x in tile)
        return (first_key <= last_query) & (first_query <= last_key)

    def sees_all(self, tile: Tile) -> Array:
        """If all are in one run, or all keys at the end of one."""
        first_query, last_query, first_key, last_key = (x // self.stride for x in tile)
        one_run = (first_query == last_query) & (first_key == last_key)
        is_summary = tile.first_key % self.stride >= self.stride - self.summary
        is_all = (one_run & (first_key == first_query)) | ((first_key == last_key) & is_summary)
        return tile.is_past & (is_all | (self.summary == self.stride))

    def reaches(self, nearest: int, farthest: int) -> bool:
        """Every distance: what is seen depends on where runs end."""
        return True


def _check_rules(rules: tuple[Rule, ...]) -> None:
    if len(rules) < 2:
        raise ValueError(f"expected 2 rules or more, got {len(rules)}")


@dataclass(frozen=True)
class RuleUnion:
    """Union of rules: a key is seen if any of them shows it."""

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        _check_rules(self.rules)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See ``Rule``."""
        return "union", *(rule.key for rule in self.rules)

    @property
    def sink(self) -> int:
        """The most of any rule."""
        return max(rule.sink for rule in self.rules)

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """See ``Rule``."""
        return reduce(or_, [rule.sees(query_position, key_position) for rule in self.rules])

    def may_see(self, tile: Tile) -> Array:
        """As exact as the rules are."""
        return reduce(or_, [rule.may_see(tile) for rule in self.rules])

    def sees_all(self, tile: Tile) -> Array:
        """If one rule alone sees all."""
        return reduce(or_, [rule.sees_all(tile) for rule in self.rules])

    def reaches(self, nearest: int, farthest: int) -> bool:
        """See ``Rule``."""
        return any(rule.reaches(nearest, farthest) for rule in self.rules)


@dataclass(frozen=True)
class RuleIntersection:
    """Intersection of rules: a key is seen if all of them show it."""

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        _check_rules(self.rules)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See ``Rule``."""
        return "intersection", *(rule.key for rule in self.rules)

    @property
    def sink(self) -> int:
        """The most of any rule: a bound, since the others may hide them."""
        return max(rule.sink for rule in self.rules)

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """See ``Rule``."""
        return reduce(and_, [rule.sees(query_position, key_position) for rule in self.rules])

    def may_see(self, tile: Tile) -> Array:
        """If each rule may see something, which need not be the same."""
        return reduce(and_, [rule.may_see(tile) for rule in self.rules])

    def sees_all(self, tile: Tile) -> Array:
        """As exact as the rules are."""
        return reduce(and_, [rule.sees_all(tile) for rule in self.rules])

    def reaches(self, nearest: int, farthest: int) -> bool:
        """See ``Rule``."""
        return all(rule.reaches(nearest, farthest) for rule in self.rules)
