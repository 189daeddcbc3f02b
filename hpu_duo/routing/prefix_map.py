"""Prefixes that replicas are taken to hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import ceil, inf

from hpu_duo.routing.radix_tree import RadixNode, RadixTree
from hpu_duo.routing.request import RoutedRequest

_Entry = tuple[float, int, int, RadixNode]

_MOST_REFRESHED, _MOST_SWEPT = 8, 64
"""Entries that one call puts back, and those of forgotten replicas that it looks at: a front process has
other things to do."""


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
        # Whoever holds a node is a replica in one of its lives, so that one can be forgotten at once.
        self._lives: dict[str, str] = {}
        self._replicas: dict[str, str] = {}
        self._forgotten: deque[str] = deque()
        self._num_lives = 0
        # Of each life (last use, -start, number, node): parents come behind their children. An entry is
        # out of date if the node was cut or is gone; one that was used since is put back when its turn comes.
        self._entries: dict[str, list[_Entry]] = {}
        self._num_current: dict[str, int] = {}
        self._num_entries = 0

    def size(self, replica: str) -> int:
        """Return the units that a replica is taken to hold."""
        return self._sizes.get(self._lives.get(replica, ""), 0)

    def held(self, request: RoutedRequest) -> dict[str, int]:
        """Return the leading units of a prompt that each replica is taken to hold, of those that hold any."""
        found: dict[str, int] = {}
        for node, num in self.tree.match(request.namespace, request.units):
            for life in node.holders:
                if life in self._replicas:
                    found[self._replicas[life]] = node.start + num
        return found

    def num_holders(self, node: RadixNode) -> int:
        """Return how many replicas are taken to hold a node."""
        return sum(life in self._replicas for life in node.holders)

    def add(self, replica: str, request: RoutedRequest, now: float) -> None:
        """Take a prompt for cached at a replica from now on."""
        self._sweep()
        life = self._life(replica)
        path, cut = self.tree.insert(request.namespace, request.units)
        for lower in cut:
            self._enlist_anew(lower)
            assert lower.parent is not None, "it is the lower half of another one"
            self._enlist_anew(lower.parent)
        for node in path:
            is_new = life not in node.holders
            node.holders[life] = max(now, node.holders.get(life, now))
            self._hit(node, now)
            if is_new:
                self._sizes[life] = self._sizes.get(life, 0) + len(node.label)
                self._num_current[life] = self._num_current.get(life, 0) + 1
                self._enlist(life, node)
        self._refresh(life)
        self._shrink(life)

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
                upper = self.tree.cut(node, num_kept - node.start)
                self._enlist_anew(upper)
                self._enlist_anew(node)
            self._forget_below(life, node, before)
            return

    def forget(self, replica: str) -> None:
        """Forget everything that a replica holds; its nodes are let go by and by."""
        life = self._lives.pop(replica, None)
        if life is not None:
            del self._replicas[life]
            self._forgotten.append(life)
            self._sweep()

    def least_used(self, replica: str, num_units: float) -> list[tuple[RadixNode, int]]:
        """Return what a replica would evict first: nodes, with the units of them that would go."""
        found, entries = [], []
        life = self._life(replica)
        for entry in self._in_order(life):
            if num_units <= 0:
                heappush(self._entries[life], entry)
                break
            entries.append(entry)
            num = int(min(num_units, len(entry[3].label)))
            found.append((entry[3], num))
            num_units -= num
        for entry in entries:
            heappush(self._entries[life], entry)
        return found

    def _life(self, replica: str) -> str:
        life = self._lives.get(replica)
        if life is None:
            self._num_lives += 1
            life = self._lives[replica] = f"{replica}#{self._num_lives}"
            self._replicas[life] = replica
        return life

    def _sweep(self) -> None:
        """Let go of some nodes of those who were forgotten, those below before those above."""
        for _ in range(_MOST_SWEPT):
            if not self._forgotten:
                return
            life = self._forgotten[0]
            if self._entries.get(life):
                entry = self._take(life)
                if entry is not None:
                    self._release(life, entry[3])
                    self._prune(entry[3])
                continue
            self._forgotten.popleft()
            for kept in (self._entries, self._sizes, self._num_current):
                kept.pop(life, None)

    def _hit(self, node: RadixNode, now: float) -> None:
        node.hits.append(now)
        while node.hits and node.hits[0] <= now - self._hits_s:
            node.hits.popleft()

    def _shrink(self, life: str) -> None:
        while (excess := self._sizes.get(life, 0) - self.capacity) > 0:
            # One at a time: removing a node may join others.
            node = next(self._in_order(life))[3]
            if excess < len(node.label):
                upper = self.tree.cut(node, len(node.label) - ceil(excess))
                self._enlist_anew(upper)
                self._enlist_anew(node)
            self._release(life, node)
            self._prune(node)

    def _forget_below(self, life: str, node: RadixNode, before: float) -> None:
        """Forget a node and those below it that were not used since."""
        old, stack = [], [node]
        while stack:
            each = stack.pop()
            # Who holds a node holds what is above it.
            if life in each.holders:
                stack += each.children.values()
                if each.holders[life] < before:
                    old.append(each)
        for each in old:
            self._release(life, each)
        for each in reversed(old):
            self._prune(each)

    def _release(self, life: str, node: RadixNode) -> None:
        del node.holders[life]
        self._sizes[life] -= len(node.label)
        self._num_current[life] = max(0, self._num_current.get(life, 0) - 1)

    def _prune(self, node: RadixNode) -> None:
        """Remove a node that nobody holds, unless it went with its parent."""
        if not node.holders and node.parent is not None:
            self.tree.prune(node)

    def _in_order(self, life: str) -> Iterator[_Entry]:
        """Take entries that are not out of date, the least recently used first."""
        entries = self._entries.get(life, [])
        taken: set[RadixNode] = set()  # one that was let go and taken up again has two entries
        while entries:
            entry = self._take(life)
            if entry is not None and entry[3] not in taken:
                taken.add(entry[3])
                yield entry

    def _take(self, life: str) -> _Entry | None:
        """Take the first entry; None if it was out of date."""
        entry = heappop(self._entries[life])
        if not _is_current(life, entry):
            return None
        used, minus_start, number, node = entry
        last = node.holders[life]
        if used < last:
            heappush(self._entries[life], (last, minus_start, number, node))
            return None
        return entry

    def _refresh(self, life: str) -> None:
        """Put back a few entries of what was used since, so that no call finds all of them at once."""
        entries = self._entries.get(life)
        for _ in range(_MOST_REFRESHED):
            if not entries or (
                _is_current(life, entries[0]) and entries[0][0] == entries[0][3].holders[life]
            ):
                return
            self._take(life)

    def _enlist_anew(self, node: RadixNode) -> None:
        for life in node.holders:
            self._enlist(life, node)

    def _enlist(self, life: str, node: RadixNode) -> None:
        self._num_entries += 1
        entries = self._entries.setdefault(life, [])
        heappush(entries, (node.holders[life], -node.start, self._num_entries, node))
        if len(entries) > 64 and len(entries) > 4 * self._num_current.get(life, 0):
            self._drop_old(life)

    def _drop_old(self, life: str) -> None:
        latest = {entry[3]: entry for entry in self._entries[life] if _is_current(life, entry)}
        entries = list(latest.values())
        heapify(entries)
        self._entries[life] = entries
        self._num_current[life] = len(entries)


def _is_current(life: str, entry: _Entry) -> bool:
    _, minus_start, _, node = entry
    return life in node.holders and node.start == -minus_start
