"""Prefixes that replicas are taken to hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from math import ceil, inf

from hpu_duo.routing.radix_tree import RadixNode, RadixTree, Use
from hpu_duo.routing.request import RoutedRequest
from hpu_duo.routing.use_order import UseOrder

_MOST_FORGOTTEN = 32
"""Nodes that one call evicts, and those that it lets go: a front process has other things to do."""

_MOST_WEIGHED = 16
"""Nodes that are looked at to tell what would be evicted."""


class PrefixMap:
    """A router's belief about the prefix caches of its replicas.

    A prompt that was sent to a replica is taken to be cached there, until ``capacity`` units are exceeded and
    the least recently used ones go, or until the replica says otherwise.

    Every call visits the nodes of one prompt, and 32 others at most of those that are evicted and of those
    that are forgotten. The rest is left to later calls: until then, nodes below a forgotten one count for
    ``size`` and for nothing else.

    Args:
        capacity: units that a replica is taken to hold; with infinitely many none is ever evicted.
        hits_s: seconds for which uses of a prefix are remembered.

    Attributes:
        tree: all prefixes that anybody is taken to hold.
    """

    def __init__(self, capacity: float = inf, hits_s: float = 0.0) -> None:
        if not capacity >= 0:
            raise ValueError(f"expected a capacity of 0 units or more, got {capacity}")
        self.tree, self.capacity, self._hits_s = RadixTree(), capacity, hits_s
        # Whoever holds a node is a replica in one of its lives, so that one can be forgotten at once.
        self._lives: dict[str, str] = {}
        self._replicas: dict[str, str] = {}
        self._num_lives = 0
        self._orders: dict[str, UseOrder] = {}
        self._forgotten_lives: deque[str] = deque()
        # (life, children still to be visited of each level, the time before which a use is forgotten)
        self._forgotten_below: deque[tuple[str, list[Iterator[RadixNode]], float]] = deque()

    def size(self, replica: str) -> int:
        """Return the units that a replica is taken to hold."""
        life = self._lives.get(replica)
        return 0 if life is None else self._orders[life].size

    def held(self, request: RoutedRequest) -> dict[str, int]:
        """Return the leading units of a prompt that each replica is taken to hold, of those that hold any."""
        found: dict[str, int] = {}
        for node, num in self.tree.match(request.namespace, request.units):
            for life in node.holders:
                replica = self._replicas.get(life)
                if replica is not None and found.get(replica, 0) == node.start:
                    found[replica] = node.start + num
        return found

    def num_holders(self, node: RadixNode) -> int:
        """Return how many replicas are taken to hold a node."""
        return sum(life in self._replicas for life in node.holders)

    def add(self, replica: str, request: RoutedRequest, now: float) -> None:
        """Take a prompt for cached at a replica from now on."""
        life = self._life(replica)
        order = self._orders[life]
        path, cut = self.tree.insert(request.namespace, request.units)
        for lower in cut:
            self._hold_upper(lower)
        for node in reversed(path):  # so parents come behind their children in the order
            use = node.holders.get(life)
            if use is None:
                use = node.holders[life] = Use(node, now)
                order.insert(use, order.newest)
                order.size += len(node.label)
            else:
                order.renew(use, now)
            if self._hits_s:
                node.hits.drop(now - self._hits_s)
                node.hits.add(now)
        self._forget_some()
        self._shrink(life, _MOST_FORGOTTEN + len(path))

    def keep_only(self, replica: str, request: RoutedRequest, num_kept: int, before: float = inf) -> None:
        """Forget what a replica holds of a prompt behind its first units, and all that begins so.

        Args:
            num_kept: leading units that it still holds.
            before: what was used there at this time or later is kept.
        """
        life = self._life(replica)
        for node, num in self.tree.match(request.namespace, request.units):
            if life not in node.holders or node.start + num <= num_kept:
                continue
            if node.start < num_kept:
                self.tree.cut(node, num_kept - node.start)
                self._hold_upper(node)
            levels: list[Iterator[RadixNode]] = []
            self._forget(life, node, before, levels)
            self._forgotten_below.append((life, levels, before))
            self._forget_some()
            return

    def forget(self, replica: str) -> None:
        """Forget everything that a replica holds; its nodes are let go by and by."""
        life = self._lives.pop(replica, None)
        if life is not None:
            del self._replicas[life]
            self._forgotten_lives.append(life)
            self._forget_some()

    def least_used(self, replica: str, num_units: float) -> list[tuple[RadixNode, int]]:
        """Return what a replica would evict first: nodes, with the units of them that would go.

        They are 16 at most, and may have fewer than ``num_units`` for that.
        """
        found = []
        for use in islice(self._orders[self._life(replica)], _MOST_WEIGHED):
            if num_units <= 0:
                break
            num = int(min(num_units, len(use.node.label)))
            found.append((use.node, num))
            num_units -= num
        return found

    def _life(self, replica: str) -> str:
        life = self._lives.get(replica)
        if life is None:
            self._num_lives += 1
            life = self._lives[replica] = f"{replica}#{self._num_lives}"
            self._replicas[life], self._orders[life] = replica, UseOrder()
        return life

    def _hold_upper(self, lower: RadixNode) -> None:
        """Let those who hold the lower part of a node that was cut hold the upper one."""
        assert lower.parent is not None, "it is the lower part of another one"
        for life, use in lower.holders.items():
            upper = lower.parent.holders[life] = Use(lower.parent, use.used)
            self._orders[life].insert(upper, use)

    def _shrink(self, life: str, num_most: int) -> None:
        """Evict what was used least recently, a number of nodes at most."""
        order = self._orders[life]
        for _ in range(num_most):
            excess = order.size - self.capacity
            if excess <= 0 or order.oldest is None:
                return
            # One at a time: removing a node may join others.
            node = order.oldest.node
            if excess < len(node.label):
                self.tree.cut(node, len(node.label) - ceil(excess))
                self._hold_upper(node)
            self._release(life, node)

    def _forget_some(self) -> None:
        """Let go of some nodes of what was forgotten."""
        for _ in range(_MOST_FORGOTTEN):
            if self._forgotten_below:
                self._forget_one_below()
            elif self._forgotten_lives:
                self._forget_one_of_a_life()
            else:
                return

    def _forget_one_below(self) -> None:
        life, levels, before = self._forgotten_below[0]
        node = next(levels[-1], None) if levels else None
        if node is None:
            levels[-1:] = []
            if not levels:
                self._forgotten_below.popleft()
            return
        self._forget(life, node, before, levels)

    def _forget(self, life: str, node: RadixNode, before: float, levels: list[Iterator[RadixNode]]) -> None:
        """Let go of a node that was not used since, and put its children on the list."""
        use = node.holders.get(life)
        if use is not None:
            levels.append(iter(tuple(node.children.values())))
            if use.used < before:
                self._release(life, node)

    def _forget_one_of_a_life(self) -> None:
        """Let go of one node of a replica that was forgotten, those below before those above."""
        life = self._forgotten_lives[0]
        oldest = self._orders[life].oldest
        if oldest is not None:
            self._release(life, oldest.node)
            return
        self._forgotten_lives.popleft()
        del self._orders[life]

    def _release(self, life: str, node: RadixNode) -> None:
        """Let go of a node, and remove it, and those above that wait for it, if nobody holds it."""
        self._orders[life].remove(node.holders.pop(life))
        self._orders[life].size -= len(node.label)
        while not node.holders and not node.children and node.parent is not None:
            parent = node.parent
            for other, use in self.tree.prune(node).items():
                self._orders[other].remove(use)
            node = parent
