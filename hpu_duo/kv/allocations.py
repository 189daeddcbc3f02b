"""Allocates blocks and rows to requests, and collects the copies that allocations require."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphs import StepLimits
from hpu_duo.kv.host_blocks import HostBlocks
from hpu_duo.kv.pool import BlockCopy, BlockMove, BlockPool, BlockSwap, Copy, RowCopy, RowPool
from hpu_duo.kv.prefix import PrefixCache, PrefixHit
from hpu_duo.kv.prefix_tree import Adoption, PrefixNode
from hpu_duo.kv.tiers.loads import Piece
from hpu_duo.kv.tiers.prefix_tiers import PrefixTiers
from hpu_duo.request import NO_REGION, NO_ROW, PrefixHold, Request


def block_moves(max_num_batched_tokens: int, block_size: int) -> int:
    """Return how many blocks may move before a step: as many as a step fills."""
    return -(-max_num_batched_tokens // block_size)


class KVAllocations:
    """Owns all pools; the only writer of a request's ``row``, ``region``, ``block_table`` and ``num_blocks``.

    Copies are collected in one list, in the order in which the allocations changed. Executed one after the
    other before the next step writes anything, they are correct even if a source or a destination has been
    released and allocated again meanwhile: the later allocation is also filled later.

    Args:
        num_blocks: blocks that can be allocated.
        block_size: tokens per block.
        num_rows: ring rows that can be allocated.
        uses_blocks: False for a model without retrieval heads: blocks are then neither needed nor counted.
        caches_prefixes: cache full blocks for later requests; see ``PrefixCache``.
        uses_rows: whether rows have any state, rings for instance, so that prefixes need snapshots.
        num_snapshots: rows for snapshots, numbered after the others.
        num_staged_blocks, num_staged_rows: the last ones of both, which are reserved for transfers.
        max_block_moves: most used blocks that are moved below idle ones before a step.
        prefix_grid, last_chunk, num_regions, can_rewind: see ``StepLimits``.

    Attributes:
        staged_units: ids of the reserved blocks, and rows.
        tiers: what the prefix cache evicts goes there; None = it is lost.
        host: leading blocks of requests in host memory; None = requests have none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        *,
        uses_blocks: bool = True,
        caches_prefixes: bool = False,
        uses_rows: bool = True,
        num_snapshots: int = 0,
        num_staged_blocks: int = 0,
        num_staged_rows: int = 0,
        max_block_moves: int = 0,
        prefix_grid: int = 0,
        last_chunk: int = 0,
        num_regions: int = 0,
        can_rewind: bool = True,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be 1 or more, got {block_size}")
        self.block_size = block_size
        self.uses_blocks = uses_blocks
        self.blocks = BlockPool(num_blocks - num_staged_blocks)
        end = num_rows + num_snapshots
        self.staged_units = (
            range(num_blocks - num_staged_blocks, num_blocks),
            range(end - num_staged_rows, end),
        )
        self.rows: RowPool[Request] = RowPool(num_rows)
        self.regions: RowPool[Request] | None = RowPool(num_regions) if num_regions else None
        self._max_block_moves, self.prefix_grid = max_block_moves, prefix_grid
        self._can_rewind = can_rewind
        self._copies: list[Copy] = []
        # Blocks without content: allocated since the last copies were returned.
        self._fresh: set[int] = set()
        self.tiers: PrefixTiers | None = None
        self.host: HostBlocks | None = None
        self.prefixes: PrefixCache | None = None
        if caches_prefixes:
            self.prefixes = PrefixCache(
                self.blocks,
                block_size,
                range(num_rows, end - num_staged_rows),
                uses_blocks=uses_blocks,
                uses_rows=uses_rows,
                add_copy=self.add_copy,
                prefix_grid=prefix_grid,
                last_chunk=last_chunk,
            )

    def attach(self, tiers: PrefixTiers) -> None:
        """Store what the prefix cache evicts from now on.

        Args:
            tiers: with ``staged_units`` and ``add_copy`` of these allocations.
        """
        assert self.prefixes is not None, "expected a prefix cache"
        self.tiers = self.prefixes.tiers = tiers

    @classmethod
    def of(cls, limits: StepLimits) -> KVAllocations:
        """Create the pools of an engine."""
        return cls(
            limits.num_blocks,
            limits.block_size,
            limits.max_num_seqs,
            uses_blocks=limits.uses_blocks,
            caches_prefixes=limits.caches_prefixes,
            uses_rows=limits.uses_rows,
            num_snapshots=limits.num_snapshots,
            num_staged_blocks=limits.num_staged_blocks,
            num_staged_rows=limits.num_staged_rows,
            max_block_moves=limits.max_block_moves,
            prefix_grid=limits.prefix_grid,
            last_chunk=limits.last_chunk,
            num_regions=limits.num_regions,
            can_rewind=limits.can_rewind,
        )

    def add_copy(self, copy: Copy) -> None:
        """Execute a copy after all others so far, before the next step writes anything."""
        self._copies.append(copy)

    def restore_prefixes(self) -> None:
        """Take records into the prefix cache that have landed on the device since the last step."""
        if self.tiers is not None:
            self.tiers.advance(self._restored, lambda: self.blocks.num_free > 0)

    def _restored(self, piece: Piece) -> PrefixNode | None:
        assert self.prefixes is not None, "expected a prefix cache"
        return self.prefixes.restore(piece, self._allocate_one)

    def _allocate_one(self) -> int | None:
        if not self.num_available:
            return None
        [block] = self._allocate(1)
        self._fresh.discard(block)
        return block

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated: free ones, and idle ones of the prefix cache."""
        return self.blocks.num_free + self.blocks.num_idle

    @property
    def num_obtainable(self) -> int:
        """Number of blocks that requests can get: available ones, and as many as may move to the host."""
        return self.num_available + (0 if self.host is None else self.host.room_beside(self.blocks))

    @property
    def capacity(self) -> int:
        """Number of all blocks for requests, on the device and on the host."""
        return self.blocks.num_blocks + (0 if self.host is None else self.host.num_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that ``num_tokens`` tokens of one request need; 0 where no head needs blocks."""
        return -(-num_tokens // self.block_size) if self.uses_blocks else 0

    def num_blocks_due(self, request: Request, hit: PrefixHit | None = None) -> int:
        """Return how many more blocks the request needs for its known tokens and one more.

        The additional token is the one sampled next, unless that is the last one, which is never cached.

        Args:
            hit: the cached prefix that the request will begin with; blocks of it in use by others cost
                nothing.
        """
        num_tokens = min(request.num_tokens + 1, request.max_cached_tokens)
        num_held = 0 if hit is None or self.prefixes is None else self.prefixes.num_held(hit)
        return max(0, self.num_blocks_for(num_tokens) - request.num_blocks - num_held)

    @property
    def num_held_blocks(self) -> int:
        """Number of blocks of pinned prefixes."""
        if self.prefixes is None or not self.uses_blocks:
            return 0
        return self.prefixes.holds.num_nodes

    @property
    def num_needed_blocks(self) -> int:
        """Number of blocks of pinned prefixes that are in use, or were a moment ago."""
        return self.num_held_blocks and self.prefixes.holds.num_needed  # type: ignore[union-attr]

    def most_blocks(self, request: Request) -> int:
        """Return the most blocks that a request ever needs beside those of its pinned prefix."""
        needed = self.num_blocks_for(request.max_cached_tokens)
        hold = request.context
        if self.prefixes is None or hold is None or not hold.is_there or not self.uses_blocks:
            return needed
        is_reusable = hold.num_blocks * self.block_size <= self.prefixes.num_reusable(request)
        return needed - hold.num_blocks if is_reusable else needed

    def num_blocks_of_its_own(self, request: Request) -> int:
        """Return the blocks of the request that are not shared."""
        held = request.device_table.tolist()
        return len(request.host_blocks) + sum(self.blocks.num_holders(block) == 1 for block in held)

    def num_cached_tokens(self, hit: PrefixHit | None) -> int:
        """Return the number of cached tokens of a request that begins with a hit."""
        return 0 if hit is None or self.prefixes is None else self.prefixes.num_tokens(hit)

    def cached_blocks(self, hit: PrefixHit | None) -> list[int]:
        """Return the cached blocks of a request that begins with a hit."""
        return [] if hit is None or self.prefixes is None else self.prefixes.blocks_of(hit)

    def find(self, request: Request) -> PrefixHit | None:
        """Return the prefix cache's hit for a request; None without a cache."""
        return None if self.prefixes is None else self.prefixes.find(request)

    def open(self, request: Request, hit: PrefixHit | None = None) -> int:
        """Allocate the lowest free row to the request, and the blocks of a hit of the prefix cache.

        Returns:
            The number of its tokens that are cached now.

        Raises:
            ValueError: no row is free, or the request has a row already.
        """
        if request.row != NO_ROW:
            raise ValueError(f"request {request.request_id!r} already has row {request.row}")
        request.row = self.rows.acquire(request)
        request.num_blocks = 0
        request.reserve_block_table(self.num_blocks_for(request.max_cached_tokens))
        if hit is None or self.prefixes is None:
            return 0
        num_tokens = self.prefixes.take_up(request, hit)
        self._append_blocks(request, self.prefixes.blocks_of(hit))
        if hit.partial is not None and self.uses_blocks:
            self._append_copy(request, hit.partial.block)
        return num_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate the missing blocks for the first ``num_tokens`` tokens of a request.

        Where there are regions, a prompt is allocated one too, until its first decode.

        Returns:
            False, and the request has what it had, if too few blocks are free, those included that could
            move to the host.
        """
        missing = self.num_blocks_for(num_tokens) - request.num_blocks
        if missing > 0:
            if missing > self.num_available and self.host is not None:
                self._move_to_host(missing - self.num_available)
            if missing > self.num_available:
                return False
            self._append_blocks(request, self._allocate(missing))
        if self.regions is not None:
            # Tokens behind the last known one are drafts of a decode.
            if num_tokens - request.num_computed_tokens <= 1 or request.num_uncomputed_tokens == 1:
                self._release_region(request)
            elif request.region == NO_REGION:
                # There are as many as prompt rows in a step, and rows that continue already have theirs.
                request.region = self.regions.acquire(request)
        return True

    def _move_to_host(self, count: int) -> None:
        """Move up to ``count`` blocks to the host, from the requests with the most to move."""
        assert self.host is not None, "expected blocks on the host"
        opened = [self.rows.owner(row) for row in range(self.rows.num_rows)]
        requests = [each for each in opened if each is not None]
        self._copies += self.host.move(requests, count, self.blocks)

    def num_free_slots(self, request: Request) -> int:
        """Tokens behind the known ones for which the request has blocks, or free ones are left.

        Idle blocks of the prefix cache are not counted.
        """
        if not self.uses_blocks:
            return len(request.tokens)
        return (request.num_blocks + self.blocks.num_free) * self.block_size - request.num_tokens

    def shrink(self, request: Request) -> None:
        """Free the blocks of the request after its cached tokens."""
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        self.blocks.release(request.block_table[num_blocks : request.num_blocks].tolist())
        request.num_blocks = min(request.num_blocks, num_blocks)

    def release_prefix(self, request: Request) -> None:
        """Note that a request needs what it has cached no more; its blocks stay until they are freed."""
        if self.prefixes is not None:
            self.prefixes.release(request)

    def drop_last_block(self, request: Request) -> None:
        """Free the last block of the request, whose content is copied elsewhere before the next step."""
        request.num_blocks -= 1
        self.blocks.release([int(request.block_table[request.num_blocks])])

    def _release_region(self, request: Request) -> None:
        if self.regions is not None and request.region != NO_REGION:
            self.regions.release(request.region)
            request.region = NO_REGION

    def close(self, request: Request) -> None:
        """Free the row and all blocks of the request, except what the prefix cache stores.

        The numbers in ``block_table`` stay readable until the request is opened again: a step in flight may
        still read them.
        """
        if self.prefixes is not None:
            self.prefixes.release(request)
        self._release_region(request)
        self.rows.release(request.row)
        self.blocks.release(request.device_table.tolist())
        if request.host_blocks and self.host is not None:
            self.host.release(request)
        request.row = NO_ROW
        request.num_blocks = 0

    def fork(self, parent: Request, child: Request, num_tokens: int) -> bool:
        """Open ``child`` with the first ``num_tokens`` tokens of ``parent`` in its cache.

        Blocks that are full at ``num_tokens`` are shared. The next token of the child goes to a block of its
        own, which is allocated here and starts as a copy of the parent's where it begins with shared tokens.
        The row is copied whole, so the parent must not have cached more than one token beyond ``num_tokens``
        and the slack of its rings: that token is in the slot that the child writes next.

        Returns:
            False, and nothing has changed, if there is no free row or no free block, the parent has blocks
            on the host, or what a prompt stores depends on where it ends.
        """
        num_private = 1 if self.uses_blocks else 0
        if self.prefix_grid or not self._can_rewind:
            # The state of a row after the whole prompt differs from that before its last token.
            return False
        if self.rows.num_free == 0 or self.num_available < num_private or parent.host_blocks:
            return False
        self.open(child)
        if self.uses_blocks:
            num_shared = num_tokens // self.block_size
            shared = parent.block_table[:num_shared].tolist()
            self.blocks.share(shared)
            self._append_blocks(child, shared)
            if num_tokens % self.block_size:
                self._append_copy(child, int(parent.block_table[num_shared]))
            else:
                self._append_blocks(child, self._allocate(num_private))
        self._copies.append(RowCopy(parent.row, child.row))
        return True

    def adopt(self, hold: PrefixHold) -> Adoption:
        """Cache and pin a prefix with keys and values that the caller writes; see ``PrefixCache.adopt``.

        No copies may be pending, since they would be executed after the caller's writes.

        Raises:
            ValueError: too few blocks are available; requests use the others.
        """
        assert self.prefixes is not None, "expected a prefix cache"
        assert not self._copies, f"{len(self._copies)} copies wait"
        path = self.prefixes.tree.match(hold.namespace, hold.tokens)
        taken = [node.block for node in path] if self.uses_blocks else []
        missing = hold.num_blocks - len(path) if self.uses_blocks else 0
        available = self.num_available - sum(map(self.blocks.is_idle, taken))
        if missing > available:
            raise ValueError(f"expected {missing} blocks that requests do not hold, got {available}")
        self.blocks.share(taken)  # so that they are not evicted for the others
        # The caller writes before the copies that would store what is evicted.
        taken += self._allocate(missing, is_stored=False)
        self._fresh.clear()
        adopted = self.prefixes.adopt(hold, path, taken[len(path) :])
        self.blocks.release(taken)
        return adopted

    def withdraw(self, adopted: Adoption) -> None:
        """Undo ``adopt`` for a prefix that could not be written."""
        assert self.prefixes is not None, "something was cached"
        self.prefixes.withdraw(adopted)

    def take_copies(self) -> tuple[Copy, ...]:
        """Compact the used rows and blocks, and return all pending copies, in order of execution.

        Updates the tables of open requests. A device that reads a slice of the store then reads no idle
        blocks, except those that later steps will move.
        """
        for move in self.rows.compact():
            move.owner.row = move.dst
            self._copies.append(RowCopy(move.src, move.dst))
        if moves := self.blocks.compact(self._max_block_moves):
            self._bring_blocks_down(moves)
        copies, self._copies = tuple(self._copies), []
        self._fresh.clear()
        return copies

    def _bring_blocks_down(self, moves: Sequence[BlockMove]) -> None:
        now = np.arange(self.blocks.num_blocks, dtype=np.int32)
        for move in moves:
            now[[move.src, move.dst]] = move.dst, move.src
            self._copies += self._copies_of(move)
            if self.prefixes is not None:
                self.prefixes.exchange(move)
        for row in range(self.rows.num_used):
            request = self.rows.owner(row)
            assert request is not None, "expected dense used rows"
            table = request.device_table
            table[:] = now[table]

    def _copies_of(self, move: BlockMove) -> list[Copy]:
        if move.src in self._fresh:
            return [BlockCopy(move.dst, move.src)] if move.is_exchange else []
        return [BlockSwap(*move[:2]) if move.is_exchange else BlockCopy(*move[:2])]

    def _allocate(self, count: int, *, is_stored: bool = True) -> list[int]:
        """Allocate available blocks, evicting idle ones; see ``PrefixCache.evict``."""
        if self.prefixes is not None and count > self.blocks.num_free:
            self.prefixes.evict(count - self.blocks.num_free, is_stored=is_stored)
        blocks = self.blocks.allocate(count)
        self._fresh.update(blocks)
        return blocks

    def _append_copy(self, request: Request, block: int) -> None:
        """Allocate one more block to a request, which starts as a copy of another one."""
        [own] = self._allocate(1)
        self._copies.append(BlockCopy(block, own))
        self._fresh.discard(own)
        self._append_blocks(request, [own])

    def _append_blocks(self, request: Request, blocks: list[int]) -> None:
        end = request.num_blocks + len(blocks)
        request.block_table[request.num_blocks : end] = blocks
        request.num_blocks = end
