"""Prefixes that replicas are taken to hold."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import ceil, inf

from hpu_duo.routing.radix_tree import RadixNode, RadixTree, below
from hpu_duo.routing.request import RoutedRequest

_Entry = tuple[float, int, int, RadixNode]


class PrefixMap:
    """A router's belief about the prefix caches of its replicas.

    A prompt that was sent to a replica is taken to be cached there, until ``capacity`` units are exceeded and
    the least recently used ones go, or until the replica says otherwise.

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
        self._sizes: dict[str, int] = {}
        # Of each replica (last use, -start, number, node): parents come behind their children. An entry is
        # out of date if the node was used since, was cut, or is gone.
        self._entries: dict[str, list[_Entry]] = {}
        self._num_current: dict[str, int] = {}
        self._num_entries = 0

    def size(self, replica: str) -> int:
        """Return the units that a replica is taken to hold."""
        return self._sizes.get(replica, 0)

    def held(self, request: RoutedRequest) -> dict[str, int]:
        """Return the leading units of a prompt that each replica is taken to hold, of those that hold any."""
        found: dict[str, int] = {}
        for node, num in self.tree.match(request.namespace, request.units):
            for replica in node.holders:
                found[replica] = node.start + num
        return found

    def add(self, replica: str, request: RoutedRequest, now: float) -> None:
        """Take a prompt for cached at a replica from now on."""
        path, cut = self.tree.insert(request.namespace, request.units)
        for lower in cut:
            self._enlist_anew(lower)
            assert lower.parent is not None, "it is the lower half of another one"
            self._enlist_anew(lower.parent)
        for node in path:
            if replica not in node.holders:
                self._sizes[replica] = self.size(replica) + len(node.label)
            node.holders[replica] = max(now, node.holders.get(replica, now))
            self._hit(node, now)
            self._enlist(replica, node)
        self._shrink(replica)

    def keep_only(self, replica: str, request: RoutedRequest, num_kept: int, before: float = inf) -> None:
        """Forget what a replica holds of a prompt behind its first units, and all that begins so.

        Args:
            num_kept: leading units that it still holds.
            before: what was used there at this time or later is kept.
        """
        for node, num in self.tree.match(request.namespace, request.units):
            if replica not in node.holders or node.start + num <= num_kept:
                continue
            if node.start < num_kept:
                upper = self.tree.cut(node, num_kept - node.start)
                self._enlist_anew(upper)
                self._enlist_anew(node)
            self._forget_below(replica, node, before)
            return

    def forget(self, replica: str) -> None:
        """Forget everything that a replica holds."""
        for child in [each for each in self.tree if each.start == 0]:
            self._forget_below(replica, child, inf)
        for kept in (self._entries, self._sizes, self._num_current):
            kept.pop(replica, None)

    def least_used(self, replica: str, num_units: float) -> list[tuple[RadixNode, int]]:
        """Return what a replica would evict first: nodes, with the units of them that would go."""
        found, entries = [], []
        for entry in self._in_order(replica):
            if num_units <= 0:
                heappush(self._entries[replica], entry)
                break
            entries.append(entry)
            num = int(min(num_units, len(entry[3].label)))
            found.append((entry[3], num))
            num_units -= num
        for entry in entries:
            heappush(self._entries[replica], entry)
        return found

    def _hit(self, node: RadixNode, now: float) -> None:
        node.hits.append(now)
        while node.hits and node.hits[0] <= now - self._hits_s:
            node.hits.popleft()

    def _shrink(self, replica: str) -> None:
        while (excess := self.size(replica) - self.capacity) > 0:
            # One at a time: removing a node may join others.
            node = next(self._in_order(replica))[3]
            if excess < len(node.label):
                upper = self.tree.cut(node, len(node.label) - ceil(excess))
                self._enlist_anew(upper)
                self._enlist_anew(node)
            self._release(replica, node)
            self._prune(node)

    def _forget_below(self, replica: str, node: RadixNode, before: float) -> None:
        """Forget a node and those below it that were not used since."""
        old = [each for each in below(node) if each.holders.get(replica, inf) < before]
        for each in old:
            self._release(replica, each)
        for each in reversed(old):
            self._prune(each)

    def _release(self, replica: str, node: RadixNode) -> None:
        del node.holders[replica]
        self._sizes[replica] -= len(node.label)

    def _prune(self, node: RadixNode) -> None:
        """Remove a node that nobody holds, unless it went with its parent."""
        if not node.holders and node.parent is not None:
            self.tree.prune(node)

    def _in_order(self, replica: str) -> Iterator[_Entry]:
        """Take entries that are not out of date, the least recently used first."""
        entries = self._entries.get(replica, [])
        taken: set[RadixNode] = set()  # one that was used twice at the same time has two entries
        while entries:
            entry = heappop(entries)
            if _is_current(replica, entry) and entry[3] not in taken:
                taken.add(entry[3])
                yield entry

    def _enlist_anew(self, node: RadixNode) -> None:
        for replica in node.holders:
            self._enlist(replica, node)

    def _enlist(self, replica: str, node: RadixNode) -> None:
        self._num_entries += 1
        entries = self._entries.setdefault(replica, [])
        heappush(entries, (node.holders[replica], -node.start, self._num_entries, node))
        if len(entries) > 64 and len(entries) > 4 * self._num_current.get(replica, 0):
            self._drop_old(replica)

    def _drop_old(self, replica: str) -> None:
        latest = {entry[3]: entry for entry in self._entries[replica] if _is_current(replica, entry)}
        entries = list(latest.values())
        heapify(entries)
        self._entries[replica] = entries
        self._num_current[replica] = len(entries)


def _is_current(replica: str, entry: _Entry) -> bool:
    used, minus_start, _, node = entry
    return node.holders.get(replica) == used and node.start == -minus_start
