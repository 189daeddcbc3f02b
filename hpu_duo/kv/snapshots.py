"""The rows of snapshots of the prefix cache: their number, and which of them are evicted."""

from __future__ import annotations

from collections.abc import Callable

from hpu_duo.kv.prefix_tree import PrefixNode, PrefixTree

_SHARE = 8
"""Snapshots use at most one byte for this number of bytes of the other stores."""


def default_snapshots(other_bytes: int, row_bytes: int, max_num_seqs: int) -> int:
    """Return the default number of snapshots: as many as requests run, within a share of memory.

    At least one, without which no prefix can be reused.

    Args:
        other_bytes: of all other stores.
        row_bytes: of one snapshot; 0 if no head has a ring, so that snapshots are not needed.
        max_num_seqs: requests that run at the same time.
    """
    if not row_bytes:
        return 0
    return min(max_num_seqs, max(1, other_bytes // _SHARE // row_bytes))


def default_snapshots_within(kv_bytes: int, row_bytes: int, max_num_seqs: int) -> int:
    """The same for stores that have ``kv_bytes`` together with the snapshots."""
    return default_snapshots(kv_bytes * _SHARE // (_SHARE + 1), row_bytes, max_num_seqs)


class Snapshots:
    """Allocates the rows of snapshots; if none is free, the least valuable snapshot is evicted.

    The value of a snapshot is the number of tokens that it saves, those between it and the next shorter one,
    divided by the time since its last use. All snapshots have the same size. Half of the rows are reserved
    for prefixes that were requested again: most texts occur once, however long they are.

    Args:
        rows: ids of the rows, after those of running requests.
    """

    def __init__(self, rows: range) -> None:
        self._rows = rows
        self._free = list(reversed(rows))
        self._nodes: dict[int, PrefixNode] = {}

    @property
    def num_rows(self) -> int:
        """Number of rows for snapshots."""
        return len(self._rows)

    @property
    def num_used(self) -> int:
        """Number of snapshots in use."""
        return len(self._nodes)

    @property
    def nodes(self) -> tuple[PrefixNode, ...]:
        """Prefixes with a snapshot."""
        return tuple(self._nodes.values())

    def has_place(self, is_held: Callable[[PrefixNode], bool]) -> bool:
        """Whether ``place`` would allocate a row to a prefix."""
        return bool(self._free) or any(not is_held(each) for each in self._nodes.values())

    def place(
        self, node: PrefixNode, tree: PrefixTree, is_held: Callable[[PrefixNode], bool]
    ) -> PrefixNode | None:
        """Allocate a row to a prefix, which the caller fills, unless all rows belong to pinned prefixes.

        Returns:
            The prefix whose snapshot was evicted, if any.
        """
        lost = None
        if not self._free:
            others = [each for each in self._nodes.values() if not is_held(each)]
            if not others:
                return None
            lost = self._least_valuable(others, tree.time)
            self.remove(lost)
        node.snapshot = self._free.pop()
        self._nodes[node.snapshot] = node
        return lost

    def _least_valuable(self, nodes: list[PrefixNode], now: int) -> PrefixNode:
        nodes = sorted(nodes, key=lambda each: _value(each, now))
        shared = [each for each in nodes if each.is_shared]
        kept = {*shared[-(len(self._rows) // 2) :]} if len(self._rows) > 1 else {*()}
        return next((each for each in nodes if each not in kept), nodes[0])

    def remove(self, node: PrefixNode) -> None:
        """Free the row of a prefix, if it has one."""
        if node.snapshot is not None:
            del self._nodes[node.snapshot]
            self._free.append(node.snapshot)
            node.snapshot = None


def _value(node: PrefixNode, now: int) -> float:
    shorter = (each.depth for each in node.path if each.snapshot is not None and each is not node)
    return (node.depth - next(shorter, 0)) / (1 + now - node.last_used)
