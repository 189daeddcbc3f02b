"""A radix tree of prompts: what they have in common, and which replicas hold it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping

import numpy as np

from hpu_duo.routing.request import Units
from hpu_duo.routing.spread_dict import MOST_OF_ONE, SpreadDict
from hpu_duo.routing.window_sums import WindowSums


class RadixNode:
    """Units that follow those of the parents: a prefix, up to its last unit.

    Attributes:
        parent: the prefix before it; None for the empty one.
        label: its units, at least one but at the root.
        start: units of the parents.
        children: by their first unit.
        holders: those who are taken to hold it, with the last use there. Whoever holds a prefix holds all of
            its parents, and used those no earlier; but for what is about to be forgotten.
        hits: its uses of late, at any replica.
        first_tokens: times to the first token of late, if anybody notes them.
        namespace: of a root.
    """

    __slots__ = ("children", "first_tokens", "hits", "holders", "label", "namespace", "parent", "start")

    def __init__(
        self, parent: RadixNode | None, label: Units, start: int, namespace: Hashable = None
    ) -> None:
        self.parent, self.label, self.start, self.namespace = parent, label, start, namespace
        self.children: MutableMapping[int, RadixNode] = {}
        self.first_tokens: WindowSums | None = None
        self.holders: dict[str, Use] = {}
        self.hits = WindowSums()

    @property
    def end(self) -> int:
        """Units of the prefix."""
        return self.start + len(self.label)


class Use:
    """The last use of a node by one holder; a member of a doubly linked list.

    Attributes:
        node: that is held.
        used: time of the last use.
        older, newer: neighbours in the order; None at the ends.
    """

    __slots__ = ("newer", "node", "older", "used")

    def __init__(self, node: RadixNode, used: float) -> None:
        self.node, self.used = node, used
        self.older: Use | None = None
        self.newer: Use | None = None


class RadixTree:
    """Prompts as paths from the root, in namespaces that share nothing; where two part, a node ends."""

    def __init__(self) -> None:
        self._roots: SpreadDict[Hashable, RadixNode] = SpreadDict()

    def __iter__(self) -> Iterator[RadixNode]:
        for root in self._roots.values():
            for child in root.children.values():
                yield from below(child)

    def match(self, namespace: Hashable, units: Units) -> list[tuple[RadixNode, int]]:
        """Return the nodes that a prompt goes through, each with how many of its units match.

        Only the last one may match in part, by one unit at least.
        """
        node = self._roots.get(namespace)
        path: list[tuple[RadixNode, int]] = []
        at = 0
        while node is not None and at < len(units):
            node = node.children.get(int(units[at]))
            if node is None:
                break
            num = num_common(node.label, units[at:])
            path.append((node, num))
            at += num
            if num < len(node.label):
                break
        return path

    def insert(self, namespace: Hashable, units: Units) -> tuple[list[RadixNode], list[RadixNode]]:
        """Add a prompt; returns the nodes that make it up, and the lower halves of those that were cut."""
        if not len(units):
            return [], []
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = RadixNode(None, units[:0], 0, namespace)
        path, cut = [], []
        for found, num in self.match(namespace, units):
            if num < len(found.label):
                cut.append(found)
                found = self.cut(found, num)
            path.append(found)
            node = found
        if node.end < len(units):
            rest = units[node.end :].copy()  # a view would keep all of the prompt
            new = RadixNode(node, rest, node.end)
            if len(node.children) == MOST_OF_ONE and isinstance(node.children, dict):
                node.children = SpreadDict(node.children)
            node.children[int(rest[0])] = new
            path.append(new)
        return path, cut

    def cut(self, node: RadixNode, num: int) -> RadixNode:
        """Cut a node behind its first ``num`` units; it is the lower part then.

        Returns:
            The upper part, without holders.
        """
        assert node.parent is not None, "the root is never cut"
        assert 0 < num < len(node.label), f"expected a cut inside of {len(node.label)} units, got {num}"
        upper = RadixNode(node.parent, node.label[:num].copy(), node.start)
        upper.hits.extend(node.hits)
        node.parent.children[int(upper.label[0])] = upper
        node.label, node.start, node.parent = node.label[num:].copy(), node.start + num, upper
        upper.children[int(node.label[0])] = node
        return upper

    def prune(self, node: RadixNode) -> dict[str, Use]:
        """Remove a node that nobody holds, and join what it parted.

        Returns:
            Uses of a node that became part of its parent, by holder; the parent's own stay.

        Raises:
            AssertionError: there are prefixes below it.
        """
        parent = node.parent
        assert parent is not None, "the root stays"
        assert not node.children, f"a prefix of {node.end} units has longer ones"
        del parent.children[int(node.label[0])]
        node.parent = None
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.namespace]
            return {}
        if len(parent.children) == 1:
            (child,) = parent.children.values()
            if child.holders.keys() == parent.holders.keys():
                return _join(parent, child)
        return {}


def below(node: RadixNode) -> Iterator[RadixNode]:
    """Yield a node and those below it, parents first."""
    stack = [node]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node


def num_common(label: Units, units: Units) -> int:
    """Return how many leading units are equal."""
    num = min(len(label), len(units))
    differs = label[:num] != units[:num]
    first = int(np.argmax(differs)) if num else 0
    return first if num and differs[first] else num


def _join(parent: RadixNode, child: RadixNode) -> dict[str, Use]:
    """Make one node of a parent and its only child, with the parent's times; returns the child's uses."""
    parent.label = np.concatenate([parent.label, child.label])
    parent.children = child.children
    for each in parent.children.values():
        each.parent = parent
    uses = child.holders
    child.holders, child.children, child.parent = {}, {}, None
    return uses
