"""Pinned prefixes, which stay cached until they are released."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hpu_duo.kv.prefix_tree import PrefixNode
from hpu_duo.prefix_hold import PrefixHold


class Adoption(NamedTuple):
    """A newly cached prefix, and its units to be written.

    Attributes:
        hold: of the prefix.
        new: nodes that were not cached, the shallowest first.
        first: index in the prefix of the first block to be written.
        blocks: ids of that one and the following ones.
        row: row of the rings; None if they were cached, or no head has any.
    """

    hold: PrefixHold
    new: list[PrefixNode]
    first: int
    blocks: list[int]
    row: int | None


class PrefixHolds:
    """Reference counts of pinned prefixes, which may share blocks.

    Attributes:
        left: holds with a reference to be released before the next step; any thread appends to it at any
            moment.
    """

    def __init__(self) -> None:
        self._holds: set[PrefixHold] = set()
        self._held: Counter[PrefixNode] = Counter()
        self._ends: Counter[PrefixNode] = Counter()
        self.left: deque[PrefixHold] = deque()

    def __iter__(self) -> Iterator[PrefixHold]:
        return iter(tuple(self._holds))

    @property
    def num_nodes(self) -> int:
        """Number of pinned nodes, hence of pinned blocks, each counted once."""
        return len(self._held)

    @property
    def num_ends(self) -> int:
        """Distinct prefixes from which a request must be able to continue."""
        return len(self._ends)

    def ends_at(self, node: PrefixNode) -> bool:
        """Whether a pinned prefix ends at a node."""
        return node in self._ends

    def num_new(self, path: list[PrefixNode], num_blocks: int) -> int:
        """Return how many blocks of a prefix of ``num_blocks`` blocks are not pinned yet.

        Args:
            path: its nodes in the tree.
        """
        return num_blocks - sum(node in self._held for node in path)

    def add(self, hold: PrefixHold, node: PrefixNode) -> None:
        """Pin the prefix that ends at a node, with one reference."""
        assert hold.node is None, "expected a hold without a prefix"
        hold.node = node
        self._holds.add(hold)
        self._held.update(node.path)
        self._ends[node] += 1

    def remove(self, hold: PrefixHold) -> PrefixNode:
        """Unpin a prefix; returns its last node."""
        node = hold.node
        assert node is not None, "expected a pinned prefix"
        hold.node = None
        self._holds.remove(hold)
        _take(self._held, node.path)
        _take(self._ends, (node,))
        return node

    def leave_later(self, hold: PrefixHold) -> None:
        """Append a hold to ``left``, from any thread and at any moment."""
        self.left.append(hold)


def _take(counts: Counter[PrefixNode], nodes: Iterable[PrefixNode]) -> None:
    for node in nodes:
        counts[node] -= 1
        if not counts[node]:
            del counts[node]
