"""Prefixes that stay cached until they are let go."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hpu_duo.kv.prefix_tree import PrefixNode
from hpu_duo.prefix_hold import PrefixHold


class Adoption(NamedTuple):
    """A prefix that was entered, and the units of it that are to be written.

    Attributes:
        hold: of the prefix.
        new: nodes that were not there, the shallowest first.
        first: number of the first block that is to be written.
        blocks: places of that one and the following ones.
        row: place of the rings; None if they were there, or no head keeps any.
    """

    hold: PrefixHold
    new: list[PrefixNode]
    first: int
    blocks: list[int]
    row: int | None


class PrefixHolds:
    """Counts who holds which prefixes; several may hold one, and hold its beginning.

    Attributes:
        left: holds whose holder has gone without a word; any thread appends to it at any moment.
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
        """Prefixes of whole blocks that are held, hence blocks, those that several hold counted once."""
        return len(self._held)

    @property
    def num_ends(self) -> int:
        """Distinct prefixes behind which a request must be able to go on."""
        return len(self._ends)

    def ends_at(self, node: PrefixNode) -> bool:
        """Whether a held prefix ends at a node."""
        return node in self._ends

    def num_new(self, path: list[PrefixNode], num_blocks: int) -> int:
        """Blocks that nobody holds yet of a prefix of ``num_blocks`` blocks.

        Args:
            path: what the tree has of it.
        """
        return num_blocks - sum(node in self._held for node in path)

    def add(self, hold: PrefixHold, node: PrefixNode) -> None:
        """Hold the prefix that ends at a node, for its first holder."""
        assert hold.node is None, "a hold is of one prefix"
        hold.node = node
        self._holds.add(hold)
        self._held.update(node.path)
        self._ends[node] += 1

    def remove(self, hold: PrefixHold) -> PrefixNode:
        """Hold a prefix no longer; returns its end."""
        node = hold.node
        assert node is not None, "a prefix that is held has an end"
        hold.node = None
        self._holds.remove(hold)
        _take(self._held, node.path)
        _take(self._ends, (node,))
        return node

    def leave_later(self, hold: PrefixHold) -> None:
        """Note in ``left`` that a holder is gone, from any thread and at any moment."""
        self.left.append(hold)


def _take(counts: Counter[PrefixNode], nodes: Iterable[PrefixNode]) -> None:
    for node in nodes:
        counts[node] -= 1
        if not counts[node]:
            del counts[node]
