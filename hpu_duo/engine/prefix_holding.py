"""Decisions of the scheduler about prefixes that stay cached: who holds them, and whether they leave room."""

from __future__ import annotations

from collections.abc import Mapping

from hpu_duo.kv.leases import KVLeases
from hpu_duo.kv.prefix_tree import PrefixNode
from hpu_duo.prefix_hold import PrefixHold
from hpu_duo.request import Request


class PrefixHolding:
    """Opens holds of prefixes, and keeps them as long as their requests need them.

    All unfinished requests must fit beside what is held, each alone, so that none waits for a hold to end:
    a request that would not is refused, and so is a hold beside which one would not.

    Args:
        leases: with the prefix cache; without one nothing can be held.
        unfinished: requests by their names.
    """

    def __init__(self, leases: KVLeases, unfinished: Mapping[str, Request]) -> None:
        self._leases, self._unfinished, self._cache = leases, unfinished, leases.prefixes

    def enter(self, request: Request) -> None:
        """Let a request hold its context until it ends."""
        if request.context is not None:
            request.context.num_holders += 1

    def let_go(self, hold: PrefixHold) -> None:
        """Take one holder from a hold that was opened."""
        if self._cache is not None:
            self._cache.let_go(hold)

    def let_go_later(self, hold: PrefixHold) -> None:
        """The same before the next step, from any thread and at any moment."""
        if self._cache is not None:
            self._cache.holds.leave_later(hold)

    def leave(self, request: Request) -> None:
        """Let go what an ended request holds."""
        if request.context is not None:
            self.let_go(request.context)

    def sweep(self) -> None:
        """Let go what nobody can ask for any more."""
        if self._cache is not None:
            left = self._cache.holds.left
            for _ in range(len(left)):
                self._cache.let_go(left.popleft())

    def open(self, request: Request) -> None:
        """Hold the prompt of a running request, all of which is computed, if it asks for that."""
        hold = request.opens
        if hold is None or self._cache is None:
            return
        node = self._cache.end_of(request)
        assert node is not None, f"{request} has entered its prompt"
        assert node.depth == hold.num_blocks, f"{request} ends at a border of blocks"
        hold.refusal = self.refusal([*node.path][::-1], hold.num_blocks, request)
        if hold.refusal is None:
            self._cache.hold(hold, node)

    def open_cached(self, hold: PrefixHold) -> bool:
        """Hold a prefix if all of it is cached, and a request can go on behind it.

        Raises:
            ValueError: there is no room for it, or would be none if it were computed.
        """
        assert self._cache is not None, "see check_possible"
        path = self._cache.tree.match(hold.namespace, hold.tokens)
        if (reason := self.refusal(path, hold.num_blocks)) is not None:
            raise ValueError(reason)
        if len(path) < hold.num_blocks or (self._cache.needs_snapshots and path[-1].snapshot is None):
            return False
        self._cache.hold(hold, path[-1])
        return True

    def check_possible(self) -> None:
        """Raise ValueError if nothing can be held here, however much room there is."""
        if self._cache is None:
            raise ValueError(
                "expected a model with a prefix cache to hold a context in, got enable_prefix_caching=False"
            )
        if self._cache.needs_snapshots and not self._cache.num_snapshot_rows:
            raise ValueError(
                "expected num_prefix_snapshots of 1 or more to hold a context of a model with streaming "
                "heads or sliding windows, got 0"
            )

    def refusal(self, path: list[PrefixNode], num_blocks: int, but: Request | None = None) -> str | None:
        """Return the reason why a prefix cannot be held now; None if it can.

        Args:
            path: what the cache has of it.
            num_blocks: blocks of it.
            but: a request that is about to end.
        """
        assert self._cache is not None, "something is to be held"
        holds, leases = self._cache.holds, self._leases
        is_new = len(path) < num_blocks or not holds.ends_at(path[-1])
        if self._cache.needs_snapshots and is_new and holds.num_ends >= self._cache.num_snapshot_rows:
            return (
                f"expected a snapshot for a context, and others have all {self._cache.num_snapshot_rows}: "
                "close one, or load with a larger num_prefix_snapshots"
            )
        if not leases.uses_blocks:
            return None
        num_new = holds.num_new(path, num_blocks)
        room = leases.blocks.num_blocks - holds.num_nodes
        others = (each for each in self._unfinished.values() if each is not but)
        needed = max(map(leases.most_blocks, others), default=0)
        if num_new + needed > room:
            beside = f", beside a request that may need {needed} of its own" if needed else ""
            return (
                f"expected at most {room - needed} further blocks in contexts{beside}, got {num_new}: they "
                f"hold {holds.num_nodes} of {leases.blocks.num_blocks}; close one, or load with more blocks"
            )
        return None
