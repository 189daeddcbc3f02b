"""The prefix cache: keys and values of computed prefixes, reused by later requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpu_duo.kv.pool import BlockCopy, BlockMove, BlockPool, Copy, RowCopy
from hpu_duo.kv.prefix_tree import NO_BLOCK, Adoption, PrefixHolds, PrefixNode, PrefixTree, digest_of
from hpu_duo.kv.snapshots import Snapshots
from hpu_duo.kv.tiers.loads import Piece
from hpu_duo.kv.tiers.policy import WritePolicy
from hpu_duo.kv.tiers.prefix_tiers import PrefixTiers
from hpu_duo.request import PrefixHold, Request


@dataclass(frozen=True)
class PrefixHit:
    """Cached blocks that a request begins with.

    Attributes:
        path: the cached blocks that the request begins with, the first one first.
        num_usable: leading ones of them from which a request can continue: all of them if no head has a ring,
            else those up to the last one with a snapshot.
        partial: the partial block with a snapshot after them, from the middle of which it can continue.
    """

    path: tuple[PrefixNode, ...] = ()
    num_usable: int = 0
    partial: PrefixNode | None = None

    @property
    def end(self) -> PrefixNode | None:
        """The prefix that a request continues from."""
        if self.partial is not None:
            return self.partial
        return self.path[self.num_usable - 1] if self.num_usable else None


@dataclass
class PrefixCounters:
    """Totals of the prefix cache.

    Attributes:
        num_queried_tokens: known tokens of requests when admitted.
        num_hit_tokens: those of them that hit the cache.
        num_lost_to_snapshots: those in cached blocks after the last snapshot.
        num_lost_to_blocks: those in blocks that were cached and evicted.
        num_evicted_blocks, num_evicted_snapshots: evicted to make room.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_lost_to_snapshots: int = 0
    num_lost_to_blocks: int = 0
    num_evicted_blocks: int = 0
    num_evicted_snapshots: int = 0


class EvictedPrefixes:
    """A bounded record of the last evicted prefixes.

    Prefixes are compared by ``PrefixNode.digest``.

    Args:
        capacity: number of prefixes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._digests: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, digest: bytes) -> None:
        """Add an evicted prefix, and drop the oldest one beyond the capacity."""
        self._digests.pop(digest, None)
        self._digests[digest] = None
        if len(self._digests) > self._capacity:
            del self._digests[next(iter(self._digests))]

    def discard(self, digest: bytes) -> None:
        """Remove a prefix that is cached again."""
        self._digests.pop(digest, None)

    def num_following(self, digest: bytes, keys: Iterable[bytes]) -> int:
        """Return how many of a text's next blocks were evicted.

        Args:
            digest: of the cached prefix of the text.
            keys: of its further blocks.
        """
        number = 0
        for key in keys:
            digest = digest_of(digest, key)
            if digest not in self._digests:
                break
            number += 1
        return number


class PrefixCache:
    """A tree of blocks of requests, and snapshots of their rows at some of them.

    A block is cached when a request has filled it, and stays until its memory is needed; the least recently
    used are evicted first, the end of a text before its beginning. Requests have references to the blocks of
    the tree that they begin with; a block with references is never evicted, and neither is one before it.

    A ring has the state at the end of its text only. The scheduler requests snapshots at block borders, and
    where a text ends. An end within a block is cached as a partial block, as long as it has a snapshot.

    Copies into and out of snapshots are executed in the order of requests, like all copies of the
    allocations, so a snapshot may be used as soon as it is requested.

    Args:
        blocks: pool of the blocks.
        block_size: tokens of a block.
        snapshot_rows: ids of the rows for snapshots; empty if no head has a ring.
        uses_blocks, uses_rows: whether any head stores blocks, and a ring.
        prefix_grid: see ``StepLimits``. With a grid, only what a prompt has computed up to a multiple of it
            is cached, since other requests with the same prefix would compute the rest differently.
        last_chunk: see ``StepLimits``. A request takes up one block less than there are if fewer tokens of
            its prompt would be left.
        add_copy: requests a copy.

    Attributes:
        tiers: what is evicted goes there; None = it is lost.
    """

    def __init__(
        self,
        blocks: BlockPool,
        block_size: int,
        snapshot_rows: range,
        *,
        uses_blocks: bool,
        uses_rows: bool,
        add_copy: Callable[[Copy], None],
        prefix_grid: int = 0,
        last_chunk: int = 0,
    ) -> None:
        self._blocks, self._block_size, self._last_chunk = blocks, block_size, last_chunk
        self._uses_blocks, self._uses_rows, self._grid = uses_blocks, uses_rows, prefix_grid
        self._add_copy = add_copy
        self._snapshot_rows = snapshot_rows
        self.tree = PrefixTree(block_size)
        self._snapshots = Snapshots(snapshot_rows)
        self.holds = PrefixHolds()
        self._node_of: dict[int, PrefixNode] = {}
        # By open request: its deepest node, and the node of its last snapshot of a decode.
        self._ends: dict[Request, PrefixNode] = {}
        self._decoded: dict[Request, PrefixNode] = {}
        self.counters = PrefixCounters()
        self._evicted = EvictedPrefixes(blocks.num_blocks if uses_blocks else 0)
        self.tiers: PrefixTiers | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the tree, used or idle."""
        return len(self.tree) if self._uses_blocks else 0

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots in use."""
        return self._snapshots.num_used

    @property
    def num_snapshot_rows(self) -> int:
        """Number of rows for snapshots."""
        return self._snapshots.num_rows

    @property
    def needs_snapshots(self) -> bool:
        """Whether a request can continue only from a snapshot."""
        return self._uses_rows

    @property
    def has_free_row(self) -> bool:
        """Whether a snapshot row is free."""
        return self._snapshots.num_used < self._snapshots.num_rows

    @property
    def has_place(self) -> bool:
        """Whether a snapshot row is free or can be evicted."""
        return self._snapshots.has_place(self.holds.ends_at)

    def find(self, request: Request) -> PrefixHit:
        """Return the cached blocks of a request; nothing changes."""
        tokens = request.tokens[: self.num_reusable(request)]
        path = self.tree.match(request.namespace, tokens)
        if not self._uses_rows:
            return PrefixHit(tuple(path), len(path))
        for node in reversed(path):
            partial = self.tree.match_partial(node, tokens) if node.partial_children else None
            if partial is not None or node.snapshot is not None:
                return PrefixHit(tuple(path), node.depth, partial)
        return PrefixHit(tuple(path))

    def num_reusable(self, request: Request) -> int:
        """Return the leading tokens of a request that may hit the cache."""
        most, num_prefilled = request.num_reusable_tokens, request.num_prefilled_tokens
        if not self._grid:
            return most
        most = min(most, num_prefilled) // self._block_size * self._block_size
        return most if most == num_prefilled else min(most, max(0, num_prefilled - self._last_chunk))

    def fetches(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a waiting request should wait for more of its prefix from a tier; begins to load it."""
        if self.tiers is None:
            return False
        most = self.num_reusable(request)
        return self.tiers.fetches(request, self.num_tokens(hit), hit.path, most, self.tree)

    def num_tokens(self, hit: PrefixHit) -> int:
        """Return the tokens of a hit that a request does not compute."""
        in_part = 0 if hit.partial is None else hit.partial.num_own_tokens
        return hit.num_usable * self._block_size + in_part

    def num_held(self, hit: PrefixHit) -> int:
        """Number of usable blocks of a hit that other requests use, which cost nothing of the pool."""
        if not self._uses_blocks:
            return 0
        return sum(self._blocks.num_holders(node.block) > 0 for node in hit.path[: hit.num_usable])

    def take_up(self, request: Request, hit: PrefixHit) -> int:
        """Begin a request, which has only a row, with a hit; returns the number of its tokens.

        The caller stores the blocks of ``blocks_of`` in the request's table, and a copy of a partial one.
        """
        num_tokens, end = self.num_tokens(hit), hit.end
        self.counters.num_queried_tokens += request.num_tokens
        self.counters.num_hit_tokens += num_tokens
        self.counters.num_lost_to_snapshots += max(0, len(hit.path) * self._block_size - num_tokens)
        self.counters.num_lost_to_blocks += self._num_evicted_behind(request, hit) * self._block_size
        if hit.path:
            hit.path[-1].is_shared = True
        self._write(hit.path, WritePolicy.WRITE_THROUGH_SELECTIVE)
        if end is None:
            return 0
        if self._uses_blocks:
            self._blocks.share(self.blocks_of(hit))
        if self._uses_rows:
            assert end.snapshot is not None, f"no snapshot behind {end.depth} blocks"
            self._add_copy(RowCopy(end.snapshot, request.row))
        # One that goes on where another text ended is the same conversation, as a rule.
        end.is_shared |= hit.partial is None
        self.tree.use(end)
        self._ends[request] = hit.path[hit.num_usable - 1]
        return num_tokens

    def _num_evicted_behind(self, request: Request, hit: PrefixHit) -> int:
        """Return how many of a request's next blocks were cached and evicted."""
        node = hit.path[-1] if hit.path else self.tree.root(request.namespace)
        ordinals = range(node.depth, request.num_reusable_tokens // self._block_size)
        return self._evicted.num_following(
            node.digest, (self.tree.key(request.tokens, ordinal) for ordinal in ordinals)
        )

    def blocks_of(self, hit: PrefixHit) -> list[int]:
        """Return the ids of the usable blocks of a hit."""
        return [node.block for node in hit.path[: hit.num_usable]] if self._uses_blocks else []

    def store(self, request: Request) -> None:
        """Cache the blocks that a request has filled since the last call.

        A block that another request has cached meanwhile replaces the request's own in its table. To be
        called between steps.
        """
        num_blocks = 0 if (end := self._ends.get(request)) is None else end.depth
        if self._uses_blocks and request.num_computed_tokens >= (num_blocks + 1) * self._block_size:
            self._store(request)

    def _store(self, request: Request) -> PrefixNode:
        node = self._ends.get(request) or self.tree.root(request.namespace)
        num_full = self._num_entered(request) // self._block_size
        if node.depth >= num_full:
            return node
        for ordinal in range(node.depth, num_full):
            key = self.tree.key(request.tokens, ordinal)
            child = node.children.get(key)
            if child is None:
                child = self.tree.add(node, key, self._kept(request, ordinal))
                self._evicted.discard(child.digest)
                self._node_of[child.block] = child
                self._write((child,), WritePolicy.WRITE_THROUGH)
            elif self._uses_blocks:
                self._swap(request, ordinal, child.block)
            node = child
        self.tree.use(node)
        self._ends[request] = node
        return node

    def _num_entered(self, request: Request) -> int:
        """Return the leading tokens that other requests with the same prefix compute equally."""
        if not self._grid:
            return request.num_computed_tokens
        return min(request.num_computed_tokens, request.num_prefilled_tokens) // self._grid * self._grid

    def _kept(self, request: Request, ordinal: int) -> int:
        if not self._uses_blocks:
            return NO_BLOCK
        block = int(request.block_table[ordinal])
        self._blocks.keep(block)
        return block

    def _swap(self, request: Request, ordinal: int, block: int) -> None:
        own = int(request.block_table[ordinal])
        if own != block:
            self._blocks.share([block])
            self._blocks.release([own])
            request.block_table[ordinal] = block

    def take_snapshot(self, request: Request, *, decodes: bool = False) -> None:
        """Store a snapshot of a request's ring at the last block border that it has passed.

        Its ring must still have the state of that border when the next copies are executed: the request ends
        there, or a decode has just passed it.

        Args:
            decodes: it replaces the last one with ``decodes``, unless another text branches there.
        """
        if not self._snapshots.num_rows or request.num_computed_tokens < self._block_size:
            return
        if self._grid and self._num_entered(request) < request.num_computed_tokens:
            return  # this snapshot replaces no other one
        node = self._store(request)
        if node.snapshot is None:
            if decodes:
                self._supersede(request, node)
            lost = self._place(node)
            if node.snapshot is not None:
                self._add_copy(RowCopy(request.row, node.snapshot))
            self._count_lost(lost)
            self._write((node,), WritePolicy.WRITE_THROUGH)

    def keep_end(self, request: Request, *, is_preempted: bool = False) -> None:
        """Cache a request up to its last token before its release; with rings a partial block, too.

        Its blocks and its ring must have the state of that token.

        Args:
            is_preempted: cache no partial block, which would be the first to be evicted for the blocks that
                others need, and the last border's snapshot, which it replaces, with it.
        """
        num_own = request.num_computed_tokens % self._block_size
        if not num_own:
            self.take_snapshot(request)
        elif not is_preempted and self._can_keep_partial and request.num_computed_tokens > self._block_size:
            self._keep_partial(request, self._store(request), num_own)
        self.store(request)

    @property
    def _can_keep_partial(self) -> bool:
        return self._uses_rows and not self._grid and self.has_place

    def _keep_partial(self, request: Request, node: PrefixNode, num_own: int) -> None:
        begin = node.depth * self._block_size
        key = request.tokens[begin : begin + num_own].tobytes()
        end = node.children.get(key)
        if end is not None and end.snapshot is not None:
            self.tree.use(end)
            return
        if end is None:
            end = self.tree.add(node, key, self._kept(request, node.depth))
            self._node_of[end.block] = end
        self._supersede(request, end)
        lost = self._place(end)
        assert end.snapshot is not None, "there was a place"
        self._add_copy(RowCopy(request.row, end.snapshot))
        self._count_lost(lost)
        self._write((end,), WritePolicy.WRITE_THROUGH)

    def _place(self, node: PrefixNode) -> PrefixNode | None:
        """Allocate a snapshot row to a prefix; returns the prefix that has lost it, whose row is stored."""
        lost = self._snapshots.place(node, self.tree, self.holds.ends_at)
        if lost is not None and self.tiers is not None:
            assert node.snapshot is not None, "expected the row of the other"
            self.tiers.leave_row(lost, node.snapshot)
            if self._uses_blocks and self.tree.is_partial(lost):
                self.tiers.leave(lost)
        return lost

    def _write(self, nodes: Iterable[PrefixNode], policy: WritePolicy) -> None:
        if self.tiers is not None:
            self.tiers.write_through(nodes, policy)

    def restore(self, piece: Piece, allocate: Callable[[], int | None]) -> PrefixNode | None:
        """Bring a record that has landed in a unit into the tree, unless it is there.

        Args:
            allocate: allocates a block; None if none is free or idle.

        Returns:
            The prefix that it ends; None, and nothing has changed, if there is no room for it, or the prefix
            before it has been evicted meanwhile.
        """
        load, unit = piece.load, piece.unit
        assert unit is not None, "expected a record that has landed"
        namespace, tokens = load.request.namespace, load.request.tokens
        node: PrefixNode | None = load.node if load.node.parent is not None else self.tree.root(namespace)
        if load.node.parent is not None and not self.tree.holds(load.node):
            return None
        size = self._block_size
        for begin in range(load.node.depth * size, piece.end, size):
            assert node is not None, "expected a prefix"
            node = self._restored(
                node, tokens[begin : min(begin + size, piece.end)].tobytes(), unit, allocate
            )
            if node is None:
                return None
        assert node is not None, "expected a prefix"
        if piece.is_row and node.snapshot is None:
            lost = self._place(node)
            if node.snapshot is None:
                if self._uses_blocks and self.tree.is_partial(node):
                    self._remove(node)
                self._prune(node)
                return None
            self._add_copy(RowCopy(unit, node.snapshot))
            self._count_lost(lost)
        node.is_shared = True
        return node

    def _restored(
        self, node: PrefixNode, key: bytes, unit: int, allocate: Callable[[], int | None]
    ) -> PrefixNode | None:
        """Return the prefix that is one block longer, which is added with a copy of a unit if it is new."""
        if (child := node.children.get(key)) is not None:
            self.tree.use(child)
            return child
        if not self._uses_blocks:
            return self.tree.add(node, key, NO_BLOCK)
        # All of it: it is not evicted for the other, and no block before its last one counts as idle.
        held = [] if self._blocks.num_free else [each.block for each in node.path]
        self._blocks.share(held)
        block = allocate()
        self._blocks.release(held)
        if block is None:
            return None
        child = self.tree.add(node, key, block)
        self._evicted.discard(child.digest)
        self._node_of[block] = child
        self._blocks.keep(block)
        self._blocks.release([block])
        self._add_copy(BlockCopy(unit, block))
        return child

    def _count_lost(self, lost: PrefixNode | None) -> None:
        if lost is None:
            return
        self.counters.num_evicted_snapshots += 1
        if self._uses_blocks and self.tree.is_partial(lost):
            self._remove(lost)  # without a snapshot nobody can continue from it
        self._prune(lost)

    def _supersede(self, request: Request, node: PrefixNode) -> None:
        """Free the row of the last snapshot of a decode, for a later one of the same text."""
        last = self._decoded.get(request)
        self._decoded[request] = node
        if last is not None and not last.is_shared and not self.holds.ends_at(last):
            self._snapshots.remove(last)

    def hold(self, hold: PrefixHold, node: PrefixNode) -> None:
        """Pin a prefix, from which a request can continue, until it is released."""
        assert node.snapshot is not None or not self._uses_rows, f"no snapshot behind {node.depth} blocks"
        if self._uses_blocks:
            self._blocks.share([each.block for each in node.path])
        self.holds.add(hold, node)
        self.tree.use(node)

    def let_go(self, hold: PrefixHold) -> None:
        """Release one reference of a hold; a prefix without references may be evicted again."""
        hold.num_holders -= 1
        if not hold.num_holders and hold.is_there:
            self._remove_hold(hold)

    def release_idle(self) -> None:
        """Release pinned prefixes that nobody uses; their owners pin them again."""
        for hold in self.holds.idle:
            self._remove_hold(hold)

    def adopt(self, hold: PrefixHold, path: list[PrefixNode], blocks: list[int]) -> Adoption:
        """Cache the rest of a prefix, whose content the caller writes, and pin all of it.

        No lookup may happen before its units are written.

        Args:
            path: its cached nodes.
            blocks: allocated by the caller, for the others.
        """
        node, new = path[-1] if path else self.tree.root(hold.namespace), list[PrefixNode]()
        for ordinal in range(len(path), hold.num_blocks):
            block = blocks[ordinal - len(path)] if self._uses_blocks else NO_BLOCK
            node = self.tree.add(node, self.tree.key(hold.tokens, ordinal), block)
            new.append(node)
            if self._uses_blocks:
                self._node_of[block] = node
                self._blocks.keep(block)
        row = None
        if self._uses_rows and node.snapshot is None:
            lost = self._snapshots.place(node, self.tree, self.holds.ends_at)
            row = node.snapshot
            self._count_lost(lost)
        self.hold(hold, node)
        return Adoption(hold, new, len(path), blocks, row)

    def withdraw(self, adopted: Adoption) -> None:
        """Remove a prefix with units that could not be written."""
        end = adopted.hold.node
        assert end is not None, "expected an adopted prefix"
        self.let_go(adopted.hold)
        if adopted.row is not None:
            self._snapshots.remove(end)
        for node in reversed(adopted.new):
            end = node.parent
            self._remove(node)
        assert end is not None, "expected a root"
        self._prune(end)

    def _remove_hold(self, hold: PrefixHold) -> None:
        node = self.holds.remove(hold)
        if self._uses_blocks:
            self._blocks.release([each.block for each in node.path])
        self.tree.use(node)
        self._prune(node)

    def end_of(self, request: Request) -> PrefixNode | None:
        """Return the deepest prefix that an open request has cached or reused."""
        return self._ends.get(request)

    def release(self, request: Request) -> None:
        """Remove a request, whose row and blocks are freed; what it cached stays."""
        end = self._ends.pop(request, None)
        self._decoded.pop(request, None)
        if end is not None:
            self.tree.use(end)
            self._prune(end)

    def evict(self, count: int, *, is_stored: bool = True) -> None:
        """Evict ``count`` idle blocks, the least recently used first.

        Args:
            is_stored: store them in a tier, if there is one, with the copies of the next step.

        Raises:
            ValueError: there are fewer.
        """
        if count > self._blocks.num_idle:
            raise ValueError(f"expected {count} idle blocks to evict, got {self._blocks.num_idle}")
        for _ in range(count):
            node = self.tree.least_used(lambda each: self._blocks.is_idle(each.block))
            assert node is not None, "expected an idle block at the end of a text"
            self._evicted.add(node.digest)
            if is_stored and self.tiers is not None:
                self.tiers.leave(node)
            self._remove(node)
            self.counters.num_evicted_blocks += 1

    def exchange(self, move: BlockMove) -> None:
        """Renumber two blocks."""
        one, other = self._node_of.pop(move.src, None), self._node_of.pop(move.dst, None)
        for node, block in ((one, move.dst), (other, move.src)):
            if node is not None:
                node.block = block
                self._node_of[block] = node

    def clear(self) -> None:
        """Clear the cache, pinned prefixes included; open requests keep their blocks."""
        for hold in self.holds:
            self._remove_hold(hold)
        for node in list(self.tree):
            if self._uses_blocks:
                self._blocks.drop(node.block)
        self.tree = PrefixTree(self._block_size)
        self._snapshots = Snapshots(self._snapshot_rows)
        self._node_of.clear()
        self._ends.clear()
        self._decoded.clear()
        if self.tiers is not None:
            self.tiers.forget()

    def _remove(self, node: PrefixNode) -> None:
        self._snapshots.remove(node)
        self.tree.remove(node)
        if self._uses_blocks:
            del self._node_of[node.block]
            self._blocks.drop(node.block)

    def _prune(self, node: PrefixNode) -> None:
        """Remove a prefix without blocks that has no snapshot in its subtree."""
        if self._uses_blocks:
            return
        in_use = set(self._ends.values())
        while node.parent is not None and not node.children and node.snapshot is None and node not in in_use:
            parent = node.parent
            self.tree.remove(node)
            node = parent
