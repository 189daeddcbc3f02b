"""Rules of visibility, by position: the only place where attention visibility is decided.

Every function works on numpy arrays and on torch tensors alike, broadcasts its arguments, and returns
booleans. Positions are those of the original text: nothing is renumbered when a streaming head evicts tokens.

Rules of sparse attention are in closed form, with their union and intersection. ``Window`` is the band,
with or without sinks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple, Protocol

Array = Any


class Tile(NamedTuple):
    """Queries and keys by position, as two ranges; of numbers, or of arrays of them, one for each tile.

    Attributes:
        first_query, last_query: positions of queries, both included.
        first_key, last_key: positions of keys, both included.
    """

    first_query: Array
    last_query: Array
    first_key: Array
    last_key: Array

    @property
    def nearest(self) -> Array:
        """Least distance back from a query of the tile to a key that is not behind it."""
        distance = self.first_query - self.last_key
        return distance * (distance > 0)

    @property
    def farthest(self) -> Array:
        """Largest distance back from a query to a key; below 0 if all keys are behind all queries."""
        return self.last_query - self.first_key

    @property
    def has_past(self) -> Array:
        """Whether some query has a key of the tile that is not behind it."""
        return self.farthest >= 0

    @property
    def is_past(self) -> Array:
        """Whether no key of the tile is behind any of its queries."""
        return self.first_query >= self.last_key


class Rule(Protocol):
    """A choice of the earlier tokens that a token sees; a frozen value of plain numbers.

    Every token sees itself and no later token, so no token is without a key.
    """

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and numbers, for captures and reports: equal for equal rules only."""
        ...

    @property
    def sink(self) -> int:
        """Number of leading positions that may be seen at any distance, which ``reaches`` ignores."""
        ...

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """Whether a query sees a key; positions of 0 and above."""
        ...

    def may_see(self, tile: Tile) -> Array:
        """False only if no query of the tile sees any of its keys."""
        ...

    def sees_all(self, tile: Tile) -> Array:
        """True only if all queries of the tile see all of its keys."""
        ...

    def reaches(self, nearest: int, farthest: int) -> bool:
        """False only if no token sees any key at these distances back, the first ``sink`` positions apart.

        Usable with static shapes: distances within a row are known when positions are not.
        """
        ...


class Window(NamedTuple):
    """The rule of a streaming head: the first ``sink`` tokens and the last ``recent`` ones.

    ``sink=0`` is a plain sliding window, or band. ``recent`` counts the query token itself, as
    transformers counts ``sliding_window``.
    """

    sink: int
    recent: int

    @property
    def size(self) -> int:
        """Slots of the ring that stores such a window."""
        return self.sink + self.recent

    def validate(self) -> Window:
        """Return self; raise ``ValueError`` when no token could see itself."""
        if self.sink < 0 or self.recent < 1:
            raise ValueError(f"expected sink >= 0 and recent >= 1, got sink={self.sink} recent={self.recent}")
        return self

    def clipped(self, max_model_len: int) -> Window:
        """The smallest window with the same visibility for positions below ``max_model_len``."""
        sink = min(self.sink, max_model_len)
        return Window(sink, max(1, min(self.recent, max_model_len - sink)))

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See ``Rule``."""
        return "sink_band", self.sink, self.recent

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """See ``sees_streaming``."""
        return sees_streaming(query_position, key_position, self)

    def may_see(self, tile: Tile) -> Array:
        """Exact: keys are near enough, or begin among the sinks."""
        return tile.has_past & ((tile.nearest < self.recent) | (tile.first_key < self.sink))

    def sees_all(self, tile: Tile) -> Array:
        """Exact: all keys but sinks are near enough for the last query."""
        # The farthest key that is no sink.
        beyond = tile.first_key + (self.sink - tile.first_key) * (tile.first_key < self.sink)
        is_near = tile.last_query - beyond < self.recent
        return tile.is_past & (is_near | (tile.last_key < self.sink))

    def reaches(self, nearest: int, farthest: int) -> bool:
        """See ``Rule``."""
        return nearest < self.recent


def sees_causal(query_position: Array, key_position: Array) -> Array:
    """A token sees itself and everything before it."""
    return key_position <= query_position


def sees_streaming(query_position: Array, key_position: Array, window: Window) -> Array:
    """Token ``p`` sees ``k < sink`` or ``p - recent < k``, and never the future.

    Exact per token, so the result does not depend on how a prompt is cut into chunks.
    Source: DuoAttention (arXiv:2410.10819) with StreamingLLM's sinks (arXiv:2309.17453).
    """
    kept = (key_position < window.sink) | (key_position > query_position - window.recent)
    return kept & (key_position <= query_position)


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


@dataclass(frozen=True)
class Behind:
    """All tokens but the first ``hidden`` ones, and the token itself."""

    hidden: int

    def __post_init__(self) -> None:
        _check("hidden", self.hidden)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See ``Rule``."""
        return "behind", self.hidden

    @property
    def sink(self) -> int:
        """None: the first tokens are those that are hidden."""
        return 0

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """Behind the hidden ones, or the token itself."""
        is_shown = (key_position >= self.hidden) | (key_position == query_position)
        return (key_position <= query_position) & is_shown

    def may_see(self, tile: Tile) -> Array:
        """Exact."""
        is_behind = (tile.last_key >= self.hidden) & (tile.last_query >= self.hidden)
        share = (tile.first_key <= tile.last_query) & (tile.first_query <= tile.last_key)
        return tile.has_past & (is_behind | share)

    def sees_all(self, tile: Tile) -> Array:
        """Exact: no key is hidden, or there is one pair, of a token with itself."""
        is_one = (tile.last_query == tile.first_key) & (tile.first_query == tile.last_key)
        return tile.is_past & ((tile.first_key >= self.hidden) | is_one)

    def reaches(self, nearest: int, farthest: int) -> bool:
        """Every distance: what is hidden depends on positions."""
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
