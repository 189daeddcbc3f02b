"""Ring rows that hold the rings behind cached prefixes."""

from __future__ import annotations

from hpu_duo.kv.prefix_tree import PrefixNode, PrefixTree


class Snapshots:
    """Hands out the rows of snapshots; if none is free, the least valuable snapshot goes.

    The value of a snapshot is the number of tokens that it saves, those between it and the next shorter one,
    divided by the time since its last use. All snapshots take equally many bytes.

    Args:
        rows: numbers of the rows, behind those of running requests.
    """

    def __init__(self, rows: range) -> None:
        self._rows = rows
        self._free = list(reversed(rows))
        self._nodes: dict[int, PrefixNode] = {}

    @property
    def num_rows(self) -> int:
        """Snapshots that fit."""
        return len(self._rows)

    @property
    def num_used(self) -> int:
        """Number of snapshots in use."""
        return len(self._nodes)

    @property
    def nodes(self) -> tuple[PrefixNode, ...]:
        """Prefixes with a snapshot."""
        return tuple(self._nodes.values())

    def place(self, node: PrefixNode, tree: PrefixTree) -> PrefixNode | None:
        """Give a prefix a row, which the caller fills; returns the prefix that lost its own, if any."""
        lost = None
        if not self._free:
            lost = min(self._nodes.values(), key=lambda each: _value(each, tree.time))
            self.remove(lost)
        node.snapshot = self._free.pop()
        self._nodes[node.snapshot] = node
        return lost

    def remove(self, node: PrefixNode) -> None:
        """Take the row of a prefix back, if it has one."""
        if node.snapshot is not None:
            del self._nodes[node.snapshot]
            self._free.append(node.snapshot)
            node.snapshot = None


def _value(node: PrefixNode, now: int) -> float:
    shorter = (each.depth for each in node.path if each.snapshot is not None and each is not node)
    return (node.depth - next(shorter, 0)) / (1 + now - node.last_used)
