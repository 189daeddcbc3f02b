"""The prefix cache: keys and values of computed prefixes, reused by later requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpu_duo.kv.copies import Copy, RowCopy
from hpu_duo.kv.holds import Adoption, PrefixHolds
from hpu_duo.kv.pool import BlockMove, BlockPool
from hpu_duo.kv.prefix_tree import NO_BLOCK, PrefixNode, PrefixTree
from hpu_duo.kv.snapshots import Snapshots
from hpu_duo.prefix_hold import PrefixHold
from hpu_duo.request import Request


@dataclass(frozen=True)
class PrefixHit:
    """Cached blocks that a request begins with.

    Attributes:
        path: the cached blocks that the request begins with, the first one first.
        num_usable: leading ones of them behind which a request can go on: all of them where no head keeps a
            ring, else those up to the last one with a snapshot.
    """

    path: tuple[PrefixNode, ...] = ()
    num_usable: int = 0

    @property
    def is_limited_by_snapshots(self) -> bool:
        """Whether some cached blocks lie behind the last snapshot, and so cannot be used."""
        return self.num_usable < len(self.path)


@dataclass
class PrefixCounters:
    """Totals of the prefix cache.

    Attributes:
        num_queried_tokens: known tokens of requests when they got a row.
        num_hit_tokens: those of them that were taken up from the cache.
        num_lost_to_snapshots: those that lay in cached blocks, but behind the last snapshot.
        num_lost_to_blocks: those that had been in cached blocks, which were evicted.
        num_evicted_blocks, num_evicted_snapshots: evicted to make room.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_lost_to_snapshots: int = 0
    num_lost_to_blocks: int = 0
    num_evicted_blocks: int = 0
    num_evicted_snapshots: int = 0


class EvictedPrefixes:
    """Remembers the last prefixes whose blocks were evicted.

    Only for counts: a prefix is known by ``PrefixNode.digest``, so two may be taken for one another.

    Args:
        capacity: prefixes that it remembers.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._digests: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, digest: int) -> None:
        """Remember a prefix that is evicted now, and forget the oldest one where there are too many."""
        self._digests.pop(digest, None)
        self._digests[digest] = None
        if len(self._digests) > self._capacity:
            del self._digests[next(iter(self._digests))]

    def discard(self, digest: int) -> None:
        """Forget a prefix that is cached again."""
        self._digests.pop(digest, None)

    def num_following(self, digest: int, keys: Iterable[bytes]) -> int:
        """Count the next blocks of a text that were evicted.

        Args:
            digest: of what is cached of the text.
            keys: of its blocks behind that.
        """
        number = 0
        for key in keys:
            digest = hash((digest, key))
            if digest not in self._digests:
                break
            number += 1
        return number


class PrefixCache:
    """Keeps full blocks of requests in a tree, and the rings behind some of them in snapshots.

    A block enters when a request has computed it, and stays, held by nobody, until its room is needed; the
    least recently used go first, the end of a text before its beginning. Requests hold the blocks of the tree
    that they begin with, so a block that is held is never evicted, and neither is one before it.

    A ring is known at the end of its text only. The scheduler has snapshots taken at borders of blocks.

    Copies into and out of snapshots are carried out in the order in which they are asked for, like all copies
    of the allocations, so a snapshot may be used as soon as it was asked for.

    Args:
        blocks: pool of the blocks.
        block_size: tokens of a block.
        snapshot_rows: numbers of the rows for snapshots; empty where no head keeps a ring.
        uses_blocks, uses_rows: whether any head keeps blocks, and a ring.
        prefix_grid: see ``StepLimits``. What a prompt has computed up to a multiple of it is kept then, and
            nothing else, since other requests that begin alike would compute it otherwise.
        add_copy: asks for a copy.
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
    ) -> None:
        self._blocks, self._block_size = blocks, block_size
        self._uses_blocks, self._uses_rows, self._grid = uses_blocks, uses_rows, prefix_grid
        self._add_copy = add_copy
        self._snapshot_rows = snapshot_rows
        self.tree = PrefixTree(block_size)
        self._snapshots = Snapshots(snapshot_rows)
        self.holds = PrefixHolds()
        self._node_of: dict[int, PrefixNode] = {}
        # The deepest node of each open request that has any, and that of its last snapshot of a decode.
        self._ends: dict[Request, PrefixNode] = {}
        self._decoded: dict[Request, PrefixNode] = {}
        self.counters = PrefixCounters()
        self._evicted = EvictedPrefixes(blocks.num_blocks if uses_blocks else 0)

    @property
    def num_blocks(self) -> int:
        """Blocks in the tree, held or idle."""
        return len(self.tree) if self._uses_blocks else 0

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots in use."""
        return self._snapshots.num_used

    @property
    def num_snapshot_rows(self) -> int:
        """Number of snapshots that fit."""
        return self._snapshots.num_rows

    @property
    def needs_snapshots(self) -> bool:
        """Whether a request can go on only behind a snapshot."""
        return self._uses_rows

    @property
    def has_free_row(self) -> bool:
        """Whether a further snapshot could be taken without giving up another one."""
        return self._snapshots.num_used < self._snapshots.num_rows

    @property
    def has_place(self) -> bool:
        """Whether a further snapshot could be taken."""
        return self._snapshots.has_place(self.holds.ends_at)

    def find(self, request: Request) -> PrefixHit:
        """Return what the cache has of a request; nothing changes."""
        most = request.num_reusable_tokens
        if self._grid:
            most = min(most, request.num_prefilled_tokens)
        path = self.tree.match(request.namespace, request.tokens[:most])
        usable = len(path)
        if self._uses_rows:
            usable = next((node.depth for node in reversed(path) if node.snapshot is not None), 0)
        return PrefixHit(tuple(path), usable)

    def num_held(self, hit: PrefixHit) -> int:
        """Usable blocks of a hit that other requests hold, which take nothing from the pool."""
        if not self._uses_blocks:
            return 0
        return sum(self._blocks.num_holders(node.block) > 0 for node in hit.path[: hit.num_usable])

    def take_up(self, request: Request, hit: PrefixHit) -> int:
        """Let a request that has a row and nothing else begin with a hit; returns its tokens.

        The caller enters the blocks that are returned by ``blocks_of`` in the request's table.
        """
        self.counters.num_queried_tokens += request.num_tokens
        self.counters.num_hit_tokens += hit.num_usable * self._block_size
        self.counters.num_lost_to_snapshots += (len(hit.path) - hit.num_usable) * self._block_size
        self.counters.num_lost_to_blocks += self._num_evicted_behind(request, hit) * self._block_size
        if hit.path:
            hit.path[-1].is_shared = True
        if not hit.num_usable:
            return 0
        end = hit.path[hit.num_usable - 1]
        if self._uses_blocks:
            self._blocks.share(self.blocks_of(hit))
        if self._uses_rows:
            assert end.snapshot is not None, f"no snapshot behind {end.depth} blocks"
            self._add_copy(RowCopy(end.snapshot, request.row))
        end.is_shared = True
        self.tree.use(end)
        self._ends[request] = end
        return hit.num_usable * self._block_size

    def _num_evicted_behind(self, request: Request, hit: PrefixHit) -> int:
        """Count the next blocks of a request that were cached once and had to go."""
        node = hit.path[-1] if hit.path else self.tree.root(request.namespace)
        ordinals = range(node.depth, request.num_reusable_tokens // self._block_size)
        return self._evicted.num_following(
            node.digest, (self.tree.key(request.tokens, ordinal) for ordinal in ordinals)
        )

    def blocks_of(self, hit: PrefixHit) -> list[int]:
        """Return the usable blocks of a hit."""
        return [node.block for node in hit.path[: hit.num_usable]] if self._uses_blocks else []

    def store(self, request: Request) -> None:
        """Enter the blocks that a request has filled since the last time.

        A block that another request has entered meanwhile replaces the request's own in its table. To be
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
            elif self._uses_blocks:
                self._swap(request, ordinal, child.block)
            node = child
        self.tree.use(node)
        self._ends[request] = node
        return node

    def _num_entered(self, request: Request) -> int:
        """Leading tokens that other requests with the same beginning compute alike."""
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
        """Keep the ring of a request for the last border of blocks that it has passed.

        Its ring must still be the one at that border when the next copies are carried out: it ends there, or
        a decode has just passed it.

        Args:
            decodes: it takes the place of the last one with ``decodes``, unless another text begins there.
        """
        if not self._snapshots.num_rows or request.num_computed_tokens < self._block_size:
            return
        if self._grid and self._num_entered(request) < request.num_computed_tokens:
            return  # what is kept here is kept of no other text
        node = self._store(request)
        if node.snapshot is None:
            if decodes:
                self._supersede(request, node)
            lost = self._snapshots.place(node, self.tree, self.holds.ends_at)
            if node.snapshot is not None:
                self._add_copy(RowCopy(request.row, node.snapshot))
            self._count_lost(lost)

    def _count_lost(self, lost: PrefixNode | None) -> None:
        if lost is not None:
            self.counters.num_evicted_snapshots += 1
            self._prune(lost)

    def _supersede(self, request: Request, node: PrefixNode) -> None:
        """Take the row from the last snapshot of a decode, for one that is further on in the same text."""
        last = self._decoded.get(request)
        self._decoded[request] = node
        if last is not None and not last.is_shared and not self.holds.ends_at(last):
            self._snapshots.remove(last)

    def hold(self, hold: PrefixHold, node: PrefixNode) -> None:
        """Keep a prefix until it is let go, behind which a request can go on."""
        assert node.snapshot is not None or not self._uses_rows, f"no snapshot behind {node.depth} blocks"
        if self._uses_blocks:
            self._blocks.share([each.block for each in node.path])
        self.holds.add(hold, node)
        self.tree.use(node)

    def let_go(self, hold: PrefixHold) -> None:
        """Take one holder from a hold; a prefix without holders may be evicted again."""
        hold.num_holders -= 1
        if not hold.num_holders and hold.is_there:
            self._remove_hold(hold)

    def adopt(self, hold: PrefixHold, path: list[PrefixNode], blocks: list[int]) -> Adoption:
        """Enter the rest of a prefix whose content comes from elsewhere, and hold all of it.

        Nobody may look for it before its units are written.

        Args:
            path: what is cached of it.
            blocks: allocated to the caller, for the others.
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
        """Take a prefix back whose units could not be written."""
        end = adopted.hold.node
        assert end is not None, "what was adopted is held"
        self.let_go(adopted.hold)
        if adopted.row is not None:
            self._snapshots.remove(end)
        for node in reversed(adopted.new):
            self._remove(node)

    def _remove_hold(self, hold: PrefixHold) -> None:
        node = self.holds.remove(hold)
        if self._uses_blocks:
            self._blocks.release([each.block for each in node.path])
        self.tree.use(node)
        self._prune(node)

    def end_of(self, request: Request) -> PrefixNode | None:
        """Return the deepest prefix that an open request has entered or taken up."""
        return self._ends.get(request)

    def release(self, request: Request) -> None:
        """Forget a request that gives its row and blocks back; what it entered stays."""
        end = self._ends.pop(request, None)
        self._decoded.pop(request, None)
        if end is not None:
            self.tree.use(end)
            self._prune(end)

    def evict(self, count: int) -> None:
        """Free ``count`` idle blocks, the least recently used first.

        Raises:
            ValueError: there are fewer.
        """
        if count > self._blocks.num_idle:
            raise ValueError(f"asked to evict {count} blocks, {self._blocks.num_idle} are idle")
        for _ in range(count):
            node = self.tree.least_used(lambda each: self._blocks.is_idle(each.block))
            assert node is not None, "an idle block is not at the end of any text"
            self._evicted.add(node.digest)
            self._remove(node)
            self.counters.num_evicted_blocks += 1

    def exchange(self, move: BlockMove) -> None:
        """Take note that two blocks have changed their numbers."""
        one, other = (self._node_of.pop(block, None) for block in (move.src, move.dst))
        for node, block in ((one, move.dst), (other, move.src)):
            if node is not None:
                node.block = block
                self._node_of[block] = node

    def clear(self) -> None:
        """Forget everything, what is held too; open requests keep their blocks, and enter them again."""
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

    def _remove(self, node: PrefixNode) -> None:
        self._snapshots.remove(node)
        self.tree.remove(node)
        if self._uses_blocks:
            del self._node_of[node.block]
            self._blocks.drop(node.block)

    def _prune(self, node: PrefixNode) -> None:
        """Remove a prefix without blocks that leads to no snapshot."""
        if self._uses_blocks:
            return
        in_use = set(self._ends.values())
        while node.parent is not None and not node.children and node.snapshot is None and node not in in_use:
            parent = node.parent
            self.tree.remove(node)
            node = parent
