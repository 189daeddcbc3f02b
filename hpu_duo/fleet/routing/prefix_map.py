"""The assumed prefix caches of replicas."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, ValuesView
from itertools import chain, islice
from math import ceil, inf, nextafter
from typing import Any, Generic, TypeVar

import numpy as np

from hpu_duo.fleet.routing.router import RoutedRequest, Units

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_OF_ONE = 1024
"""Entries that a dictionary rehashes in some 50 microseconds when it grows; 100,000 need 3 ms."""
_NUM_PARTS = 256


class SpreadDict(MutableMapping[Key, Value], Generic[Key, Value]):
    """Entries in 256 dictionaries by their hash, each of which grows, and is copied, at another time."""

    __slots__ = ("_parts", "_shared")

    def __init__(self, entries: Mapping[Key, Value] = {}) -> None:
        self._parts: list[dict[Key, Value]] = [{} for _ in range(_NUM_PARTS)]
        self._shared: set[int] = set()  # parts that a snapshot reads, copied before they change
        self.update(entries)

    def __getitem__(self, key: Key) -> Value:
        return self._parts[hash(key) % _NUM_PARTS][key]

    def __setitem__(self, key: Key, value: Value) -> None:
        self._own(hash(key) % _NUM_PARTS)[key] = value

    def __delitem__(self, key: Key) -> None:
        del self._own(hash(key) % _NUM_PARTS)[key]

    def __iter__(self) -> Iterator[Key]:
        return chain.from_iterable(self._parts)

    def values(self) -> ValuesView[Value]:
        """Return a view of the values, which is read without a look-up of each."""
        return _Values(self)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __bool__(self) -> bool:
        return any(self._parts)

    def snapshot(self) -> Iterator[Value]:
        """Return the values as they are now, whatever changes before they are read; nothing is copied yet."""
        self._shared.update(range(_NUM_PARTS))
        return _read_and_freed(self._parts[::-1])

    def _own(self, index: int) -> dict[Key, Value]:
        if index in self._shared:
            self._shared.remove(index)
            self._parts[index] = self._parts[index].copy()
        return self._parts[index]


def _read_and_freed(parts: list[dict[Key, Value]]) -> Iterator[Value]:
    """Yield the values, those of the last part first; each part is freed behind its last value."""
    while parts:
        yield from parts.pop().values()


class _Values(ValuesView[Value]):
    """Values of a ``SpreadDict``."""

    def __init__(self, spread: SpreadDict[Any, Value]) -> None:
        super().__init__(spread)
        self._spread = spread

    def __iter__(self) -> Iterator[Value]:
        return chain.from_iterable(part.values() for part in self._spread._parts)


_MOST = 64
"""Groups, before neighbours are merged."""


class WindowSums(list[tuple[float, int, float]]):
    """Numbers with times, in groups of (time of the first one, how many, their sum), the earliest first.

    Each number has a group of its own until there are more than 64 groups; then neighbours are merged in
    pairs. So the time of a call is bounded, and small sets are exact.
    """

    __slots__ = ()

    def add(self, at: float, value: float = 0.0) -> None:
        """Add a number; times never go back."""
        self.append((at, 1, value))
        if len(self) > _MOST:
            pairs = zip(self[::2], self[1::2])
            last = self[-1:] if len(self) % 2 else []
            self[:] = [(first[0], first[1] + then[1], first[2] + then[2]) for first, then in pairs] + last

    def correct(self, at: float, by: float) -> bool:
        """Add to the group of a number; returns False if it was dropped."""
        index = bisect_right(self, (at, inf, inf)) - 1
        if index < 0:
            return False
        first, num, total = self[index]
        self[index] = (first, num, total + by)
        return True

    def drop(self, until: float) -> None:
        """Drop groups that begin at a time or earlier."""
        if self and self[0][0] <= until:
            del self[: bisect_right(self, (until, inf, inf))]

    def num(self, since: float = -inf) -> int:
        """Return how many numbers are in groups that begin after a time."""
        return sum(num for at, num, _ in self if at > since)

    def total(self) -> float:
        """Return the sum of all."""
        return sum(total for _, _, total in self)


class RadixNode:
    """Units that follow those of the parents: a prefix, up to its last unit.

    Attributes:
        parent: the prefix before it; None for the empty one.
        label: its units, at least one but at the root.
        start: units of the parents.
        children: by their first unit.
        holders: replicas assumed to cache it, with the last use there. A holder of a prefix holds all of its
            parents, and used those no earlier, except for prefixes being removed.
        hits: its uses of late, at any replica.
        first_tokens: recent times to the first token, if recorded.
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
        node: the held prefix.
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
        """Return the nodes of a prompt, each with the number of its matching units.

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
        """Insert a prompt; returns its nodes, and the lower halves of nodes that were split."""
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
            rest = units[node.end :].copy()  # a view would keep the whole prompt alive
            new = RadixNode(node, rest, node.end)
            if len(node.children) == MOST_OF_ONE and isinstance(node.children, dict):
                node.children = SpreadDict(node.children)
            node.children[int(rest[0])] = new
            path.append(new)
        return path, cut

    def cut(self, node: RadixNode, num: int) -> RadixNode:
        """Split a node after its first ``num`` units; it becomes the lower part.

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
        """Remove a node without holders, and merge its parent with a single child.

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
            # Merging costs time for each child, so some mergeable nodes are not merged.
            if child.holders.keys() == parent.holders.keys() and len(child.children) <= MOST_OF_ONE:
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
    """Merge a parent and its only child, with the parent's times; returns the child's uses."""
    parent.label = np.concatenate([parent.label, child.label])
    parent.children = child.children
    for each in parent.children.values():
        each.parent = parent
    uses = child.holders
    child.holders, child.children, child.parent = {}, {}, None
    return uses


class UseOrder:
    """Uses of one holder, the least recent one first. Every operation is O(1).

    Attributes:
        oldest, newest: the ends; None when there is no use.
        size: units of all nodes.
    """

    def __init__(self) -> None:
        self.oldest: Use | None = None
        self.newest: Use | None = None
        self.size = 0

    def __iter__(self) -> Iterator[Use]:
        use = self.oldest
        while use is not None:
            yield use
            use = use.newer

    def insert(self, new: Use, older: Use | None) -> None:
        """Insert a use after an older one, or before all others."""
        newer = self.oldest if older is None else older.newer
        new.older, new.newer = older, newer
        if older is None:
            self.oldest = new
        else:
            older.newer = new
        if newer is None:
            self.newest = new
        else:
            newer.older = new

    def remove(self, use: Use) -> None:
        """Remove a use."""
        if use.older is None:
            self.oldest = use.newer
        else:
            use.older.newer = use.newer
        if use.newer is None:
            self.newest = use.older
        else:
            use.newer.older = use.older
        use.older = use.newer = None

    def renew(self, use: Use, now: float) -> None:
        """Move a use to the most recent end."""
        use.used = max(now, use.used)
        if use.newer is not None:
            self.remove(use)
            self.insert(use, self.newest)


_MOST_FORGOTTEN = 32
"""Most nodes that one call evicts, and that it removes lazily, to bound its time."""

_MOST_WEIGHED = 16
"""Most nodes that are inspected to estimate evictions."""


class PrefixMap:
    """A router's belief about the prefix caches of its replicas.

    A prompt sent to a replica is assumed to be cached there, until ``capacity`` units are exceeded and the
    least recently used ones are evicted, or until the replica reports otherwise.

    Every call visits the nodes of one prompt, and 32 others at most of those that are evicted and of those
    that are forgotten. The rest is left to later calls: until then, nodes below a forgotten one count for
    ``size`` and for nothing else.

    Args:
        capacity: assumed units of a replica's cache; infinite = no evictions.
        hits_s: seconds for which uses of a prefix are remembered.

    Attributes:
        tree: all prefixes assumed to be cached anywhere.
    """

    def __init__(self, capacity: float = inf, hits_s: float = 0.0) -> None:
        if not capacity >= 0:
            raise ValueError(f"expected a capacity of 0 units or more, got {capacity}")
        self.tree, self.capacity, self._hits_s = RadixTree(), capacity, hits_s
        # Holders are generations of a replica, so that one can be dropped in O(1).
        self._lives: dict[str, str] = {}
        self._replicas: dict[str, str] = {}
        self._num_lives = 0
        self._orders: dict[str, UseOrder] = {}
        self._forgotten_lives: deque[str] = deque()
        self._latest = -inf  # when something was added last
        # (life, children still to be visited of each level, the time before which a use is forgotten)
        self._forgotten_below: deque[tuple[str, list[Iterator[RadixNode]], float]] = deque()

    def size(self, replica: str) -> int:
        """Return the units assumed to be cached at a replica."""
        life = self._lives.get(replica)
        return 0 if life is None else self._orders[life].size

    def held(self, request: RoutedRequest) -> dict[str, int]:
        """Return the leading units of a prompt assumed to be cached, by replica with any."""
        found: dict[str, int] = {}
        for node, num in self.tree.match(request.namespace, request.units):
            for life in node.holders:
                replica = self._replicas.get(life)
                if replica is not None and found.get(replica, 0) == node.start:
                    found[replica] = node.start + num
        return found

    def num_holders(self, node: RadixNode) -> int:
        """Return the number of holders of a node."""
        return sum(life in self._replicas for life in node.holders)

    def add(self, replica: str, request: RoutedRequest, now: float) -> None:
        """Assume a prompt to be cached at a replica from now on."""
        self._latest = max(self._latest, now)
        life = self._life(replica)
        order = self._orders[life]
        path, cut = self.tree.insert(request.namespace, request.units)
        for lower in cut:
            self._hold_upper(lower)
        for node in reversed(path):  # so parents follow their children in the order
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
        """Remove a replica from the nodes of a prompt after its first units, and from all their descendants.

        Args:
            num_kept: leading units that are still cached.
            before: nodes used there at this time or later are not removed.
        """
        life, before = self._life(replica), min(before, nextafter(self._latest, inf))
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
        """Drop a replica; its nodes are removed lazily."""
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
        """Copy the holders of the lower part of a split node to the upper one."""
        assert lower.parent is not None, "it is the lower part of another one"
        above = lower.parent.parent
        for life, use in lower.holders.items():
            if above is not None and above.parent is not None and life not in above.holders:
                continue  # it is being forgotten there: the lower part is still to be visited
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
        """Remove some nodes of dropped replicas."""
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
        """Remove a replica from a node that was not used since, and queue its children."""
        use = node.holders.get(life)
        if use is not None:
            children = node.children
            spread = children.snapshot() if isinstance(children, SpreadDict) else None
            levels.append(iter(tuple(children.values())) if spread is None else spread)
            if use.used < before:
                self._release(life, node)

    def _forget_one_of_a_life(self) -> None:
        """Remove a dropped replica from one node, children before parents."""
        life = self._forgotten_lives[0]
        oldest = self._orders[life].oldest
        if oldest is not None:
            self._release(life, oldest.node)
            return
        self._forgotten_lives.popleft()
        del self._orders[life]

    def _release(self, life: str, node: RadixNode) -> None:
        """Remove a holder from a node; without holders, remove the node, and pending parents."""
        self._orders[life].remove(node.holders.pop(life))
        self._orders[life].size -= len(node.label)
        while not node.holders and not node.children and node.parent is not None:
            parent = node.parent
            for other, use in self.tree.prune(node).items():
                self._orders[other].remove(use)
            node = parent
